"""Exceptions where nobody expects one, and sizes that only long lives would reach."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel

__all__ = ["Tripped", "knobs", "tripping"]

CACHE = "models_integration.cache"
PLACES: dict[str, tuple[str, ...]] = {
    "decision": (
        "models_integration.session.segment.decide", f"{CACHE}.crystal_states.decode_step",
        f"{CACHE}.crystal_states.append", f"{CACHE}.scorer_records.advance", f"{CACHE}.scorer_records.take_up",
    ),
    "compaction": (
        f"{CACHE}.dense_layer.gathered", f"{CACHE}.ragged_layer._flattened", f"{CACHE}.ragged_layer._shared_by_heads",
    ),
}
KNOBS = {
    "long_run": f"{CACHE}.positions._LONG_RUN", "spare": f"{CACHE}.ragged_layer._SPARE",
}


class Tripped(BaseException):
    """As Ctrl-C is: no Exception."""


class _Counted:
    """Raises at one of its calls."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise Tripped

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def tripped(*args: Any, **kwargs: Any) -> Any:
            self()
            return real(*args, **kwargs)

        return tripped


@contextmanager
def tripping(model: PreTrainedModel, trip: tuple[str, int] | None) -> Iterator[None]:
    """An exception at a place's call of this number: before a layer attends, behind it, in a decision, a compaction."""
    if trip is None:
        yield
        return
    place, at = trip
    counted = _Counted(at)
    with ExitStack() as stack:
        for layer in model.model.layers if place in ("attention", "layer") else ():
            hooked = layer.self_attn.register_forward_pre_hook if place == "attention" else layer.register_forward_hook
            stack.callback(hooked(counted).remove)
        for name in PLACES.get(place, ()):
            stack.enter_context(patch(name, counted.before(resolve_name(name))))
        yield


@contextmanager
def knobs(sizes: Mapping[str, int]) -> Iterator[None]:
    """These sizes, by name, in place of the modules' own."""
    with ExitStack() as stack:
        for name, size in sizes.items():
            stack.enter_context(patch(KNOBS[name], size))
        yield
