"""What a policy is shown: q, k (and v) of chosen layers after RoPE, while the model attends as it always does.

An attention function is registered under a name of its own. It shows what it is given to whoever watches the layer,
calls the model's own attention, and says when that is done. For the time of one forward the config names it; then the
config is as it was.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models_integration.attention.masks import AttentionFunction, LayerMasks, chosen_alone, retained_mask
from models_integration.attention.ragged_attention import ragged_attention
from models_integration.cache.dense_layer import RetainedLayer, on_host
from models_integration.cache.positions import EMPTY, shown_columns
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import IMPLEMENTATIONS, Architecture
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Repeat

__all__ = [
    "OTHER_TENSORS", "Attended", "Recorder", "Repeated", "Watcher", "flash_attention", "observing", "reads_attention",
    "untraced",
]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Attended:
    """What one layer attended with: query (rows, H, n, d), key and value (rows, H_kv, live, d), or a ragged layer's."""

    layer: int
    """Index of the layer."""
    query: Tensor
    key: Tensor
    value: Tensor
    lse: Tensor | None
    """(rows, H, n), where it came with the output."""
    mask: object
    """What the module handed on as its mask."""
    options: Mapping[str, Any]


OTHER_TENSORS = "its attention gets different keys or values than its cache returned"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Heads that the kernel takes as they are: others are padded first, by torch, on CUDA.
_CUDA_WIDTHS = range(8, 257, 8)
_KERNELS = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}


def reads_attention(needs: Needs) -> bool:
    """Whether a scorer reads queries, of this prompt or of its repeat: attention weights follow from them."""
    return needs.layers != "none" and (needs.query_rows != 0 or needs.rehearsal is not None)


class Watcher(Protocol):
    """Is told of every attention of the layers that it watches."""

    def wants_lse(self, layer: int) -> bool:
        """Whether the attention's log-sum-exp would be of use."""
        ...

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """A layer has attended: nobody reads its keys and values again in this forward."""
        ...


class Repeated(NamedTuple):
    """What one layer attended with while a chunk of the prompts, start to stop, was repeated behind them."""

    start: int
    stop: int
    q: Tensor
    """(rows, H, r, d)."""
    k: Tensor
    """(rows, H_kv, r, d)."""
    norms: Tensor
    """Of the hidden states that it read, (rows, r)."""

    def of_row(self, row: int, accepts_tensor: Callable[[Tensor], bool] | None) -> Repeat:
        """One row's, on the host unless a scorer takes such tensors."""
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
    """The last forward's own, of which `q` holds the rows."""
    repeats: tuple[Repeated, ...] | None = None


