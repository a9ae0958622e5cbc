"""Families crossed with what else a test varies: by day a part in which each family and each value occurs.

Which heads and layers a value is about, a family with full attention everywhere and one with windows show; what else a
family does of its own, its projections, rotation and norms, shows in any value that looks at it.
"""

from collections.abc import Iterable, Sequence

import pytest

from conformance.own.models_integration.session.families import FAMILIES

__all__ = ["WHOLE", "crossed"]

WHOLE = ("llama", "gemma3")
"""Full attention in every layer, and windows in some: they meet every value in every run."""


def crossed(
    name: str, values: Iterable[object], *, always: Iterable[object] = (), whole: Sequence[str] = WHOLE,
) -> pytest.MarkDecorator:
    """A test's parameters `family` and `name`: every pair in the profile nightly.

    Args:
        name: Of the other parameter.
        values: What it takes.
        always: Those of them that every family meets by day, too; without any, each family meets one of all, in turn.
        whole: Families that meet every value by day.
    """
    others, met = list(values), list(always)
    parameters = []
    for at, family in enumerate(FAMILIES):
        by_day = met or [others[at % len(others)]]
        for value in others:
            marks = () if family in whole or value in by_day else pytest.mark.nightly
            parameters.append(pytest.param(family, value, marks=marks, id=f"{family}-{value}"))
    return pytest.mark.parametrize(("family", name), parameters)
