"""Attention over a compacted cache: masks by position, and attention over heads that store different tokens.

Visibility depends on the positions of stored tokens, not on slots. Attention runs once for consecutive rows whose heads
all store equally many tokens, without padding and if all rows were compacted after equally many tokens. A decode step
on CUDA is one call for all heads, of variable-length attention. Otherwise attention runs once for each head, over views
of the storage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa

from models_integration.cache.positions import EMPTY, LayersDiffer, SlotOffset, StoredRows
from models_integration.cache.ragged_layer import HeadLayout, RaggedLayer, dense_view
from spec.errors import SpecError

__all__ = [
    "RUN", "AttentionFunction", "LayerMasks", "MaskFunction", "Pattern", "attended_in_runs", "by_position",
    "chosen_alone", "ragged_attention", "retained_mask", "variable_length",
]

Pattern: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function from broadcast index tensors (row, head, query, key) to visibility: causal, sliding window, ..."""
MaskFunction: TypeAlias = Callable[..., Tensor | None]
"""Function type in `AttentionMaskInterface`: builds one attention mask from sizes, offsets and a pattern."""

AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""Function type in `AttentionInterface`."""

RUN = 1_024
"""Number of keys of a head that the variable-length kernel reads as one sequence."""
VariableLength: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""Function of queries, keys, values, ends of queries and keys, largest numbers and scale: output, log-sum-exp."""

_CAUSAL = cast(Pattern, masking_utils.causal_mask_function)


@dataclass(frozen=True)
class LayerMasks:
    """Placeholder for the single attention mask of a forward pass. It makes a separate mask for each layer or head."""

    mask: MaskFunction
    sizes: Mapping[str, int]
    """The numbers batch_size, q_length and q_offset of the forward pass."""
    pattern: Pattern
    padding: Tensor | None
    options: Mapping[str, object]
    queries: slice | None = None
    """Queries of the forward pass for which masks are made. None means all queries."""

    def __getitem__(self, index: tuple[slice, ...]) -> "LayerMasks":
        """Return the placeholder for some queries, indexed like a mask tensor (rows, heads, queries, slots)."""
        return replace(self, queries=index[2])

    @cached_property
    def plain(self) -> bool:
        """True if each query attends to all tokens stored before the query. Computed once per forward pass."""
        return self.pattern is _CAUSAL and (self.padding is None or bool(self.padding.all()))

    def of(self, rows: StoredRows, slots: int, seen: int, row: int | None = None) -> Tensor | None:
        """Return the mask over `slots` slots of these rows, or None if all slots are visible.

        Args:
            rows: positions of the slots.
            slots: number of slots, including the slots of the queries.
            seen: number of columns seen, including the columns of the queries.
            row: row of the batch to which `rows` belongs. None means all rows.
        """
        if self.sizes["q_length"] == 1 and rows.shared and self.plain:
            return None
        sizes, padding = dict(self.sizes), self.padding
        if row is not None:
            sizes["batch_size"], padding = 1, None if padding is None else padding[row : row + 1]
        mask = self.mask(
            **sizes, kv_length=slots, kv_offset=SlotOffset(seen - slots, rows), mask_function=self.pattern,
            attention_mask=padding, **self.options,
        )
        return mask if mask is None or self.queries is None else mask[:, :, self.queries]


def chosen_alone(mask: Tensor, chosen: Tensor) -> Tensor:
    """Return a mask (rows, 1, queries, slots) that also hides all slots that an indexer did not choose for a query.

    Models hide these slots themselves only if the name of their attention is "sdpa" or "eager".
    """
    others = torch.ones_like(mask, dtype=torch.bool).scatter(-1, chosen[:, None].long(), False)
    return mask & ~others if mask.dtype == torch.bool else mask.masked_fill(others, torch.finfo(mask.dtype).min)