@dataclass
class Recorder:
    """Collects what `needs` asks for, over the forwards of one segment."""

    needs: Needs
    seen: dict[int, _Seen] = field(default_factory=dict)
    hidden: int = 0
    """Columns of the segment, at most, that hold no token of a row: so many queries more are noted."""
    latent: bool = False
    """Whether the cache stores latents, of which the model makes the keys and values of its heads."""

    def record(self, module: nn.Module, layer: Attended) -> None:
        """Note one layer's inputs.

        Queries of one layer's later forwards follow its earlier ones; its last keys and values hold all of them. A
        layer that attends twice with the same queries has asked once.

        Raises:
            SpecError: for a dtype or an attention that the specification does not cover.
        """
        if layer.options.get("position_bias") is not None and reads_attention(self.needs):
            raise SpecError("model", type(module).__name__, "attention with a position bias is not supported")
        q, sinks = layer.query.detach(), layer.options.get("s_aux")
        if q.dtype not in _DTYPES:
            raise SpecError("dtype", q.dtype, f"must be one of {', '.join(map(str, _DTYPES))}")
        index, scaling = layer.layer, layer.options.get("scaling")
        if index in self.seen and self.seen[index].query() is layer.query:
            return
        if index in self.seen:
            q = torch.cat([self.seen[index].q, q], dim=2)
        self.seen[index] = self._needed(_Seen(
            q, layer.key.detach(), layer.value.detach(),
            q.shape[-1] ** -0.5 if scaling is None else float(scaling), layer.options.get("softcap"),
            None if layer.lse is None else layer.lse.detach(), None if sinks is None else sinks.detach(),
            ref(layer.query),
        ))

    def rehearsed(self, repeats: Mapping[int, tuple[Repeated, ...]]) -> None:
        """Note what the layers attended with when the prompt was rehearsed."""
        for layer, each in repeats.items():
            self.seen[layer].repeats = each

    def _needed(self, seen: _Seen) -> _Seen:
        """No more values and query rows than are needed."""
        q, lse, v = seen.q, seen.lse, seen.v if self.needs.values else None
        rows = q.shape[2] if self.needs.query_rows is None else self.needs.query_rows + self.hidden
        if rows < q.shape[2]:
            # The last rows are copied, so that the others need not live until the decision.
            q = q[:, :, q.shape[2] - rows :].clone()
            lse = None if lse is None else lse[:, :, lse.shape[2] - rows :]
        return replace(seen, q=q, v=v, lse=lse)

    def narrowed(self, needs: Needs, layers: Iterable[int]) -> "Recorder":
        """What a recorder with these needs would have noted of these layers in the same forwards.

        Raises:
            SpecError: where this one has noted less.
        """
        own, narrow = self.needs, Recorder(needs, hidden=self.hidden, latent=self.latent)
        fewer = own.query_rows is not None and (needs.query_rows is None or needs.query_rows > own.query_rows)
        fewer |= needs.rehearsal is not None and needs.rehearsal != own.rehearsal
        for layer in layers:
            if layer not in self.seen or fewer or (needs.values and not own.values):
                raise SpecError(
                    "observation", own, f"lacks tensors that the policy reads; call kvspec.observe(..., needs={needs})"
                )
            # A session asks for the sum where the observed layer decides alone.
            lse = self.seen[layer].lse if needs.layers == "observed" else None
            narrow.seen[layer] = narrow._needed(replace(self.seen[layer], lse=lse))
        return narrow

    def views(self, row: int, slots: Tensor | None = None, queries: Tensor | None = None) -> dict[int, LayerView]:
        """What was seen of one row.

        On the host, half precision as float32, which is exact; or as it is, where the scorer takes such tensors.

        Args:
            row: which.
            slots: those that hold a token of it, (stored,); all where None.
            queries: the segment's columns that do, (n,); all where None.
        """
        return {layer: self._view(seen, row, slots, queries) for layer, seen in self.seen.items()}

    def _view(self, seen: _Seen, row: int, slots: Tensor | None, queries: Tensor | None) -> LayerView:
        v = None if seen.v is None else shown_columns(seen.v[row], slots)
        lse = None if seen.lse is None else seen.lse[row]
        view = self._shown(seen, self._asked(seen.q[row], queries), shown_columns(seen.k[row], slots), v, lse)
        if self.needs.rehearsal is None or seen.repeats is None:
            return view
        return replace(view, repeats=tuple(each.of_row(row, self.needs.takes) for each in seen.repeats))

    def view(
        self, index: int, row: int, heads: slice, layer: RetainedLayer, kv_heads: slice, queries: Tensor | None = None,
    ) -> LayerView:
        """What these query heads of one row asked, beside the keys and values that KV heads of a layer now store."""
        seen = self.seen[index]
        k, v = self._expanded(seen, row, layer) if self.latent else layer.held(row, kv_heads)
        asked = self._asked(seen.q[row, heads], queries)
        return self._shown(seen, asked, k, v if self.needs.values else None, None, heads)

    def _expanded(self, seen: _Seen, row: int, layer: RetainedLayer) -> tuple[Tensor, Tensor | None]:
        """Keys and values (H, stored, d) that the model has made of the latents of one row."""
        stored = layer.stored_positions()
        slots = stored[row if len(stored) > 1 else 0] != EMPTY
        return shown_columns(seen.k[row], slots), None if seen.v is None else shown_columns(seen.v[row], slots)

    def _asked(self, q: Tensor, queries: Tensor | None) -> Tensor:
        """The queries (H, n, d) that are a token's, and no more than asked for."""
        noted = q.shape[1]
        q = shown_columns(q, None if queries is None else queries[len(queries) - noted :])
        return q[:, max(0, q.shape[1] - (noted if self.needs.query_rows is None else self.needs.query_rows)) :]

    def _shown(
        self, seen: _Seen, q: Tensor, k: Tensor, v: Tensor | None, lse: Tensor | None, heads: slice = slice(None),
    ) -> LayerView:
        accepts_tensor, sinks = self.needs.takes, None if seen.sinks is None else seen.sinks[heads]
        if accepts_tensor is None or not all(accepts_tensor(tensor) for tensor in (q, k, v) if tensor is not None):
            q, k, v, lse, sinks = on_host(q), on_host(k), on_host(v), on_host(lse), on_host(sinks)
        return LayerView(q, k, v, seen.scaling, seen.softcap, lse, sinks=sinks)


# Who watches which attention module, and of which layer, for the time of one forward.
_WATCHERS: WeakKeyDictionary[nn.Module, tuple[int, Watcher]] = WeakKeyDictionary()
# The layer of a cache that a full-attention module reads, for the time of one forward.
_READS: WeakKeyDictionary[nn.Module, RetainedLayer] = WeakKeyDictionary()


