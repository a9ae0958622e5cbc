"""Cells of a results table: many samples of one task at one length, from one seed."""

from __future__ import annotations

from collections.abc import Sequence

from models_integration.tasks import delayed_association, needle
from models_integration.tasks.filler import DEFAULT_FILLER, Filler
from models_integration.tasks.sample import Sample, TaskTokenizer
from models_integration.tasks.templates import ALL_VALUES
from spec.errors import SpecError

TASKS = (needle.TASK, delayed_association.TASK)


def draw_sample(
    task: str,
    tokenizer: TaskTokenizer,
    length: int,
    index: int,
    seed: int,
    *,
    filler: Filler = DEFAULT_FILLER,
    distractors: int = 0,
    values: Sequence[int] = ALL_VALUES,
) -> Sample:
    """Make the sample number ``index`` of a cell; depths or densities take turns over the index.

    It does not depend on how many samples the cell has. Raises :class:`SpecError` for an unknown task, a
    negative index, and for what the task itself refuses.
    """
    if index < 0:
        raise SpecError("index", index, "must not be negative")
    key = (seed, TASKS.index(task) if task in TASKS else -1, length, index)
    if task == needle.TASK:
        depth = needle.DEPTHS[index % len(needle.DEPTHS)]
        return needle.needle_sample(
            tokenizer, length, depth, key, filler=filler, distractors=distractors, values=values
        )
    if task == delayed_association.TASK:
        density = delayed_association.DENSITIES[index % len(delayed_association.DENSITIES)]
        return delayed_association.delayed_association_sample(
            tokenizer, length, density, key, filler=filler, distractors=distractors, values=values
        )
    raise SpecError("task", task, f"must be one of {', '.join(TASKS)}")
