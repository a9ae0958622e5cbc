"""Check that each constant in the text of a policy changes the policy."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from reference.policies.grammar import SCORE, Composition, format_value
from reference.policies.parts import equal_parts
from spec.composition import provided_by, required_by
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["check_effects", "unused_fields"]

Data = Mapping[str, Any]
Make = Callable[[Composition, Data], Policy]
Change = Callable[[Composition, Data, object], tuple[Composition, Data]]
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(of[0-9]+)?")


def check_effects(policy: Policy, composition: Composition, data: Data, beside: Data, make: Make) -> None:
    """Check that no part of a text, `score=` or `steps=` makes a given constant of a named policy ineffective.

    A constant has an effect if the policy with a different value of the constant is a different policy. Words are not
    checked. Constants of all parts but `steps` always have an effect.

    Args:
        policy: the policy of the text.
        composition: the parsed text.
        data: constants beside the text.
        beside: those constants among `data` that belong to the named policy.
        make: function that makes the policy from a text and constants beside it.

    Raises:
        SpecError: if a constant has no effect. The message has the constant, and the part that replaces it.
    """
    for home, key, value, change in _constants(composition, beside):
        if _has_effect(policy, _changed(composition, data, value, change, make)) in (True, None):
            continue
        shown = f"{key}={format_value(value)}" + (f" of {home}={composition.parts[home][0]}" if home else "")
        for part in [one for one in composition.parts if one != home]:
            if part == key or _replaces(part, composition, data, value, change, make):
                reason = f"replaces {shown}: leave out one of the two"
                raise SpecError(part, composition.parts[part][0], reason)
        way_out = f"leave {key} out, or leave out {SCORE!r}" if not home else f"leave {key} out"
        if home or composition.scorer_only:
            name = composition.parts[home][0] if home else composition.name
            raise SpecError(home or "score", name, f"does not use {key}={format_value(value)}: {way_out}")


def _constants(composition: Composition, beside: Data) -> Iterator[tuple[str, str, object, Change]]:
    """Yield the part of each constant ("" for the named policy), its name, its value and how to change the value."""
    yield from (("", key, text, partial(_in_name, key)) for key, text in composition.constants.items())
    yield from (("", key, value, partial(_beside, key)) for key, value in beside.items())
    _, constants = composition.parts.get("steps", ("", {}))
    yield from (("steps", key, text, partial(_in_steps, key)) for key, text in constants.items())


def _in_name(key: str, composition: Composition, data: Data, other: object) -> tuple[Composition, Data]:
    return replace(composition, constants={**composition.constants, key: format_value(other)}), data


def _beside(key: str, composition: Composition, data: Data, other: object) -> tuple[Composition, Data]:
    return composition, {**data, key: other}


def _in_steps(key: str, composition: Composition, data: Data, other: object) -> tuple[Composition, Data]:
    name, constants = composition.parts["steps"]
    steps = (name, {**constants, key: format_value(other)})
    return replace(composition, parts={**composition.parts, "steps": steps}), data


def _changed(composition: Composition, data: Data, value: object, change: Change, make: Make) -> Iterator[Policy]:
    """Yield the policies with different values of a constant. Invalid values are left out."""
    for other in _other_values(value):
        with suppress(SpecError, TypeError):
            yield make(*change(composition, data, other))


def _has_effect(policy: Policy, changed: Iterator[Policy]) -> bool | None:
    """Return True if a changed policy differs, False if none differs, or None if there is no changed policy."""
    result = None
    for one in changed:
        if not equal_parts(one, policy, unused_fields(policy) & unused_fields(one)):
            return True
        result = False
    return result


def unused_fields(policy: Policy) -> frozenset[str]:
    """Return names of fields of a policy's scorer that have no effect, because no budgets use the preferences."""
    provided, required = provided_by(policy.scorer), required_by(policy.budgets)
    if provided is None or required is None or required.preferences:
        return frozenset()
    return provided.preference_constants


def _replaces(
    part: str, composition: Composition, data: Data, value: object, change: Change, make: Make,
) -> bool:
    """Return True if the constant has an effect in the text without the part."""
    rest = replace(composition, parts={name: one for name, one in composition.parts.items() if name != part})
    with suppress(SpecError, TypeError):
        return bool(_has_effect(make(rest, data), _changed(rest, data, value, change, make)))
    return False


def _other_values(value: object) -> list[object]:
    """Return different values of the type of a number: a larger one, odd if the value is odd, or half of the value.

    Text of a number has both. The result is empty for other types.
    """
    number: Any = value
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        number = Fraction(value.replace("of", "/"))
    if isinstance(number, bool) or not isinstance(number, int | float | Fraction) or not math.isfinite(number):
        return []
    whole, half = int(number) + 2, number / 2 if number else Fraction(1, 2)
    return [whole, half] if number is not value else [whole if isinstance(number, int) else half]
