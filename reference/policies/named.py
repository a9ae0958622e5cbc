"""The decorator `@named` names a function that makes a policy. The module `names.py` lists the named policies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from inspect import signature
from typing import Any, TypeVar

from spec.policy import Policy

__all__ = ["REGISTERED", "NamedPolicy", "named"]

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

    @cached_property
    def constants(self) -> frozenset[str]:
        """Return the names of the constants that a caller can set: maker arguments and fields of `parameters`."""
        taken = frozenset(signature(self.make).parameters) - frozenset(self.decided) - self.model_constants
        return taken | frozenset(self.parameters)

    @cached_property
    def parameters(self) -> dict[str, object]:
        """Return the fields of the maker's argument `parameters`, with defaults.

        If the maker has no such argument, the result is {}.
        """
        given = signature(self.make).parameters.get("parameters")
        return {} if given is None else {one.name: getattr(given.default, one.name) for one in fields(given.default)}

    def policy(self, constants: Mapping[str, Any]) -> Policy:
        """Return the policy with the given constants. A list (for example from a TOML file) becomes a tuple."""
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in constants.items()}
        if changed := {key: arguments.pop(key) for key in self.parameters.keys() & arguments.keys()}:
            default = signature(self.make).parameters["parameters"].default
            arguments["parameters"] = replace(arguments.get("parameters", default), **changed)
        return self.make(**self.decided, **arguments)


REGISTERED: dict[str, NamedPolicy] = {}


def named(
    name: str, paper: str, keeps: str, *, decided: Mapping[str, Any] | None = None,
    model_constants: frozenset[str] = frozenset(), diverse: bool = True, blocks: bool = True,
    family: str = "policies", positions: str = "kept",
) -> Callable[[Maker], Maker]:
    """Return a decorator that gives a policy's maker function a name. The arguments are the fields of `NamedPolicy`."""
    def register(make: Maker) -> Maker:
        assert name not in REGISTERED, f"two makers are named {name}"
        REGISTERED[name] = NamedPolicy(
            paper, keeps, make, decided or {}, model_constants, diverse, blocks, family, positions
        )
        return make

    return register
