"""Several questions on one context, asked one after another: SCBench's mode `multi-turn`."""

from collections.abc import Sequence
from dataclasses import replace

from models_integration.tasks.context import Ground
from models_integration.tasks.samples import Sample

__all__ = ["in_turns"]


def in_turns(ground: Ground, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples of one context as turns: before each question stand the earlier ones with their gold answers.

    As in SCBench, the model's own answers are not read again. `history` says how many tokens are earlier turns.
    """
    found, between = list[Sample](), ground.encode(ground.frame.between)
    history: tuple[int, ...] = ()
    for turn, sample in enumerate(samples):
        found.append(replace(
            sample, task=f"{sample.task}_turns", question_ids=(*history, *sample.question_ids), history=len(history),
            metadata={**sample.metadata, "turn": turn},
        ))
        history = (*history, *sample.question_ids, *sample.answer_ids, *between)
    return tuple(found)
