"""Tokens, masks and positions of a forward pass: checks, and the span of the tokens. A failed check changes nothing."""

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Required, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPast

from models_integration.cache.positions import check_row_count
from models_integration.cache.retained_cache import RetainedCache
from spec.errors import SpecError

__all__ = [
    "ONE_FORWARD", "OPEN", "PASS_MASK", "Arguments", "DecoderOutput", "ForwardSpan", "accepted", "check_ids",
    "check_input_ids", "check_last", "check_rows", "check_tokens", "device_step", "first_span", "later_span",
    "step_span",
]

# Special values of `segment_end`: the segment ends with the first forward pass, or when the caller ends the segment.
ONE_FORWARD, OPEN = 0, sys.maxsize

PASS_MASK = "pass attention_mask, because without it generate takes each pad token for padding"
"""End of an error about zeros in a mask. `generate` makes a mask from the pad tokens of `input_ids` (transformers)."""

DecoderOutput: TypeAlias = BaseModelOutputWithPast | tuple[Tensor, ...]


class Arguments(TypedDict, total=False):
    """Arguments of a decoder's forward that a session reads. A forward may have more arguments."""

    input_ids: Required[Tensor]
    """Token ids (rows, n)."""
    attention_mask: Tensor
    position_ids: Tensor
    past_key_values: RetainedCache


@dataclass(frozen=True)
class ForwardSpan:
    """Tokens of a forward pass: after `padded_seen` columns, in a segment that ends after `segment_end` columns."""

    padded_seen: int
    segment_end: int
    ids: Tensor
    """Token ids of the forward pass, (rows, n). On the host, except for a decode step on a device."""
    is_token: Tensor
    """Mask (rows, n): True for a token, False for padding."""
    defaults: dict[str, Tensor]
    """Inputs that the forward pass needs if the caller leaves them out."""

    @property
    def padded(self) -> bool:
        """True if a row has padding."""
        return not bool(self.is_token.all())


