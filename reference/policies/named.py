"""The names of policies: `@named` above a maker gives it one, and `reference.policies.names` finds it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, TypeVar

from spec.policy import Policy

__all__ = ["REGISTERED", "NamedPolicy", "named"]

Maker = TypeVar("Maker", bound=Callable[..., Policy])


@dataclass(frozen=True)
class NamedPolicy:
    """A policy by its name: a maker, the constants that the name decides, and the names of those that the model does.

    What it promises is its row of the table in spec/policies.md.
    """

    paper: str
    """Where the method is published; "" for none."""
    keeps: str
    """What is kept, as a noun phrase."""
    make: Callable[..., Policy]
    decided: Mapping[str, Any]
    of_model: frozenset[str]
    diverse: bool
    """Whether the name may stand behind DIVERSE: it keeps single tokens by their scores."""
    blocks: bool
    """Whether BLOCK, which its maker does not have, makes it one of blocks."""
    family: str
    """The stage family of the backend that its maker takes."""

    @property
    def constants(self) -> frozenset[str]:
        """What a caller may give: the maker's arguments, and each field of its `parameters` by its own name."""
        taken = frozenset(signature(self.make).parameters) - frozenset(self.decided) - self.of_model
        return taken | frozenset(self.parameters)

    @property
    def parameters(self) -> dict[str, object]:
        """The fields of its `parameters` with their defaults; {} if it has none."""
        given = signature(self.make).parameters.get("parameters")
        return {} if given is None else {one.name: getattr(given.default, one.name) for one in fields(given.default)}

    def policy(self, constants: Mapping[str, Any]) -> Policy:
        """The policy with these constants; a list, as TOML has it, is a tuple."""
        own = {key: tuple(value) if isinstance(value, list) else value for key, value in constants.items()}
        if changed := {key: own.pop(key) for key in self.parameters.keys() & own.keys()}:
            default = signature(self.make).parameters["parameters"].default
            own["parameters"] = replace(own.get("parameters", default), **changed)
        return self.make(**self.decided, **own)


REGISTERED: dict[str, NamedPolicy] = {}


def named(
    name: str, paper: str, keeps: str, *, decided: Mapping[str, Any] | None = None,
    of_model: frozenset[str] = frozenset(), diverse: bool = True, blocks: bool = True,
    family: str = "policies",
) -> Callable[[Maker], Maker]:
    """A decorator that gives a maker of policies a name; the arguments are the fields of NamedPolicy."""
    def register(make: Maker) -> Maker:
        assert name not in REGISTERED, f"two makers are named {name}"
        REGISTERED[name] = NamedPolicy(paper, keeps, make, decided or {}, of_model, diverse, blocks, family)
        return make

    return register
