"""Capture of q, k (and v) of chosen layers after RoPE. The computation of the model does not change.

kvspec registers an attention function under a new name. This function calls the model's own attention, and passes the
inputs to the layer's watcher. The model's config has the new name only during a forward pass.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models_integration.attention.cached_attention import (
    AttentionFunction,
    LayerMasks,
    chosen_alone,
    ragged_attention,
    retained_mask,
)
from models_integration.attention.flash import flash_attention
from models_integration.attention.hidden import hidden_of, reading_hidden
from models_integration.cache.dense_layer import RetainedLayer, on_host
from models_integration.cache.positions import EMPTY, select_columns
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import ELSEWHERE, IMPLEMENTATIONS, OURS, Architecture
from models_integration.model.seams import attention_of, eager_attention, replace_attention
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Repeat

__all__ = [
    "NO_HIDDEN", "OTHER_TENSORS", "AttentionInputs", "Recorder", "Repeated", "Watcher", "observing", "reads_attention",
    "untraced",
]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class AttentionInputs:
    """Attention inputs of a layer: query (rows, H, n, d), key and value (rows, H_kv, live, d), or of a ragged layer."""

    layer: int
    """Index of the layer."""
    query: Tensor
    key: Tensor
    value: Tensor
    lse: Tensor | None
    """Log-sum-exp (rows, H, n), or None if the attention did not return it."""
    mask: object
    """Mask that the module passed to the attention function."""
    options: Mapping[str, Any]
    hidden: Tensor | None = None
    """Hidden states (rows, n, width) that the attention module received. None if the watcher does not want them."""


OTHER_TENSORS = "the attention must use the keys and values that the cache returns, but uses different tensors"
NO_HIDDEN = "the attention shows no hidden states: use an uncompiled model, or a policy without hidden states"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reads_attention(needs: Needs) -> bool:
    """Return True if a scorer needs queries, of the prompt or of the repetition of the prompt."""
    return needs.layers != "none" and (needs.query_rows != 0 or needs.rehearsal is not None)


class Watcher(ABC):
    """Observer that is called at each attention step of the observed layers."""

    def wants_lse(self, layer: int) -> bool:
        """Return True if the log-sum-exp of the layer's attention is useful. Default: it is not."""
        return False

    @property
    def wants_hidden(self) -> bool:
        """True if the hidden states that the attention receives are wanted. Default: they are not."""
        return False

    @abstractmethod
    def attended(self, module: nn.Module, seen: AttentionInputs) -> None:
        """Handle the inputs of a layer's attention, after the last use of the keys and values in this forward pass."""


class Repeated(NamedTuple):
    """Attention inputs of one layer while the model repeated the chunk from start to stop after the prompts."""

    start: int
    stop: int
    q: Tensor
    """Queries, (rows, H, r, d)."""
    k: Tensor
    """Keys, (rows, H_kv, r, d)."""
    norms: Tensor
    """L2 norms of the hidden states at the input of the attention, (rows, r)."""

    def of_row(self, row: int, accepts_tensor: Callable[[Tensor], bool] | None) -> Repeat:
        """Return the inputs of one row, on the host unless the scorer accepts these tensors."""
        parts = [part[row] for part in (self.q, self.k, self.norms)]
        taken = accepts_tensor is not None and all(map(accepts_tensor, parts))
        return Repeat(self.start, self.stop, *(parts if taken else map(on_host, parts)))


@dataclass
class _Seen:
    q: Tensor
    k: Tensor
    v: Tensor | None
    scaling: float
    softcap: float | None
    lse: Tensor | None
    sinks: Tensor | None
    query: ref[Tensor]
    """Query tensor of the last forward pass. `q` contains the needed rows of this tensor."""
    hidden: Tensor | None
    """Hidden states (rows, n, width) of all columns of the segment."""
    repeats: tuple[Repeated, ...] | None = None


