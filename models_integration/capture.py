"""What a policy is shown: q, k (and v) of chosen layers after RoPE, while the model attends as it always does.

An attention function is registered under a name of its own. It notes what it is given, where it is asked to, and
calls the model's own attention. For the time of one forward the config names it; then the config is as it was.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models_integration.architecture import IMPLEMENTATIONS, Architecture
from models_integration.visibility import retained_mask
from spec.errors import SpecError
from spec.policy import LayerView, Needs

__all__ = ["Recorder", "observing"]

AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Arguments of attention functions that change the weights in ways that S1 does not know.
_UNKNOWN_TO_THE_SPEC = {"s_aux": "attention sinks inside the softmax", "position_bias": "a position bias"}


@dataclass(frozen=True)
class _Seen:
    q: Tensor
    k: Tensor
    v: Tensor | None
    scaling: float
    softcap: float | None


@dataclass
class Recorder:
    """Collects what `needs` asks for, from row 0 of one forward."""

    needs: Needs
    seen: dict[int, _Seen] = field(default_factory=dict)

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
        """Note one layer's inputs: query (rows, H, n, d), key and value (rows, H_kv, n, d).

        Raises:
            SpecError: for a dtype or an attention that the specification does not cover.
        """
        for name, what in _UNKNOWN_TO_THE_SPEC.items():
            if options.get(name) is not None:
                raise SpecError("model", type(module).__name__, f"{what} is not served")
        if query.dtype not in _DTYPES:
            raise SpecError("dtype", query.dtype, f"must be one of {', '.join(map(str, _DTYPES))}")
        rows = self.needs.query_rows
        # The last rows are copied, so that the others need not live until the decision.
        q = query[0] if rows is None else query[0, :, query.shape[2] - min(rows, query.shape[2]) :].clone()
        scaling = options.get("scaling")
        self.seen[cast(int, module.layer_idx)] = _Seen(
            q.detach(), key[0].detach(), value[0].detach() if self.needs.values else None,
            query.shape[-1] ** -0.5 if scaling is None else float(scaling), options.get("softcap"),
        )

    def views(self) -> dict[int, LayerView]:
        """What was seen, on the host: half precision as float32, which is exact."""
        return {
            layer: LayerView(_host(seen.q), _host(seen.k), None if seen.v is None else _host(seen.v), seen.scaling,
                             seen.softcap)
            for layer, seen in self.seen.items()
        }


def _host(tensor: Tensor) -> Any:
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.cpu().numpy()


# Who watches which attention module, for the time of one forward.
_RECORDERS: WeakKeyDictionary[nn.Module, Recorder] = WeakKeyDictionary()


def _layers_to_watch(needs: Needs, architecture: Architecture) -> Sequence[int]:
    if needs.layers == "none":
        return ()
    return (architecture.observed,) if needs.layers == "observed" else architecture.full_layers


@contextmanager
def observing(architecture: Architecture, recorder: Recorder | None) -> Iterator[None]:
    """Route this model's attention and masks through ours, and layers that the recorder needs past the recorder."""
    config = architecture.config
    stock = config._attn_implementation
    ours = _register(stock)
    watched = () if recorder is None else _layers_to_watch(recorder.needs, architecture)
    modules = [architecture.attention[layer] for layer in watched]
    # The public setter would also write to sub-configs.
    config._attn_implementation_internal = ours
    try:
        for module in modules:
            assert recorder is not None
            _RECORDERS[module] = recorder
        yield
    finally:
        config._attn_implementation_internal = stock
        for module in modules:
            _RECORDERS.pop(module, None)


def _register(stock: str) -> str:
    assert stock in IMPLEMENTATIONS
    ours = f"kvspec_{stock}"
    if ours not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ours, _observed(stock))
        # Without its own mask function, an attention name gets no mask at all: cached continuation would be wrong.
        AttentionMaskInterface.register(ours, retained_mask(ALL_MASK_ATTENTION_FUNCTIONS[stock]))
    return ours


def _observed(stock: str) -> AttentionFunction:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        recorder = _RECORDERS.get(module)
        if recorder is not None:
            recorder.record(module, query, key, value, options)
        return _own_attention(stock, module)(module, query, key, value, attention_mask, **options)

    return attention


def _own_attention(stock: str, module: nn.Module) -> AttentionFunction:
    # Eager attention belongs to each modelling file: it is where a model's own softcap lives.
    own: AttentionFunction = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(stock, own)
    return function
