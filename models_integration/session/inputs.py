"""What a prompt must look like, checked before anything changes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from models_integration.model.architecture import Architecture
from spec.errors import SpecError

__all__ = ["check_forward", "check_generate", "check_prompt", "check_tokens"]

# Ways to generate that this part does not serve, by the argument that asks for them.
_GENERATE = {
    "inputs_embeds": "pass input_ids: policies read the tokens",
    "cache_implementation": "must be left alone: static, offloaded and quantised caches cannot be compacted",
    "assistant_model": "assisted decoding is not served: it takes tokens back from the cache",
    "prompt_lookup_num_tokens": "assisted decoding is not served: it takes tokens back from the cache",
    "assistant_early_exit": "assisted decoding is not served: it takes tokens back from the cache",
}


def check_generate(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> tuple[int | None, int]:
    """Refuse what generate would do with the cache in ways that are not served.

    Returns:
        The size of the chunks in which it will read the prompt, if it will; and the number of its beams.

    Raises:
        SpecError: that names the argument.
    """
    configs = (kwargs.get("generation_config"), model.generation_config)

    def effective(name: str) -> Any:
        stated = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in stated if value is not None), None)

    for name, reason in _GENERATE.items():
        value = effective(name)
        if value is not None and value != "dynamic":
            shown = value if isinstance(value, (int, str)) else type(value).__name__
            raise SpecError(name, shown, reason)
    if effective("use_cache") is False:
        raise SpecError("use_cache", False, "must be on: there is no cache to compact")
    chunk: int | None = effective("prefill_chunk_size")
    if chunk is not None and effective("token_healing"):
        raise SpecError("token_healing", True, "changes the prompt's length: not beside prefill_chunk_size")
    return chunk, effective("num_beams") or 1


def check_forward(arguments: Mapping[str, Any], default_use_cache: bool) -> None:
    """What holds for every forward inside the context.

    Raises:
        SpecError: for embeddings in place of ids, ids of a wrong shape or dtype, or no cache.
    """
    if arguments.get("inputs_embeds") is not None:
        raise SpecError("inputs_embeds", "given", "pass input_ids: policies read the tokens")
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        shown = (tuple(ids.shape), ids.dtype) if isinstance(ids, Tensor) else ids
        raise SpecError("input_ids", shown, "must be an integer tensor (rows, n)")
    use_cache = arguments.get("use_cache")
    if use_cache is False or (use_cache is None and not default_use_cache):
        raise SpecError("use_cache", False, "must be on: there is no cache to compact")
    cache = arguments.get("past_key_values")
    if cache is not None and not isinstance(cache, Cache):
        raise SpecError("past_key_values", type(cache).__name__, "must be a DynamicCache, or left to the policy")


def check_prompt(
    architecture: Architecture, arguments: Mapping[str, Any], past: Tensor, tokens: Tensor, *, turn: bool, whole: bool,
) -> tuple[Tensor, Tensor]:
    """What holds for a prompt, for a turn, or for its next piece: tokens in order, and what the mask may hide.

    Args:
        past: which columns before this piece hold a token, (rows, seen); no columns, where there is no mask to agree.
        tokens: those that each row has seen before it, (rows,).
        turn: it goes on from what was read before; of a prompt, the mask may hide what is left of a row's first token.
        whole: the prompt or turn ends with this piece.

    Returns:
        Which columns of this piece hold a token, (rows, n), and the positions of all, (rows, n).

    Raises:
        SpecError: otherwise, with the argument that differs.
    """
    ids: Tensor = arguments["input_ids"]
    if len(ids) == 0 or ids.shape[1] == 0:
        raise SpecError("input_ids", tuple(ids.shape), "must not be empty")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= architecture.vocabulary:
        raise SpecError("input_ids", low if low < 0 else high, f"must lie in [0, {architecture.vocabulary})")
    shown = _shown(arguments.get("attention_mask"), ids, past)
    if not turn and bool((torch.cat([past, shown], dim=1).int().diff(dim=1) < 0).any()):
        reason = "must stand left of all ones: right padding and holes are not served"
        raise SpecError("attention_mask", "zeros", reason)
    if whole:
        check_tokens(shown if turn else torch.cat([past, shown], dim=1))
    positions = tokens[:, None] + shown.cumsum(dim=1) - 1
    _check_positions(arguments.get("position_ids"), ids, positions, shown)
    return shown, positions.clamp(min=0)


def check_tokens(shown: Tensor) -> None:
    """A prompt, or a turn, has at least two tokens in each row, and ends with one.

    Args:
        shown: which of its columns hold a token, (rows, n).

    Raises:
        SpecError: otherwise.
    """
    fewest = int(shown.sum(dim=1).min())
    if fewest < 2:
        raise SpecError("input_ids", f"{fewest} tokens", "one query is a decode step, not a segment")
    if not bool(shown[:, -1].all()):
        raise SpecError("attention_mask", "zeros", "right padding is not served: the last column decides what follows")


def _shown(mask: object, ids: Tensor, past: Tensor) -> Tensor:
    rows, columns = past.shape
    width = columns + ids.shape[1]
    if mask is None:
        mask = torch.ones(rows, width)
    if not isinstance(mask, Tensor) or mask.shape != (rows, width):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise SpecError("attention_mask", shape, f"must have a column for each token of the prompt, {(rows, width)}")
    hidden, shown = (mask == 0).to("cpu"), (mask == 1).to("cpu")
    if not bool((hidden | shown).all()):
        raise SpecError("attention_mask", mask.dtype, "must hold zeros and ones only")
    if not torch.equal(shown[:, :columns], past):
        reason = f"the prompt's padding so far was {(~past).sum(dim=1).tolist()}"
        raise SpecError("attention_mask", hidden[:, :columns].sum(dim=1).tolist(), reason)
    return shown[:, columns:]


def _check_positions(positions: Tensor | None, ids: Tensor, expected: Tensor, shown: Tensor) -> None:
    if positions is None:
        return
    fits = positions.ndim == 2 and len(positions) in (1, len(ids)) and positions.shape[1] == ids.shape[1]
    if not fits or not bool(((positions.to("cpu") == expected) | ~shown).all()):
        first, last = int(expected.max(dim=1).values.min()) + 1 - ids.shape[1], int(expected.max())
        raise SpecError(
            "position_ids", tuple(positions.shape), f"must be {max(0, first)} to {last}: they follow what was seen"
        )
