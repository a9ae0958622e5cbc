"""Forward passes outside segments: decode steps, and text inside `reading()`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture
from models_integration.session.inputs import OPEN, Arguments, ForwardSpan, later_span
from models_integration.session.method import Method
from models_integration.session.observed import ObservedSegment
from models_integration.session.segment import Segment
from spec.errors import SpecError

__all__ = ["Forward", "end_step", "reading", "step", "unusable_after_failure"]


@dataclass
class Forward:
    """Forward pass of the model that has not finished."""

    cache: RetainedCache
    watcher: ObservedSegment | Segment | None
    """Object that receives the attention inputs of the layers. None: no object."""
    arguments: Arguments
    defaults: Mapping[str, Tensor]
    """Inputs that the forward pass needs if the caller leaves them out."""
    finish: Callable[[], None]
    """Function to call after the forward pass."""
    undo: ExitStack = field(default_factory=ExitStack)
    freed_before: int = 0
    """Value of `cache.bytes_freed` before the forward pass."""


@contextmanager
def unusable_after_failure(cache: RetainedCache, reason: str) -> Iterator[None]:
    """Context manager: if the block raises an error, every later use of the cache raises an error."""
    try:
        yield
    except BaseException:
        cache.fail(reason)
        raise


def step(
    method: Method, architecture: Architecture, cache: RetainedCache, arguments: Arguments, span: ForwardSpan,
) -> Forward:
    """Begin a forward pass of one token (rows, 1) that is a decode step."""
    ids, observed = arguments["input_ids"], None
    method.before_step(cache)
    if method.step_needs.layers != "none":
        observed = ObservedSegment(method.step_needs, architecture, cache)
        observed.read(ids, span.is_token)
    return Forward(cache, observed, arguments, span.defaults, partial(end_step, method, cache, ids, observed))


def end_step(method: Method, cache: RetainedCache, ids: Tensor, observed: ObservedSegment | None) -> None:
    """Apply the policy after the token of a decode step was appended to the cache."""
    with unusable_after_failure(cache, "a decode step failed"):
        method.after_step(cache, ids, observed)


def reading(method: Method, architecture: Architecture, cache: object, arguments: Arguments) -> Forward:
    """Begin a forward pass inside `reading()`."""
    if not isinstance(cache, RetainedCache) or cache.get_seq_length() == 0:
        raise SpecError("past_key_values", "0 tokens", "must contain a prompt inside reading(); pass run.cache")
    span = later_span(architecture.vocabulary, arguments, cache, OPEN)
    if span.padded:
        raise SpecError("attention_mask", "zeros", "padding is not supported inside reading()")
    method.before_reading(cache)
    observed = ObservedSegment(method.step_needs, architecture, cache)
    observed.read(span.ids, span.is_token, arguments["input_ids"].device)

    def end() -> None:
        with unusable_after_failure(cache, "reading() failed"):
            method.after_reading(cache, arguments["input_ids"], observed)

    return Forward(cache, observed, arguments, span.defaults, end)
