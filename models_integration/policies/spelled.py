"""A policy as text: `snapkv`, or with constants of its own `snapkv(W=16)`."""

import tomllib
from typing import Any

from models_integration.policies.methods import check_constants
from reference.policies.names import check_name
from spec.errors import SpecError

__all__ = ["spelled"]

_FORM = 'must be a name, or a name and its constants, as in crystalcache(alpha=0.5, impact="salience")'


def spelled(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the constants that a text gives; values are those of TOML.

    Raises:
        SpecError: for a text of another form, an unknown name, or a constant that the policy does not have.
    """
    name, bracket, rest = text.partition("(")
    check_name(name, "policy")
    if bracket and (not rest.endswith(")") or "\n" in rest):
        raise SpecError("policy", text, _FORM)
    try:
        constants: dict[str, Any] = tomllib.loads(f"constants = {{{rest[:-1]}}}")["constants"]
    except tomllib.TOMLDecodeError as error:
        raise SpecError("policy", text, f"{_FORM}: {error}") from error
    check_constants(name, constants)
    return name, constants