def by_position(
    pattern: Pattern, rows: StoredRows, seen: int, q_length: int, kv_length: int, padding: Tensor | None,
    device: torch.device | str,
) -> Pattern:
    """Return the pattern over slots. Queries are numbered from 0, keys by slot. Both numbers are mapped to positions.

    Args:
        pattern: visibility as a function of positions.
        rows: stored rows of the layer. The last `q_length` slots contain the keys of the queries.
        seen: number of columns seen before this forward pass, including padding.
        q_length: number of queries in this forward pass.
        kv_length: number of slots, including the keys of the queries.
        padding: mask (batch, seen + q_length) that is True for tokens, or None.
        device: device of the index tensors.

    Raises:
        SpecError: if `padding` does not cover all columns. A shorter mask would silently hide the new tokens.
    """
    if padding is not None and padding.shape[1] != seen + q_length:
        raise SpecError("attention_mask", tuple(padding.shape), f"must cover the {seen + q_length} tokens seen so far")
    stored = rows.positions(kv_length)
    tokens = rows.tokens(kv_length)
    is_token = stored[:, kv_length - q_length :] != EMPTY
    # A query in a padding column has no position, and its result is unused. It has the position of the last token.
    queries = tokens[:, None] - is_token.sum(dim=1, keepdim=True) + is_token.cumsum(dim=1) - 1
    columns = rows.columns(stored, seen + q_length, tokens).clamp(min=0)
    stored, queries, columns = (one.to(device, non_blocking=True) for one in (stored, queries, columns))

    def visible(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        stored_row = torch.zeros_like(row) if rows.shared else row
        key = stored[stored_row, slot]
        seen_by = pattern(row, head, queries[stored_row, query], key) & (key != EMPTY)
        if padding is None:
            return seen_by
        return seen_by & padding[row, columns[stored_row, slot]]

    return visible


def retained_mask(stock: MaskFunction) -> MaskFunction:
    """Return the mask function to register: `stock`, but with visibility by stored positions.

    The mask function supports gaps, rows with different numbers of tokens, and sliding windows over positions. If slots
    equal positions, or if a single query attends to all stored tokens, `stock` is called unchanged. The fast paths for
    a cache without evictions therefore remain.
    """

    def mask(
        batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
        mask_function: Pattern = _CAUSAL, attention_mask: Tensor | None = None, **options: Any,
    ) -> Any:
        if isinstance(kv_offset, LayersDiffer):
            forward = {"batch_size": batch_size, "q_length": q_length, "q_offset": q_offset}
            return LayerMasks(mask, forward, mask_function, attention_mask, options)
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        if not isinstance(kv_offset, SlotOffset) or _stock_is_right(
            kv_offset, q_length, mask_function, attention_mask
        ):
            return stock(
                **sizes, q_offset=q_offset, kv_offset=int(kv_offset), mask_function=mask_function,
                attention_mask=attention_mask, **options,
            )
        pattern = by_position(
            mask_function, kv_offset.rows, q_offset, q_length, kv_length, attention_mask, options.get("device", "cpu")
        )
        # Queries are numbered from 0 here, so the test of `stock` for a plain causal mask would give a wrong result
        # (transformers 5.24 leaves out the mask if the test succeeds).
        options["allow_is_causal_skip"] = False
        return stock(**sizes, mask_function=pattern, **options)

    return mask


def _stock_is_right(offset: SlotOffset, q_length: int, pattern: Pattern, padding: Tensor | None) -> bool:
    if not offset.rows.shared:
        return False
    if offset == 0:
        return True
    unpadded = padding is None or bool(padding.all())
    return q_length == 1 and pattern is _CAUSAL and unpadded


def ragged_attention(
    stock: AttentionFunction, module: nn.Module, query: Tensor, layer: RaggedLayer, masks: object,
    options: Mapping[str, Any],
) -> Tensor:
    """Return the output of the model's own attention over a ragged layer, (rows, q, H, d), without weights.

    Args:
        stock: the model's attention function, eager or SDPA.
        module: the attention module.
        query: queries after RoPE, (rows, H, q, d). The last q tokens of the layer are the tokens of the queries.
        layer: layer with all keys and values, including those of this forward pass.
        masks: masks that kvspec's mask function made for this forward pass.
        options: options that the module passed to the attention function.

    Raises:
        SpecError: if the caller passes a custom mask, because it does not distinguish heads.
    """
    if not isinstance(masks, LayerMasks):
        raise SpecError("attention_mask", type(masks).__name__, "must be 2D, or left out: heads store different tokens")
    layer = layer.attended()
    aligned = masks.plain and len(set(layer.rows.seen_at_compaction.tolist())) == 1
    if (as_one := dense_view(layer) if aligned else None) is not None:
        mask = masks.of(layer.head_rows(0), layer.layout.lengths[0], layer.padded_seen)
        return _attended(stock, module, query, *as_one, mask, options)
    if _by_variable_length(stock, query, layer, masks, options):
        assert layer.keys is not None
        assert layer.values is not None
        scale = options.get("scaling")
        return attended_in_runs(variable_length(), query, layer.keys, layer.values, layer.layout, scale)
    each = [(row, row + 1) for row in range(layer.batch)] if not aligned else _alike(layer)
    parts = [dense_view(layer, *rows) if aligned else None for rows in each]
    segments, outputs = layer.segments() if any(part is None for part in parts) else [], []
    for (first, stop), part in zip(each, parts, strict=True):
        if part is None:
            heads = segments[first * layer.heads : stop * layer.heads]
            outputs.append(_by_head(stock, module, query, layer, first, heads, masks, options))
        else:
            mask = masks.of(layer.head_rows(first * layer.heads), part[0].shape[2], layer.padded_seen, first)
            outputs.append(_attended(stock, module, query[first:stop], *part, mask, options))
    return torch.cat(outputs)


def _alike(layer: RaggedLayer) -> list[tuple[int, int]]:
    """Return the first row and the end of each run of rows in which all heads store equally many tokens.

    A row whose heads store different numbers of tokens is alone.
    """
    lengths = np.array(layer.layout.lengths).reshape(layer.batch, -1)
    differs = (lengths != lengths[:, :1]).any(axis=1)
    borders = np.flatnonzero((np.diff(lengths[:, 0]) != 0) | differs[1:] | differs[:-1]) + 1
    return list(pairwise([0, *borders.tolist(), layer.batch]))


def _by_head(
    stock: AttentionFunction, module: nn.Module, query: Tensor, layer: RaggedLayer, row: int,
    segments: Sequence[tuple[Tensor, Tensor]], masks: LayerMasks, options: Mapping[str, Any],
) -> Tensor:
    """Return the attention output (1, q, H, d) of one row, computed for each KV head (its segment) separately."""
    G, outputs = query.shape[1] // layer.heads, []
    for head, (keys, values) in enumerate(segments):
        mask = masks.of(layer.head_rows(row * layer.heads + head), keys.shape[2], layer.padded_seen, row)
        module_of_heads, given = _of_heads(module, head * G, (head + 1) * G, options)
        asked = query[row : row + 1, head * G : (head + 1) * G]
        outputs.append(_attended(stock, module_of_heads, asked, keys, values, mask, given))
    return torch.cat(outputs, dim=2)


class _SinksOfHeads:
    """View of an attention module that has only the sinks of some heads."""

    def __init__(self, module: nn.Module, sinks: Tensor) -> None:
        self._module, self.sinks = module, sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _of_heads(
    module: nn.Module, first: int, stop: int, options: Mapping[str, Any],
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return module and options for the query heads from first to stop. If the model has sinks, each head has one."""
    # The eager attention of GPT-OSS reads the sinks of the module, not the option `s_aux` (transformers 5.24).
    sinks = getattr(module, "sinks", None)
    if not isinstance(sinks, Tensor):
        return module, options
    sinks_of_heads = sinks[first:stop]
    return cast(nn.Module, _SinksOfHeads(module, sinks_of_heads)), {**options, "s_aux": sinks_of_heads}


def _attended(
    stock: AttentionFunction, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Run the model's attention, (rows, q, H, d). A single query of a group of heads becomes several rows of one head.

    Otherwise SDPA would repeat the keys for each head of the group, which takes twice the time on a CPU. FlashAttention
    does not copy the keys. PyTorch prefers cuDNN on Hopper GPUs, but cuDNN takes tens of milliseconds to prepare each
    new number of keys.
    """
    rows, H, q, d = query.shape
    if stock is sdpa_attention_forward and q == 1 and mask is None and _flash(query):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return stock(module, query, keys, values, None, **options)[0]
    grouped = q == 1 and mask is None and keys.shape[1] < H and use_gqa_in_sdpa(None, keys, values)
    if stock is not sdpa_attention_forward or not grouped:
        return stock(module, query, keys, values, mask, **options)[0]
    packed = query.reshape(rows, keys.shape[1], -1, d)
    output = stock(module, packed, keys, values, None, **{**options, "is_causal": False})[0]
    return output.transpose(1, 2).reshape(rows, 1, H, -1)


def _flash(query: Tensor) -> bool:
    """Return True if FlashAttention supports these queries (..., d)."""
    half, d = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
    return query.is_cuda and torch.version.hip is None and half and d % 8 == 0 and d <= 256


def _by_variable_length(
    stock: AttentionFunction, query: Tensor, layer: RaggedLayer, masks: LayerMasks, options: Mapping[str, Any],
) -> bool:
    """Return True if each query attends to all keys of its head, and the variable-length kernel supports the call."""
    return (
        stock is sdpa_attention_forward and query.shape[2] == 1 and _flash(query)
        and layer.keys is not None and layer.keys.dtype == query.dtype
        and masks.plain and masks.queries is None and not torch.is_grad_enabled() and not options.get("dropout")
        and all(options.get(name) is None for name in ("softcap", "position_bias", "s_aux"))
        and find_spec("torch.nn.attention.varlen") is not None
    )


@cache
def variable_length() -> VariableLength:
    """Return PyTorch's variable-length attention, which also gives the log-sum-exp of each query."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    def attend(*tensors_and_sizes: Any, scale: float | None) -> tuple[Tensor, Tensor]:
        output, lse = varlen_attn(*tensors_and_sizes, return_aux=AuxRequest(lse=True), scale=scale)
        return output, lse

    return attend


def attended_in_runs(
    attend: VariableLength, query: Tensor, keys: Tensor, values: Tensor, layout: HeadLayout, scale: float | None,
) -> Tensor:
    """Return the attention output (rows, 1, H, d) of one query per head over ragged keys, from one call of the kernel.

    The kernel reads the keys of a head in parallel runs of RUN keys, because one long sequence would leave most of the
    device idle. The outputs of the runs are averaged. Their weights are the sums of their exponentials.

    Args:
        attend: kernel of variable-length attention.
        query: queries (rows, H, 1, d).
        keys: keys of all heads of all rows, (slots, d).
        values: values of all heads of all rows, (slots, d).
        layout: slots of each head.
        scale: factor of the logits. None means 1 / sqrt(d).
    """
    rows, H, _, d = query.shape
    asked = query.reshape(len(layout.kept), -1, d)
    G = asked.shape[1]
    parts = [torch.from_numpy(part) for part in _runs(layout, G)]
    on_device = torch.cat([part.flatten() for part in parts]).to(query.device, non_blocking=True)
    heads, query_ends, key_ends, place, is_run = torch.split(on_device, [part.numel() for part in parts])
    tensors = asked.index_select(0, heads).view(-1, 1, d), keys[:, None], values[:, None]
    output, lse = attend(*tensors, query_ends, key_ends, G, max(RUN, layout.spare), scale=scale)
    shape = parts[3].shape
    weights = lse.float().reshape(-1, G).index_select(0, place).view(*shape, G)
    weights = torch.softmax(weights.masked_fill(is_run.view(*shape, 1) == 0, -torch.inf), dim=1)
    output = output.view(-1, G, d).index_select(0, place).view(*shape, G, d)
    return (weights[..., None] * output).sum(dim=1).to(query.dtype).view(rows, 1, H, d)


def _runs(layout: HeadLayout, G: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Return five int32 arrays that describe the runs of all heads.

    The number of sequences is equal for all heads: the number of runs of the longest head, and one for spare slots. A
    sequence that is not a run has no query. The first array is the head of each run. The next two arrays are the end of
    the G queries of each sequence, and the end of the keys of each sequence. The last two arrays (heads, runs) are the
    index of each run, and 1 if a run exists.
    """
    lengths, starts = np.array(layout.lengths), np.array(layout.starts)
    first = RUN * np.arange(-(-lengths.max() // RUN))
    is_run = first < lengths[:, None]
    ends = np.minimum(first + RUN, lengths[:, None])
    key_ends = starts[:, None] + np.concatenate([ends, lengths[:, None] + layout.spare], axis=1)
    queries = np.pad(is_run, ((0, 0), (0, 1))) * G
    parts = (
        np.nonzero(is_run)[0], np.append(0, queries.cumsum()), np.append(0, key_ends),
        (is_run.cumsum() - 1).reshape(is_run.shape), is_run,
    )
    return tuple(part.astype(np.int32) for part in parts)