@dataclass
class Recorder:
    """Collects the tensors that `needs` declares, over all forward passes of one segment."""

    needs: Needs
    seen: dict[int, _Seen] = field(default_factory=dict)
    padding: int = 0
    """Largest number of padding columns in a row of the segment. The same number of additional queries is recorded."""
    latent: bool = False
    """True if the cache stores latents from which the model computes the keys and values of the heads."""

    def record(self, module: nn.Module, layer: AttentionInputs) -> None:
        """Record the attention inputs of one layer.

        Queries of later forward passes are appended. The last keys and values contain all earlier keys and values. If a
        layer attends twice with the same query tensor, the queries are recorded once.

        Raises:
            SpecError: if the specification does not cover the dtype or the attention.
        """
        if layer.options.get("position_bias") is not None and reads_attention(self.needs):
            raise SpecError("model", type(module).__name__, "attention with a position bias is not supported")
        q, sinks = layer.query.detach(), layer.options.get("s_aux")
        if q.dtype not in _DTYPES:
            raise SpecError("dtype", q.dtype, f"must be one of {', '.join(map(str, _DTYPES))}")
        index, scaling, hidden = layer.layer, layer.options.get("scaling"), layer.hidden
        if index in self.seen and self.seen[index].query() is layer.query:
            return
        if self.needs.hidden and hidden is None:
            raise SpecError("model", type(module).__name__, NO_HIDDEN)
        if index in self.seen:
            before = self.seen[index]
            q = torch.cat([before.q, q], dim=2)
            hidden = None if before.hidden is None or hidden is None else torch.cat([before.hidden, hidden], dim=1)
        self.seen[index] = self._needed(_Seen(
            q, layer.key.detach(), layer.value.detach(),
            q.shape[-1] ** -0.5 if scaling is None else float(scaling), layer.options.get("softcap"),
            None if layer.lse is None else layer.lse.detach(), None if sinks is None else sinks.detach(),
            ref(layer.query), hidden,
        ))

    def rehearsed(self, repeats: Mapping[int, tuple[Repeated, ...]]) -> None:
        """Record the attention inputs of the repetition of the prompt."""
        for layer, each in repeats.items():
            self.seen[layer].repeats = each

    def _needed(self, seen: _Seen) -> _Seen:
        """Return only the needed values, hidden states and query rows."""
        q, lse, v = seen.q, seen.lse, seen.v if self.needs.values else None
        hidden = seen.hidden if self.needs.hidden else None
        rows = q.shape[2] if self.needs.query_rows is None else self.needs.query_rows + self.padding
        if rows < q.shape[2]:
            # The last rows are copied, so that the memory of all other rows is freed before the decision.
            q = q[:, :, q.shape[2] - rows :].clone()
            lse = None if lse is None else lse[:, :, lse.shape[2] - rows :]
        return replace(seen, q=q, v=v, lse=lse, hidden=hidden)

    def narrowed(self, needs: Needs, layers: Iterable[int]) -> "Recorder":
        """Return the recorder that these needs and layers would have had after the same forward passes.

        Raises:
            SpecError: if this recorder has fewer tensors.
        """
        recorded, narrow = self.needs, Recorder(needs, padding=self.padding, latent=self.latent)
        fewer = recorded.query_rows is not None and (needs.query_rows is None or needs.query_rows > recorded.query_rows)
        fewer |= needs.rehearsal is not None and needs.rehearsal != recorded.rehearsal
        for layer in layers:
            lacks = (needs.values and not recorded.values) or (needs.hidden and not recorded.hidden)
            if layer not in self.seen or fewer or lacks:
                raise SpecError(
                    "observation", recorded,
                    f"lacks tensors that the policy needs; call kvspec.observe(..., needs={needs})",
                )
            # A session requests the log-sum-exp only if the observed layer alone decides.
            lse = self.seen[layer].lse if needs.layers == "observed" else None
            narrow.seen[layer] = narrow._needed(replace(self.seen[layer], lse=lse))
        return narrow

    def views(self, row: int, slots: Tensor | None = None, queries: Tensor | None = None) -> dict[int, LayerView]:
        """Return the recorded inputs of one row, by layer.

        Tensors that the scorer accepts are unchanged. All other tensors become NumPy arrays, and half precision becomes
        float32.

        Args:
            row: index of the row.
            slots: slots with a token of the row, (stored,). None means all slots.
            queries: columns of the segment with a token of the row, (n,). None means all columns.
        """
        return {layer: self._view(seen, row, slots, queries) for layer, seen in self.seen.items()}

    def _view(self, seen: _Seen, row: int, slots: Tensor | None, queries: Tensor | None) -> LayerView:
        v = None if seen.v is None else select_columns(seen.v[row], slots)
        lse = None if seen.lse is None else seen.lse[row]
        hidden = None if seen.hidden is None else select_columns(seen.hidden[row][None], queries)[0]
        asked = self._asked(seen.q[row], queries)
        view = self._shown(seen, asked, select_columns(seen.k[row], slots), v, lse, hidden=hidden)
        if self.needs.rehearsal is None or seen.repeats is None:
            return view
        return replace(view, repeats=tuple(each.of_row(row, self.needs.accepts_tensor) for each in seen.repeats))

    def view(
        self, index: int, row: int, heads: slice, layer: RetainedLayer, kv_heads: slice, queries: Tensor | None = None,
    ) -> LayerView:
        """Return queries of some heads of one row, with the keys and values that KV heads of a layer store now."""
        seen = self.seen[index]
        k, v = self._expanded(seen, row, layer) if self.latent else layer.held(row, kv_heads)
        k, v = k.detach(), None if v is None else v.detach()
        asked = self._asked(seen.q[row, heads], queries)
        return self._shown(seen, asked, k, v if self.needs.values else None, None, heads)

    def _expanded(self, seen: _Seen, row: int, layer: RetainedLayer) -> tuple[Tensor, Tensor | None]:
        """Return the keys and values (H, stored, d) that the model computed from the latents of one row."""
        stored = layer.stored_positions()
        slots = stored[row if len(stored) > 1 else 0] != EMPTY
        return select_columns(seen.k[row], slots), None if seen.v is None else select_columns(seen.v[row], slots)

    def _asked(self, q: Tensor, queries: Tensor | None) -> Tensor:
        """Return the queries (H, n, d) of tokens, limited to the needed number."""
        noted = q.shape[1]
        q = select_columns(q, None if queries is None else queries[len(queries) - noted :])
        return q[:, max(0, q.shape[1] - (noted if self.needs.query_rows is None else self.needs.query_rows)) :]

    def _shown(
        self, seen: _Seen, q: Tensor, k: Tensor, v: Tensor | None, lse: Tensor | None, heads: slice = slice(None),
        hidden: Tensor | None = None,
    ) -> LayerView:
        accepts_tensor, sinks = self.needs.accepts_tensor, None if seen.sinks is None else seen.sinks[heads]
        given = [tensor for tensor in (q, k, v, hidden) if tensor is not None]
        if accepts_tensor is None or not all(map(accepts_tensor, given)):
            q, k, v, lse, sinks, hidden = map(on_host, (q, k, v, lse, sinks, hidden))
        return LayerView(q, k, v, seen.scaling, seen.softcap, lse, sinks=sinks, hidden=hidden)


