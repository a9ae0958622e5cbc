"""Distractor facts: the same sentence about other subjects, with other values.

Without them a model may answer with any number it has seen; with them it must know whose value is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models_integration.tasks.assembly import Anchor
from models_integration.tasks.templates import FactTemplate
from spec.errors import SpecError


def draw_value(rng: np.random.Generator, values: Sequence[int], used: Sequence[int] = ()) -> int:
    """Draw a value uniformly from ``values``, leaving out those in ``used``.

    Raises:
        SpecError: Every value is used up.
    """
    if len(set(values) - set(used)) == 0:
        raise SpecError("values", len(values), f"must hold a value beside the {len(used)} already used")
    while True:
        value = int(values[int(rng.integers(len(values)))])
        if value not in used:
            return value


def distractor_anchors(
    rng: np.random.Generator, template: FactTemplate, count: int, value: int, values: Sequence[int]
) -> list[Anchor]:
    """Make ``count`` distractor facts at random places, with distinct subjects and distinct values.

    Raises:
        SpecError: ``count`` is negative or larger than the number of other subjects.
    """
    most = len(template.other_keys)
    if not 0 <= count <= most:
        raise SpecError("distractors", count, f"must lie in [0, {most}] for the template {template.name!r}")
    used = [value]
    anchors = []
    for index in rng.permutation(most)[:count]:
        used.append(draw_value(rng, values, used))
        sentence = template.state(used[-1], template.other_keys[int(index)])
        anchors.append(Anchor(sentence, float(rng.random())))
    return anchors
