"""What generate asks of a session, known before its first forward."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from models_integration.session.inputs import ONE_FORWARD, check_generate

__all__ = ["NO_CALL", "Call", "guarded_generate"]


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


@contextmanager
def guarded_generate(
    model: PreTrainedModel, during: Callable[[Call], AbstractContextManager[None]],
) -> Iterator[None]:
    """Let generate refuse what is not served before it starts, and report the call's rows, beams and chunk size."""
    generate = getattr(model, "generate", None)
    if generate is None:
        yield
        return
    had = vars(model).get("generate")

    @wraps(generate)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(("inputs", "generation_config"), args, strict=False)), **kwargs}
        with during(_call(named, *check_generate(model, named))):
            return generate(*args, **kwargs)

    vars(model)["generate"] = guarded
    try:
        yield
    finally:
        if had is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = had


def _call(named: dict[str, Any], chunk: int | None, beams: int) -> Call:
    ids = next((ids for name in ("inputs", "input_ids") if isinstance(ids := named.get(name), Tensor)), None)
    if ids is None or ids.ndim != 2:
        return Call(1, ONE_FORWARD, beams)
    rows, columns = ids.shape
    # Of a sequence that goes on, the ids may be the new ones alone; the mask is about all.
    mask = named.get("attention_mask")
    columns = mask.shape[1] if isinstance(mask, Tensor) and mask.ndim == 2 else columns
    return Call(rows, ONE_FORWARD if chunk is None or columns <= chunk else columns, beams)
