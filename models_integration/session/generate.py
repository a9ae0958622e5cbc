"""What generate asks of a session: refused before the first forward, or seen by every forward that a call makes."""

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


# Ways to generate that this part does not serve, by the argument that asks for them.
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
    """One call of generate; outside any, no row of a batch repeats a prompt."""

    rows: int = sys.maxsize
    """Prompts that it was given: generate repeats each for beams and returned sequences."""
    columns: int = sys.maxsize
    """Columns of its text, those included that its cache has read; the tokens behind them are generated."""
    chunk: int | None = None
    """Tokens of the forwards in which it reads its text; None: it reads all in one."""
    beams: int = 1
    config: object = None
    """Its own copy of a generation config, by which it is told from others."""

    @property
    def segment_end(self) -> int:
        """Columns that the cache has seen when a text that is read in chunks is over, or ONE_FORWARD."""
        return ONE_FORWARD if self.chunk is None or self.columns <= self.chunk else self.columns


NO_CALL = Call()


def call_under_way(decoder: nn.Module, last: Call) -> Call:
    """The call of generate that a forward of this decoder is part of, whoever made it by whatever name; or NO_CALL.

    Args:
        last: what this was at the decoder's last forward.

    Raises:
        SpecError: at the first forward of a call that would use the cache in a way that is not served.
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
    """Refuse what generate would do with the cache in ways that are not served.

    Args:
        stated: what is asked for by name, the strongest first: arguments, their config, the model's.

    Raises:
        SpecError: that names the argument.
    """
    def effective(name: str) -> Any:
        return next((value for each in stated if (value := each.get(name)) is not None), None)

    for name, reason in _GENERATE.items():
        value = effective(name)
        # Files of Gemma on the hub say "hybrid", which transformers itself takes as unsaid.
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
