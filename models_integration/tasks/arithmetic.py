"""Problems of arithmetic in several steps, behind worked examples; the answer is reasoned and ends in a box.

They stand in for MATH-500, the problems of the paper on set-conditioned diversity. kvspec does not ship MATH-500, and
reads a file of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models_integration.tasks.context import Ground, as_many, joined
from models_integration.tasks.metrics import BOXED, MATH_BOXED
from models_integration.tasks.rows import OfFile, open_rows
from models_integration.tasks.samples import CONFIRM, DEV, Sample
from reference.confirmation import split_of
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = ["MAX_NEW_TOKENS", "arithmetic_samples", "math_file"]

MAX_NEW_TOKENS = 256
_STEPS = 3
_ASKED, _MATH_TOKENS = "\nReason step by step, and put the final answer into \\boxed{}.", 1024
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": int.__add__, "-": int.__sub__, "*": int.__mul__,
}


class _Problem(NamedTuple):
    question: str
    solution: str
    answer: int


def arithmetic_samples(ground: Ground, length: int, index: int, seed: int, *, part: str = DEV) -> tuple[Sample, ...]:
    """One sample: a problem behind as many worked examples as there is room for.

    Args:
        ground: tokenizer, running text and frame; a few tokens of the text before all else make the length exact.
        length: context tokens, the frame's opening included and the problem excluded.
        index: of the problem.
        seed: of all problems.
        part: the part of the paper's split, by the MD5 of the problem's name, that the problem belongs to.

    Raises:
        SpecError: for an unknown part, a negative index or seed, and a length that is too short.
    """
    check_choices("part", (part,), (DEV, CONFIRM))
    ids = (name for number in count() if split_of(name := f"arithmetic/{seed}/{index}/{number}") == part)
    unique_id = next(ids)
    rng = ground.rng(length, index, seed, int(unique_id.rpartition("/")[2]))
    problem = _drawn(rng)

    def example() -> tuple[int, ...]:
        shown = _drawn(rng)
        return ground.encode(f"\n\n{shown.question}\nSolution: {shown.solution}")

    text = joined(ground, length, index, seed, as_many(example, ground.room(length)))
    sample = ground.sample(
        text.ids, f"\n\n{problem.question}", "Solution:", str(problem.answer), [], gap="\n", task="arithmetic",
        metric=BOXED, max_new_tokens=MAX_NEW_TOKENS, metadata={"id": unique_id},
    )
    return (replace(sample, answer_ids=()),)


def _drawn(rng: np.random.Generator) -> _Problem:
    """A number, and what is done with it step by step."""
    value = int(rng.integers(10, 100))
    asked, steps = f"Start with {value}.", list[str]()
    for _ in range(_STEPS):
        sign = str(rng.choice(list(_OPERATIONS)))
        other = int(rng.integers(2, 10) if sign == "*" else rng.integers(10, 100))
        asked += {"+": f" Add {other}.", "-": f" Subtract {other}.", "*": f" Multiply by {other}."}[sign]
        result = _OPERATIONS[sign](value, other)
        steps.append(f"{value} {sign} {other} = {result}.")
        value = result
    return _Problem(
        f"Problem: {asked} What is the result? Put it into \\boxed{{}}.", f"{' '.join(steps)} \\boxed{{{value}}}", value
    )


def math_file(path: Path, *, part: str = "") -> OfFile:
    """A file of MATH-500, one problem each, which is its own context.

    A row has `problem`, `answer` and `unique_id`. The answer is reasoned and ends in a box, and math-verify judges
    whether that is equal to the reference.

    Args:
        path: of the file.
        part: the part of the paper's split, by the MD5 of `unique_id`, that problems belong to; all of them for "".

    Raises:
        SpecError: for an unknown part, a part without problems, a file or a row that is not as described.
    """
    check_choices("part", (part,), ("", DEV, CONFIRM))
    file = open_rows(path, {"problem": str, "answer": str, "unique_id": str})
    file = replace(file, rows=[row for row in file.rows if part in ("", split_of(row["unique_id"]))])

    def samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
        row = file.row(index)
        sample = ground.sample(
            (*ground.frame.opening, *ground.encode(row["problem"])), _ASKED, "", row["answer"], (), gap="\n",
            task="math", dialect="math-500", metric=MATH_BOXED, max_new_tokens=_MATH_TOKENS,
            metadata={"id": row["unique_id"]},
        )
        if sample.length > length:
            raise SpecError("length", length, f"must be at least {sample.length}, the tokens of row {index} of {path}")
        return file.fitted((replace(sample, answer_ids=()),), index, length)

    return OfFile(samples, len(file.rows))
