"""What generate asks of a session, known before its first forward."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from models_integration.session.inputs import ONE_FORWARD
from spec.errors import SpecError

__all__ = ["NO_CALL", "Call", "call_of"]


# Ways to generate that this part does not serve, by the argument that asks for them.
_GENERATE = {
    "inputs_embeds": "pass input_ids: policies read the tokens",
    "cache_implementation": "must be left alone: static, offloaded and quantised caches cannot be compacted",
    "assistant_model": "assisted decoding is not served: it takes tokens back from the cache",
    "prompt_lookup_num_tokens": "assisted decoding is not served: it takes tokens back from the cache",
    "assistant_early_exit": "assisted decoding is not served: it takes tokens back from the cache",
}


@dataclass(frozen=True)
class Call:
    """One call of generate."""

    rows: int
    """Prompts that it was given: generate repeats each for beams and returned sequences."""
    segment_end: int
    """Columns that the cache has seen when a prompt that is read in chunks is over, or ONE_FORWARD."""
    beams: int = 1


NO_CALL = Call(sys.maxsize, ONE_FORWARD)
"""Outside generate, no row of a batch repeats a prompt."""


def call_of(model: PreTrainedModel, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    """What this call of a model's generate is.

    Raises:
        SpecError: where it would use the cache in a way that is not served; it names the argument.
    """
    named = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
    chunk, beams = _check(model, named)
    ids = next((ids for name in ("inputs", "input_ids") if isinstance(ids := named.get(name), Tensor)), None)
    if ids is None or ids.ndim != 2:
        return Call(1, ONE_FORWARD, beams)
    rows, columns = ids.shape
    # Of a sequence that goes on, the ids may be the new ones alone; the mask is about all.
    mask = named.get("attention_mask")
    columns = mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else columns
    return Call(rows, ONE_FORWARD if chunk is None or columns <= chunk else columns, beams)


def _check(model: PreTrainedModel, kwargs: Mapping[str, object]) -> tuple[int | None, int]:
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
        # Files of Gemma on the hub say "hybrid", which transformers itself takes as unsaid.
        if value not in (None, "dynamic", "hybrid"):
            shown = value if isinstance(value, (int, str)) else type(value).__name__
            raise SpecError(name, shown, reason)
    guidance = effective("guidance_scale")
    if guidance not in (None, 1):
        raise SpecError("guidance_scale", guidance, "is not served: it reads other tokens into a second cache")
    if effective("use_cache") is False:
        raise SpecError("use_cache", False, "must be on: there is no cache to compact")
    chunk: int | None = effective("prefill_chunk_size")
    if chunk is not None and effective("token_healing"):
        raise SpecError("token_healing", True, "changes the prompt's length: not beside prefill_chunk_size")
    return chunk, effective("num_beams") or 1