def accepted(defaults: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """Return the defaults whose names are in `names`, the arguments of a forward method."""
    return {name: tensor for name, tensor in defaults.items() if name in names}


def first_span(
    vocabulary: int, arguments: Arguments, before: Tensor, segment_end: int,
) -> ForwardSpan:
    """Check a prompt, or the next piece of a prompt, and return the span. Padding must be left of the first token.

    Args:
        vocabulary: size of the vocabulary. Ids must lie in [0, vocabulary).
        arguments: arguments of the forward pass.
        before: mask of the columns before the piece, (rows, seen): True for a token, False for padding.
        segment_end: number of columns after which the prompt ends.

    Raises:
        SpecError: if the tokens cannot follow the columns before. The error names the wrong argument.
    """
    ids = arguments["input_ids"]
    token_ids, is_token, given = _read_tokens(vocabulary, arguments, arguments.get("attention_mask"), before)
    all_columns = torch.cat([before, is_token], dim=1)
    if bool((all_columns.int().diff(dim=1) < 0).any()):
        reason = "zeros must come before ones: pad on the left, because right padding and gaps are not supported"
        raise SpecError("attention_mask", "zeros", reason)
    if segment_end == ONE_FORWARD:
        check_tokens(all_columns)
    positions = _positions(given, is_token, before.sum(dim=1))
    here = positions.to(ids.device, non_blocking=True)
    return ForwardSpan(before.shape[1], segment_end, token_ids, is_token, {"position_ids": here})


def later_span(
    vocabulary: int, arguments: Arguments, cache: RetainedCache, segment_end: int,
) -> ForwardSpan:
    """Check a later turn, a piece of a turn, or text inside `reading()`, and return the span.

    Raises:
        SpecError: if the tokens cannot follow the tokens of the cache. The error names the wrong argument.
    """
    ids = arguments["input_ids"]
    check_rows(cache, ids)
    defaults = cache.step_inputs(ids.shape[1], ids.device)
    mask = arguments.get("attention_mask", defaults.get("attention_mask"))
    rows = len(ids)
    before = torch.ones(rows, 0, dtype=torch.bool, device="cpu") if mask is None else cache.is_token.expand(rows, -1)
    token_ids, is_token, given = _read_tokens(vocabulary, arguments, mask, before)
    if segment_end == ONE_FORWARD:
        check_tokens(is_token)
    if (cache.beside or len(cache.full_layers) < len(cache.layers)) and not bool(is_token.all()):
        raise SpecError(
            "attention_mask", "zeros", "a padded turn is not supported with sliding-window or recurrent layers: their "
            "windows and states would include the padding"
        )
    positions = _positions(given, is_token, cache.tokens.expand(rows))
    defaults["position_ids"] = positions.to(ids.device, non_blocking=True)
    return ForwardSpan(cache.get_seq_length(), segment_end, token_ids, is_token, defaults)


def step_span(vocabulary: int, arguments: Arguments, cache: RetainedCache) -> ForwardSpan:
    """Check a decode step with one token in each row, (rows, 1), and return the span.

    Raises:
        SpecError: if the tokens cannot follow the tokens of the cache. The error names the wrong argument.
    """
    span = later_span(vocabulary, arguments, cache, OPEN)
    if span.padded:
        raise SpecError("attention_mask", "zeros", "a decode step must have a token in each row")
    return span


def device_step(vocabulary: int, arguments: Arguments, cache: RetainedCache) -> tuple[Arguments, ForwardSpan, Tensor]:
    """Check a decode step whose ids are on a device. The host does not wait for the device.

    Returns:
        The arguments without the mask, the span, and a tensor on the device that is True if an input is wrong.

    Raises:
        SpecError: if an argument has a wrong shape.
    """
    ids, rest = arguments["input_ids"], arguments.copy()
    check_rows(cache, ids)
    defaults = cache.step_inputs(1, ids.device)
    expected = cache.tokens.expand(len(ids))[:, None].to(ids.device, non_blocking=True)
    wrong = ((ids < 0) | (ids >= vocabulary)).any()
    if (positions := arguments.get("position_ids")) is not None:
        if positions.shape[-2:] not in ((1, 1), expected.shape):
            raise SpecError("position_ids", tuple(positions.shape), f"must be {tuple(expected.shape)}")
        wrong |= (positions != expected).any()
    if (mask := rest.pop("attention_mask", None)) is not None:
        is_token = pad(cache.is_token.expand(len(ids), -1), (0, 1), value=True)
        _check_width(mask, is_token.shape)
        wrong |= (mask != is_token.to(ids.device, non_blocking=True)).any()
    defaults["position_ids"] = expected
    is_token = torch.ones(ids.shape, dtype=torch.bool, device="cpu")
    return rest, ForwardSpan(cache.get_seq_length(), OPEN, ids, is_token, defaults), wrong


def check_rows(cache: RetainedCache, ids: Tensor) -> None:
    """Check that a forward pass has as many rows as the cache.

    Raises:
        SpecError: if the numbers of rows differ.
    """
    rows = next((layer.batch for layer in cache.full_layers if layer.is_initialized), len(ids))
    check_row_count(rows, tuple(ids.shape))


def check_input_ids(ids: object) -> Tensor:
    """Return the token ids of a forward pass, (rows, n).

    Raises:
        SpecError: if `ids` is no integer tensor with two axes.
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        shown = (tuple(ids.shape), ids.dtype) if isinstance(ids, Tensor) else ids
        shown = shown if isinstance(shown, (str, int, float, tuple)) or shown is None else type(shown).__name__
        reason = "must be an integer tensor (rows, n), such as tokenizer(text, return_tensors='pt').input_ids"
        raise SpecError("input_ids", shown, reason)
    return ids


def check_tokens(is_token: Tensor) -> None:
    """Check that each row of a prompt or turn has at least two tokens, and ends with a token.

    Args:
        is_token: mask (rows, n): True for a token, False for padding.

    Raises:
        SpecError: if a row has fewer than two tokens, or ends with padding.
    """
    fewest = int(is_token.sum(dim=1).min())
    if fewest < 2:
        raise SpecError(
            "input_ids", f"{fewest} tokens",
            "must have at least 2 tokens in each row, because a single token is a decode step: "
            "add a token, such as BOS",
        )
    check_last(is_token)


def check_last(is_token: Tensor) -> None:
    """Check that each row of a text, (rows, n), ends with a token.

    Raises:
        SpecError: if a row ends with padding.
    """
    if not bool(is_token[:, -1].all()):
        raise SpecError("attention_mask", "zeros", "right padding is not supported: pad on the left")


def _read_tokens(
    vocabulary: int, arguments: Arguments, mask: object, before: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids, the mask of tokens (rows, n) and the positions, copied from the device in a single transfer."""
    ids, positions = arguments["input_ids"], arguments.get("position_ids")
    if ids.numel() == 0:
        raise SpecError("input_ids", tuple(ids.shape), "must not be empty")
    shape, read = (len(before), before.shape[1] + ids.shape[1]), {"ids": ids}
    if mask is not None:
        mask = _check_width(mask, shape)
        read["mask"] = torch.where(mask == 0, 0, torch.where(mask == 1, 1, 2))
    if positions is not None:
        read["positions"] = positions
    flat = torch.cat([one.to(ids.device, torch.int64).flatten() for one in read.values()]).cpu()
    parts = torch.split(flat, [one.numel() for one in read.values()])
    on_host = {name: part.view(one.shape) for (name, one), part in zip(read.items(), parts, strict=True)}
    check_ids(vocabulary, on_host["ids"])
    marks = on_host.get("mask", torch.ones(shape, dtype=torch.int64, device="cpu"))
    return on_host["ids"], _tokens_of_mask(marks, before), on_host.get("positions")


def check_ids(vocabulary: int, ids: Tensor) -> None:
    """Check that all ids lie in [0, vocabulary).

    Raises:
        SpecError: if an id does not.
    """
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise SpecError("input_ids", low if low < 0 else high, f"must lie in [0, {vocabulary})")


def _tokens_of_mask(marks: Tensor, before: Tensor) -> Tensor:
    """Return the mask of tokens (rows, n) of a forward pass, after a check of the columns seen before.

    `marks` contains 0 or 1 as in the 2D attention mask. A mark is 2 if the attention mask has a different number.
    """
    columns, hidden, is_token = before.shape[1], marks == 0, marks == 1
    if not bool((hidden | is_token).all()):
        raise SpecError("attention_mask", "other numbers", "must have only zeros and ones")
    if not torch.equal(is_token[:, :columns], before):
        reason = f"must have the padding of the earlier prompt, {(~before).sum(dim=1).tolist()}: "
        if bool(before.all()):
            reason += "put the padding between the earlier text and the new text, and "
        reason += PASS_MASK
        raise SpecError("attention_mask", hidden[:, :columns].sum(dim=1).tolist(), reason)
    return is_token[:, columns:]


def _check_width(mask: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != shape:
        given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise SpecError("attention_mask", given, f"must have a column for each token of the prompt, {tuple(shape)}")
    return mask


def _positions(given: Tensor | None, is_token: Tensor, tokens: Tensor) -> Tensor:
    """Return the positions (rows, n) of columns after `tokens` (rows,) earlier tokens. Check the given positions."""
    expected = tokens[:, None] + is_token.cumsum(dim=1) - 1
    if given is not None:
        _check_positions(given, expected, is_token)
    return expected.clamp(min=0)


def _check_positions(given: Tensor, expected: Tensor, is_token: Tensor) -> None:
    rows, n = is_token.shape
    # Models with mRoPE get (axes, rows, n) from generate. The axes of text are equal.
    fits = given.shape[-2:] in ((1, n), (rows, n))
    if not fits or not bool(((given == expected) | ~is_token).all()):
        first, last = int(expected.max(dim=1).values.min()) + 1 - n, int(expected.max())
        reason = f"must be {max(0, first)} to {last}, because the tokens follow the tokens seen so far"
        shown = f"{int(given.min())} to {int(given.max())}" if fits else tuple(given.shape)
        raise SpecError("position_ids", shown, reason)
