"""What a saboteur is, and how the modules of one stage declare theirs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

__all__ = ["REGISTRY", "Array", "Saboteur", "instead_of", "method_instead_of"]

Array: TypeAlias = np.ndarray[Any, Any]
Wrong = TypeVar("Wrong", bound=Callable[..., Any])

REGISTRY: dict[str, "Saboteur"] = {}


@dataclass(frozen=True)
class Saboteur:
    """The reference with one item wrong: `wrong` stands wherever `original` stood."""

    name: str
    item: str
    reading: str
    original: Any
    wrong: Any


def instead_of(original: object, item: str) -> Callable[[Wrong], Wrong]:
    """The decorated function is `original` under a wrong reading of `item`, which its docstring states."""
    def register(wrong: Wrong) -> Wrong:
        _add(item, wrong, original, wrong)
        return wrong

    return register


def method_instead_of(owner: type, method: str, item: str) -> Callable[[Wrong], Wrong]:
    """The same for a method of a record: a subclass stands wherever the record stood."""
    def register(wrong: Wrong) -> Wrong:
        _add(item, wrong, owner, type(owner.__name__, (owner,), {method: wrong}))
        return wrong

    return register


def _add(item: str, described: Callable[..., Any], original: object, wrong: object) -> None:
    name = f"{item}-{described.__name__}".replace("-", "_").upper()
    if name in REGISTRY:
        raise ValueError(f"saboteur {name} is declared twice")
    REGISTRY[name] = Saboteur(name, item, (described.__doc__ or "").partition("\n")[0], original, wrong)
