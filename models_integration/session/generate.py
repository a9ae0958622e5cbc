"""Calls of generate inside a session: checks before the first forward pass, and data for each forward pass."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from models_integration.cache.history import calls_of_generate, columns_of
from models_integration.model.architecture import decoders_of
from models_integration.session.inputs import ONE_FORWARD
from spec.errors import SpecError

__all__ = ["NO_CALL", "Call", "call_under_way", "check_call"]


# Arguments of generate that are not supported, each with the reason.
_GENERATE = {
    "inputs_embeds": "pass input_ids: policies read the tokens",
    "cache_implementation": "must be left out: static, offloaded and quantised caches cannot be compacted",
    **dict.fromkeys(
        ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
        "must be left out: assisted decoding removes tokens from the cache, which is not supported",
    ),
}
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")


@dataclass(frozen=True)
class Call:
    """One call of generate. The defaults describe a forward pass outside generate, where no row repeats a prompt."""

    rows: int = sys.maxsize
    """Number of given prompts. generate repeats each prompt for beams and returned sequences."""
    columns: int = sys.maxsize
    """Number of columns of the input, including columns that the cache has seen. Later tokens are generated."""
    chunk: int | None = None
    """Number of tokens in each forward pass over the input. None: the input is processed in one forward pass."""
    beams: int = 1
    config: object = None
    """Copy of the generation config that belongs to the call. The copy identifies the call."""

    @property
    def segment_end(self) -> int:
        """Number of columns that the cache has seen after the last chunk. Without chunks, ONE_FORWARD."""
        return ONE_FORWARD if self.chunk is None or self.columns <= self.chunk else self.columns


NO_CALL = Call()


def call_under_way(decoder: nn.Module, last: Call) -> Call:
    """Return the call of generate that contains the present forward pass of a decoder. Outside generate, NO_CALL.

    Args:
        decoder: decoder of the model. A model that shares the decoder may have started generate.
        last: result of this function at the previous forward pass of the decoder.

    Raises:
        SpecError: if the call uses the cache in a way that is not supported. Raised at the first forward pass.
    """
    for call in calls_of_generate():
        if decoder in decoders_of(call["self"]):
            return last if call["generation_config"] is last.config else _begun(call)
    return NO_CALL


def _begun(call: Mapping[str, Any]) -> Call:
    config, mode = call["generation_config"], call["generation_mode"].value
    check_call({"assistant_model": call["assistant_model"]}, vars(config))
    if mode not in _MODES:
        raise SpecError("generate", mode, f"is not supported inside `with policy(model)`: use {' or '.join(_MODES)}")
    if getattr(config, "is_assistant", False):
        raise SpecError("assistant_model", "this model", _GENERATE["assistant_model"])
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    rows = len(call["input_ids"]) // copies
    return Call(rows, columns_of(call), config.prefill_chunk_size, config.num_beams or 1, config)


def check_call(*stated: Mapping[str, object]) -> None:
    """Check that generate uses the cache only in supported ways.

    Args:
        stated: values by argument name, highest priority first: arguments, their generation config, the model's config.

    Raises:
        SpecError: if an argument is not supported. The error names the argument.
    """
    def effective(name: str) -> Any:
        return next((value for each in stated if (value := each.get(name)) is not None), None)

    for name, reason in _GENERATE.items():
        value = effective(name)
        # Configs of Gemma on the hub contain "hybrid", which transformers ignores.
        if value is not None and value is not False and str(value) not in ("dynamic", "hybrid"):
            shown = value if isinstance(value, (int, str)) else type(value).__name__
            raise SpecError(name, shown, reason)
    guidance = effective("guidance_scale")
    if guidance not in (None, 1):
        raise SpecError("guidance_scale", guidance, "must be None or 1, because guidance needs a second cache")
    if effective("use_cache") is False:
        raise SpecError("use_cache", False, "must be True, because eviction needs a cache")
    if effective("prefill_chunk_size") is not None and effective("token_healing"):
        raise SpecError(
            "token_healing", True,
            "cannot be used with prefill_chunk_size, because token healing changes the prompt: leave out one",
        )