# Layer index and watcher of each observed attention module, during a forward pass.
_WATCHERS: WeakKeyDictionary[nn.Module, tuple[int, Watcher]] = WeakKeyDictionary()
# Cache layer that each full-attention module uses, during a forward pass.
_READS: WeakKeyDictionary[nn.Module, RetainedLayer] = WeakKeyDictionary()


@contextmanager
def observing(
    architecture: Architecture, cache: RetainedCache, watcher: Watcher | None = None, layers: Iterable[int] = (),
) -> Iterator[None]:
    """Context manager that installs kvspec's attention and masks in a model, with a watcher for some layers."""
    config = architecture.config
    stock = attention_of(config)
    if stock.startswith(OURS):
        raise SpecError("model", architecture.name, ELSEWHERE)
    ours = _register(stock)
    # The public setter would also write to sub-configs, whose attention kvspec does not observe (transformers 5.24).
    replace_attention(config, ours)
    try:
        for index in layers:
            assert watcher is not None
            _WATCHERS[architecture.attention[index]] = index, watcher
        # Layers with equal positions share one mask per forward pass, so no layer is registered here.
        for index, owner in architecture.owners.items() if cache.layers_differ else ():
            layer = cache.layers[owner]
            assert isinstance(layer, RetainedLayer)
            _READS[architecture.attention[index]] = layer
        watched = [architecture.attention[index] for index in layers]
        with cache.in_context(), reading_hidden(watched if watcher is not None and watcher.wants_hidden else ()):
            yield
    finally:
        replace_attention(config, stock)
        for module in architecture.attention.values():
            _WATCHERS.pop(module, None)
            _READS.pop(module, None)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function excluded from torch.compile. A compiled graph ends before the function and restarts after it.

    Use it for functions that depend on the module, the cache or the forward pass, because a trace would make these
    values constant. Loading the compiler takes seconds, so this function never loads the compiler.
    """
    skipped: list[Callable[P, R]] = []  # made once, because making it is slow

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # torch 2.13 imports this module with the compiler, so without the module no code is compiled.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not skipped:
            skipped.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]  # by torch
        return skipped[0](*args, **kwargs)

    return run


def _register(stock: str) -> str:
    assert stock in IMPLEMENTATIONS
    ours = f"{OURS}{stock}"
    if ours not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ours, untraced(_observed(stock)))
        # transformers 5.24 makes no mask for a name that has no mask function, and the results would be wrong.
        AttentionMaskInterface.register(ours, untraced(retained_mask(ALL_MASK_ATTENTION_FUNCTIONS[stock])))
    return ours


def _observed(stock: str) -> AttentionFunction:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        stock_attention, layer = _stock_attention(stock, module), _READS.get(module)
        index, watcher = _WATCHERS.get(module, (0, None))
        output: tuple[Tensor, Tensor | None]
        both = None
        if isinstance(layer, RaggedLayer):
            # The flat tensors must be those that the layer returned. Rearranged or different tensors cannot be used.
            if key is not layer.keys or value is not layer.values:
                raise SpecError("model", type(module).__name__, OTHER_TENSORS)
            output = ragged_attention(stock_attention, module, query, layer, attention_mask, options), None
        else:
            attention_mask = _mask(module, layer, query, key, attention_mask, options)
            if stock == "sdpa" and attention_mask is None and watcher is not None and watcher.wants_lse(index):
                both = flash_attention(module, query, key, value, options)
            output = (both[0], None) if both else stock_attention(module, query, key, value, attention_mask, **options)
        if watcher is not None:
            lse, hidden = both[1] if both else None, hidden_of(module)
            watcher.attended(module, AttentionInputs(index, query, key, value, lse, attention_mask, options, hidden))
        return output

    return attention


def _mask(
    module: nn.Module, layer: object, query: Tensor, key: Tensor, given: Tensor | LayerMasks | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Return the mask of one layer. Remove the choice of an indexer from the options, and apply it to the mask."""
    if isinstance(given, LayerMasks):
        assert isinstance(layer, RetainedLayer)
        given = given.of(layer.rows, layer.stored_length, layer.get_seq_length())
    # Models with an indexer pass its choice as an option if the name is neither "eager" nor "sdpa" (5.24).
    chosen = options.pop("indices", None)
    if chosen is not None:
        given = chosen_alone(cast(Tensor, given), chosen)
    # If few logits are requested, Gemma 4 passes only the last queries to layers that share keys (5.24).
    if given is None and getattr(module, "is_kv_shared_layer", False):
        given = _causal_mask(query, key)
    return given


def _causal_mask(query: Tensor, key: Tensor) -> Tensor | None:
    """Return a causal mask for the last queries of a prompt, for layers that share a cache and receive no mask.

    The result is None if no mask is needed.
    """
    q, n = query.shape[2], key.shape[2]
    return torch.ones(q, n, dtype=torch.bool, device=query.device).tril(n - q) if 1 < q < n else None


def _stock_attention(stock: str, module: nn.Module) -> AttentionFunction:
    eager = eager_attention(module)
    assert eager is not None  # otherwise the model is refused
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(stock, eager)
    return function
