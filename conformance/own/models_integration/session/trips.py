"""An exception where nobody expects one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest.mock import patch

from transformers import PreTrainedModel

from models_integration.model.architecture import attention_modules

__all__ = ["NOWHERE", "PLACES", "Trip", "Tripped"]

_CACHE = "models_integration.cache"
PLACES: dict[str, tuple[str, ...]] = {
    "before a layer": (),
    "after a layer": (),
    "decision": (
        "models_integration.session.segment.decide", f"{_CACHE}.crystal_states.decode_step",
        f"{_CACHE}.crystal_states.append", f"{_CACHE}.scorer_records.advance", f"{_CACHE}.scorer_records.take_up",
    ),
    "compaction": (
        f"{_CACHE}.dense_layer.gathered", f"{_CACHE}.ragged_layer._flattened",
        f"{_CACHE}.ragged_layer._shared_by_heads",
    ),
}


class Tripped(BaseException):
    """As Ctrl-C is: no Exception."""


class Trip(NamedTuple):
    """An exception at a place's call of this number, from 0; nowhere without a place."""

    place: str = ""
    at: int = 0

    @contextmanager
    def raised(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside, it is raised once it is due."""
        calls = 0

        def count(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > self.at:
                raise Tripped

        def before(real: Callable[..., Any]) -> Callable[..., Any]:
            def tripped(*args: Any, **kwargs: Any) -> Any:
                count()
                return real(*args, **kwargs)

            return tripped

        with ExitStack() as stack:
            for module in attention_modules(model).values() if self.place.endswith("layer") else ():
                first = self.place == "before a layer"
                hooked = module.register_forward_pre_hook if first else module.register_forward_hook
                stack.callback(hooked(count).remove)
            for name in PLACES.get(self.place, ()):
                stack.enter_context(patch(name, before(resolve_name(name))))
            yield


NOWHERE = Trip()
