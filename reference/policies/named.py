"""The decorator `@named` names a function that makes a policy. The module `names.py` lists the named policies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from inspect import signature
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeVar, get_args

from spec.backend import Backend
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["REGISTERED", "NamedPolicy", "named"]

_KINDS: Mapping[type, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (Integral,)), float: ("a number", (Real,)), Fraction: ("a number", (Real,)),
    str: ("a text", (str, Backend)),
}
"""Kinds of values, by the type of the default: what an error says, and the types of accepted values."""
Maker = TypeVar("Maker", bound=Callable[..., Policy])


@dataclass(frozen=True)
class NamedPolicy:
    """A named policy: its maker function, the constants that the name fixes, and the constants read from the model.

    A table in spec/policies.md lists what each named policy guarantees.
    """

    paper: str
    """Publication that describes the policy, or "" if there is no publication."""
    keeps: str
    """Noun phrase that describes which tokens the policy keeps."""
    make: Callable[..., Policy]
    decided: Mapping[str, Any]
    model_constants: frozenset[str]
    diverse: bool
    """True if a variant with set-conditioned selection (`diverse-NAME`) exists.

    The variant needs scores of single tokens.
    """
    blocks: bool
    """True if the policy accepts the constant `block`, which makes the policy keep whole blocks."""
    family: str
    """Stage family that the policy needs from the backend."""
    positions: str
    """Rule of rotary positions in the publication: "kept" or "renumbered" (spec/positions.md)."""
    unused: frozenset[str] = frozenset()
    """Fields of `parameters` that the policy does not use, so that they are no constants of the policy."""

    @cached_property
    def constants(self) -> frozenset[str]:
        """Return the names of the constants that a caller can set: maker arguments and fields of `parameters`."""
        taken = frozenset(signature(self.make).parameters) - frozenset(self.decided) - self.model_constants
        return taken | frozenset(self.parameters)

    @cached_property
    def parameters(self) -> dict[str, object]:
        """Return the used fields of the maker's argument `parameters`, with defaults.

        If the maker has no such argument, the result is {}.
        """
        given = signature(self.make).parameters.get("parameters")
        names = [] if given is None else [one.name for one in fields(given.default) if one.name not in self.unused]
        return {name: getattr(given.default, name) for name in names} if given else {}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Return the constants that a caller can set, with defaults. `Parameter.empty` means no default."""
        given = signature(self.make).parameters
        return {key: one.default for key, one in given.items() if key in self.constants} | self.parameters

    def check_kinds(self, constants: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """Check that each constant has the kind of its default. A fraction may be a text such as "1/5".

        Args:
            constants: constants from the caller.
            more: defaults of further constants.

        Raises:
            SpecError: if a constant has a different kind. No policy is made.
        """
        makers, defaults = signature(self.make).parameters, {**self.defaults, **more}
        for key, value in constants.items():
            default = defaults.get(key)
            words, kinds = _KINDS.get(type(default), ("", ()))
            optional = key in makers and NoneType in get_args(makers[key].annotation)
            if not words or (value is None and optional) or (isinstance(default, Fraction) and _is_fraction(value)):
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                shown = value if isinstance(value, (str, bool, float)) or value is None else type(value).__name__
                raise SpecError(key, shown, f"must be {words}, such as {_shown(default)}")

    def policy(self, constants: Mapping[str, Any]) -> Policy:
        """Return the policy with the given constants. A list (for example from a TOML file) becomes a tuple."""
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in constants.items()}
        if changed := {key: arguments.pop(key) for key in self.parameters.keys() & arguments.keys()}:
            default = signature(self.make).parameters["parameters"].default
            arguments["parameters"] = replace(arguments.get("parameters", default), **changed)
        return self.make(**self.decided, **arguments)


REGISTERED: dict[str, NamedPolicy] = {}


def _is_fraction(value: object) -> bool:
    try:
        return isinstance(value, str) and Fraction(value) >= 0
    except (ValueError, ZeroDivisionError):
        return False


def _shown(default: object) -> object:
    return float(default) if isinstance(default, Fraction) else default


def named(
    name: str, paper: str, keeps: str, *, decided: Mapping[str, Any] | None = None,
    model_constants: frozenset[str] = frozenset(), diverse: bool = True, blocks: bool = True,
    family: str = "policies", positions: str = "kept", unused: frozenset[str] = frozenset(),
) -> Callable[[Maker], Maker]:
    """Return a decorator that gives a policy's maker function a name. The arguments are the fields of `NamedPolicy`."""
    def register(make: Maker) -> Maker:
        assert name not in REGISTERED, f"two makers are named {name}"
        REGISTERED[name] = NamedPolicy(
            paper, keeps, make, decided or {}, model_constants, diverse, blocks, family, positions, unused
        )
        return make

    return register