@contextmanager
def observing(
    architecture: Architecture, cache: RetainedCache, watcher: Watcher | None = None, layers: Iterable[int] = (),
) -> Iterator[None]:
    """Route this model's attention and masks through ours, and these layers' attention past the watcher."""
    config = architecture.config
    stock = config._attn_implementation
    ours = _register(stock)
    # The public setter would also write to sub-configs.
    config._attn_implementation_internal = ours
    try:
        for index in layers:
            assert watcher is not None
            _WATCHERS[architecture.attention[index]] = index, watcher
        # Layers that agree share the forward's one mask: none of them need be asked.
        for index, owner in architecture.owners.items() if cache.layers_differ else ():
            layer = cache.layers[owner]
            assert isinstance(layer, RetainedLayer)
            _READS[architecture.attention[index]] = layer
        with cache.in_context():
            yield
    finally:
        config._attn_implementation_internal = stock
        for module in architecture.attention.values():
            _WATCHERS.pop(module, None)
            _READS.pop(module, None)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which torch.compile neither traces nor looks into: its graphs end here and begin behind.

    For what works by module, by cache and by forward, which a trace would freeze. The compiler takes seconds to load,
    so that nothing is asked of it before somebody else has loaded it.
    """
    skipped: list[Callable[P, R]] = []  # made once: that takes longer than many a call

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not skipped:
            skipped.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]  # by torch
        return skipped[0](*args, **kwargs)

    return run


def _register(stock: str) -> str:
    # Continuous batching hands its own masks over, so that of a "paged|" name none is made.
    plain = stock.removeprefix("paged|")
    assert plain in IMPLEMENTATIONS
    ours = f"kvspec_{stock}"
    if ours not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ours, untraced(_observed(stock)))
        # Without its own mask function, an attention name gets no mask at all: cached continuation would be wrong.
        AttentionMaskInterface.register(ours, untraced(retained_mask(ALL_MASK_ATTENTION_FUNCTIONS[plain])))
    return ours


def _observed(stock: str) -> AttentionFunction:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        own, layer = _own_attention(stock, module), _READS.get(module)
        index, watcher = _WATCHERS.get(module, (0, None))
        if isinstance(layer, RaggedLayer):
            # What stands for the heads' tokens is what the layer returned: it cannot be rearranged, or another's.
            if key is not layer.keys or value is not layer.values:
                raise SpecError("model", type(module).__name__, OTHER_TENSORS)
            merged = ragged_attention(own, module, query, layer, attention_mask, options)
            if watcher is not None:
                watcher.attended(module, Attended(index, query, key, value, None, attention_mask, options))
            return merged, None
        if isinstance(attention_mask, LayerMasks):
            assert layer is not None
            attention_mask = attention_mask.of(layer.rows, layer.stored_length, layer.get_seq_length())
        chosen = options.pop("indices", None)
        if chosen is not None:
            attention_mask = chosen_alone(cast(Tensor, attention_mask), chosen)
        if attention_mask is None and getattr(module, "is_kv_shared_layer", False):
            attention_mask = _causal_mask(query, key)
        if watcher is None:
            return own(module, query, key, value, attention_mask, **options)
        both = None
        if stock == "sdpa" and attention_mask is None and watcher.wants_lse(index):
            both = flash_attention(module, query, key, value, options)
        if both is None:
            output, lse = own(module, query, key, value, attention_mask, **options), None
        else:
            output, lse = (both[0], None), both[1]
        watcher.attended(module, Attended(index, query, key, value, lse, attention_mask, options))
        return output

    return attention


def _causal_mask(query: Tensor, key: Tensor) -> Tensor | None:
    """The mask of the last queries of a prompt: a model may give no others to layers that share a cache.

    None if no mask is needed.
    """
    q, n = query.shape[2], key.shape[2]
    return torch.ones(q, n, dtype=torch.bool, device=query.device).tril(n - q) if 1 < q < n else None


def _own_attention(stock: str, module: nn.Module) -> AttentionFunction:
    # Eager attention belongs to each modelling file: it is where a model's own softcap lives.
    own: AttentionFunction = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(stock, own)
    return function


def flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any],
) -> tuple[Tensor, Tensor] | None:
    """Causal attention without a mask: its output (rows, n, H, d) and log-sum-exp (rows, H, n), from one pass.

    None unless `scaled_dot_product_attention` would itself choose this very kernel for this very call, so that the
    output has the model's own bits. On a CPU half precision gives None too: there the kernel rounds the logits.
    """
    n, scaling = query.shape[2], options.get("scaling")
    plain = (
        1 < n == key.shape[2] and key.shape == value.shape and not options.get("dropout")
        and options.get("is_causal", None) in (None, True) and getattr(module, "is_causal", True)
        and all(options.get(name) is None for name in ("softcap", "position_bias", "s_aux"))
    )
    kernel = getattr(torch.ops.aten, _KERNELS.get(query.device.type, ""), None)
    if not plain or kernel is None or torch.is_autocast_enabled(query.device.type):
        return None
    grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scaling, enable_gqa=grouped)
    if chosen != SDPBackend.FLASH_ATTENTION.value or not _exact(query):
        return None
    output, lse = kernel(query, key, value, 0.0, True, scale=scaling)[:2]
    return output.transpose(1, 2).contiguous(), lse


def _exact(query: Tensor) -> bool:
    if query.device.type == "cuda":
        return query.shape[3] in _CUDA_WIDTHS
    return query.dtype in (torch.float32, torch.float64)
