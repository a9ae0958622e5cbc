"""Arithmetic problems in several steps, after worked examples. The model reasons and gives the answer in a box.

The paper Set-Conditioned Diversity uses MATH-500. kvspec does not contain MATH-500, but can read a file of MATH-500.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.tasks.context import Ground, as_many, joined
from experiments.tasks.metrics import BOXED, MATH_BOXED
from experiments.tasks.needle import CONFIRM, DEV, Sample
from experiments.tasks.rows import OfFile, open_rows
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
    """Return one sample: a problem after as many worked examples as the length allows.

    Args:
        ground: tokenizer, running text and frame. A few tokens of the text at the start make the length exact.
        length: number of context tokens, including the frame's opening, without the problem.
        index: index of the problem.
        seed: seed of all problems.
        part: part of the paper's split to which the problem belongs, by the MD5 of the problem's name.

    Raises:
        SpecError: if the part is unknown, if index or seed is negative, or if the length is too short.
    """
    check_choices("part", (part,), (DEV, CONFIRM))
    ids = (name for number in count() if split_of(name := f"arithmetic/{seed}/{index}/{number}") == part)
    unique_id = next(ids)
    rng = ground.rng(length, index, seed, int(unique_id.rpartition("/")[2]))
    problem = _drawn(rng)

    def example() -> tuple[int, ...]:
        shown = _drawn(rng)
        return ground.encode(f"\n\n{shown.question}\nSolution: {shown.solution}")

    text = joined(ground, length, index, seed, as_many(example, ground.tokens_left(length)))
    sample = ground.sample(
        text.ids, f"\n\n{problem.question}", "Solution:", str(problem.answer), [], gap="\n", task="arithmetic",
        metric=BOXED, max_new_tokens=MAX_NEW_TOKENS, metadata={"id": unique_id},
    )
    return (replace(sample, answer_ids=()),)


def _drawn(rng: np.random.Generator) -> _Problem:
    """Return a random problem: a number, and the operations on the number step by step."""
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
    """Return the task for a file of MATH-500. Each problem is one context.

    A row has `problem`, `answer` and `unique_id`. The model reasons and gives the answer in a box. math-verify compares
    the answer with the reference.

    Args:
        path: path of the file.
        part: part of the paper's split, by the MD5 of `unique_id`, from which problems are used. "" means all problems.

    Raises:
        SpecError: if the part is unknown or has no problems, or if the file or a row has a different format.
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
