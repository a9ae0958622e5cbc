"""What a saboteur is, and how the modules of one stage declare theirs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

__all__ = ["BY_SIZE", "REGISTRY", "Array", "Beyond", "Saboteur", "beyond", "instead_of", "method_instead_of"]

Array: TypeAlias = np.ndarray[Any, Any]
Wrong = TypeVar("Wrong", bound=Callable[..., Any])

REGISTRY: dict[str, "Saboteur"] = {}
# Those that do as the reference does on all small inputs.
BY_SIZE: dict[str, "Saboteur"] = {}


@dataclass(frozen=True)
class Beyond:
    """How a saboteur by size shows itself: the function on arguments that are large enough."""

    size: str
    """The largest on which it does as the reference does."""
    arguments: Callable[[], tuple[Any, ...]]
    right: Callable[..., Any]
    wrong: Callable[..., Any]

    def outcomes(self) -> tuple[Any, Any]:
        """The reference's result and the saboteur's, of arguments made for each."""
        return self.right(*self.arguments()), self.wrong(*self.arguments())


@dataclass(frozen=True)
class Saboteur:
    """The reference with one item wrong: `wrong` stands wherever `original` stood."""

    name: str
    item: str
    reading: str
    original: Any
    wrong: Any
    beyond: Beyond | None = None


def instead_of(original: object, item: str) -> Callable[[Wrong], Wrong]:
    """The decorated function is `original` under a wrong reading of `item`, which its docstring states."""
    def register(wrong: Wrong) -> Wrong:
        _add(REGISTRY, item, wrong, original, wrong)
        return wrong

    return register


def beyond(
    size: str, original: Callable[..., Any], item: str, arguments: Callable[[], tuple[Any, ...]],
) -> Callable[[Wrong], Wrong]:
    """`instead_of` for what is right up to a size; on the `arguments`, which are beyond it, it is wrong.

    `original` may also be a method, as a function of its class.
    """
    def register(wrong: Wrong) -> Wrong:
        _add(BY_SIZE, item, wrong, original, wrong, Beyond(size, arguments, original, wrong))
        return wrong

    return register


def method_instead_of(owner: type, method: str, item: str) -> Callable[[Wrong], Wrong]:
    """The same for a method of a record: a subclass stands wherever the record stood."""
    def register(wrong: Wrong) -> Wrong:
        _add(REGISTRY, item, wrong, owner, type(owner.__name__, (owner,), {method: wrong}))
        return wrong

    return register


def _add(
    table: dict[str, Saboteur], item: str, described: Callable[..., Any], original: object, wrong: object,
    size: Beyond | None = None,
) -> None:
    name = f"{item}-{described.__name__}".replace("-", "_").upper()
    if name in REGISTRY or name in BY_SIZE:
        raise ValueError(f"saboteur {name} is declared twice")
    reading = (described.__doc__ or "").partition("\n")[0]
    table[name] = Saboteur(name, item, reading, original, wrong, size)
