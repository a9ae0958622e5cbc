"""Checks of a policy that a different machine names: a client in a request, or a server in a statement.

The text must not import a module, open a file, or set a constant that takes the memory or the time of the reader.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from models_integration.cache.renumbering import KEPT
from reference.policies import names
from reference.policies.describe import describe_policy
from reference.policies.grammar import Composition, is_composition, parse_composition
from spec.errors import SpecError

__all__ = ["EXTREME", "check_local_constants", "check_numbers", "check_values", "has_extreme_number"]

EXTREME = "must have no number of a million or more, or with an exponent below -99"
_EXTREME = re.compile(r"(?<![.\d])\d{7}|[.\d]e\+?0*([6-9]|[1-9]\d)|[.\d]e-\d{3}", re.IGNORECASE)
"""Number of a million or more, or near 0, in text. A window of this size once took the memory of the server, and
Python does not print a fraction with thousands of digits."""
_LARGE = 10**6
_COSTLY = frozenset({"C", "N_future", "W", "c", "k_cross", "k_intra", "kernel"})
_MOST = 1024
"""Largest value of the constants in `_COSTLY`. The memory or the time of a score is proportional to the constant, and
often to the length of the prompt too. All requests wait while a prompt is scored."""
_LEAST = 16
"""Smallest number of tokens in a piece: each piece is scored and selected separately."""
_WITHOUT_DEFAULT = frozenset({names.BACKEND, "calibration", "sentence_ends"})
"""Constants without a default that are checked elsewhere."""
_TYPES = {bool: bool, int: int, str: str, tuple: list}
"""Type in JSON of a constant, by the type of its default. All other defaults are numbers."""


def has_extreme_number(text: str) -> bool:
    """Return True if a text has a number of a million or more, or a number with an exponent below -99."""
    return _EXTREME.search(text) is not None


def check_numbers(constants: Mapping[str, Any]) -> None:
    """Check parsed constants for numbers of a million or more, which TOML also writes as 0xFFFFFF or 1_000_000.

    Raises:
        SpecError: if there is such a number.
    """
    for key, value in constants.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int | float) and abs(one) >= _LARGE:
                raise SpecError(key, "a number", f"must be below {_LARGE}")


def check_local_constants(name: str, constants: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Check that neither the constants nor a text set a constant that only this machine may set.

    Args:
        name: name of a policy, or the text of a policy whose parts can have constants too.
        constants: constants beside the text.
        reasons: constants that only this machine may set, with the end of the error message.

    Raises:
        SpecError: if one of these constants is set.
    """
    given = [constants]
    if is_composition(name):
        whole = parse_composition(name)
        given += [whole.constants, *(words for _, words in whole.parts.values())]
    for words in given:
        for key, reason in reasons.items():
            if key in words:
                raise SpecError(key, words[key], reason)


def check_values(name: str, constants: Mapping[str, Any]) -> None:
    """Check that each constant has the type of its default. Otherwise a policy can fail with any exception.

    Also check the sizes of the constants of all policies in the text `name`. First call `check_local_constants`,
    because the defaults of a text are those of the policy that the text makes.

    Raises:
        SpecError: if a type is wrong, if a constant costs too much, or if text cannot express the constant.
    """
    defaults = _defaults(name)
    for key, value in constants.items():
        if key in defaults:
            kind = type(defaults[key])
            if not isinstance(value, _TYPES.get(kind, int | float)) or isinstance(value, bool) != (kind is bool):
                raise SpecError(key, value, f"must be of the type of {defaults[key]!r}, the default of {name}")
        elif key not in _WITHOUT_DEFAULT and (name, key) != ("crystalcache", "parameters"):
            raise SpecError(key, value, f"cannot be sent as text: leave {key} out")
    for given in ({**defaults, **constants}, *map(_defaults, _later_policies(name))):
        for key in sorted(_COSTLY & given.keys()):
            if given[key] > _MOST:
                reason = f"must be at most {_MOST}, because the cost of a score grows with {key}"
                raise SpecError(key, given[key], reason)
    if is_composition(name):
        pieces, _ = parse_composition(name).parts.get("pieces", ("", {}))
        if pieces.isdigit() and int(pieces) < _LEAST:
            raise SpecError("pieces", pieces, f"must be at least {_LEAST}, because each piece is scored separately")


def _later_policies(name: str) -> list[str]:
    """Return the text of the policy that scores decode steps, as a list, which is empty without such a policy."""
    if not is_composition(name):
        return []
    value, constants = parse_composition(name).parts.get("steps", ("", {}))
    return [str(Composition(value, constants=constants))] if value else []


@lru_cache(maxsize=256)
def _defaults(name: str) -> Mapping[str, Any]:
    """Return the constants of a policy that have a default, with the values in the text of the policy."""
    of_policy = describe_policy(name).constants if names.is_built_in(name) else {}
    return {"block": 16, "decode": False, "positions": KEPT, "stream": False, **of_policy}
