"""What is compared: a plan and its cells, each of which is run once; its result is stored as soon as it is there."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from models_integration.policies.methods import CustomPolicy, RetentionPolicy, StreamingLLM, constants_of
from models_integration.studies.answers import Answer, answer, answer_all
from models_integration.studies.compare.rules import CONTROL_BOUNDS, only_needle, without_needle
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from models_integration.tasks import (
    MAX_NEW_TOKENS,
    PLACEMENTS,
    TASKS,
    Sample,
    TaskTokenizer,
    draw_sample,
    needle_sample,
    place,
    score,
)
from reference.crystalcache.protection import effective_budget
from reference.policies.names import NAMES
from spec import SPEC_VERSION
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.tables import result_table
from spec.validate import check_choices

__all__ = ["FULL", "Cell", "Plan", "cells", "run_cell", "run_plan", "stored_cells"]

FULL = "fullcache"
"""The policy that needs no budget."""


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Raises:
        SpecError: for an unknown policy, task or placement, a budget of no known form, or no samples.
    """

    policies: tuple[str, ...] = ("crystalcache", "streamingllm", FULL)
    budgets: tuple[str, ...] = ("0.3", "0.5")
    tasks: tuple[str, ...] = TASKS
    length: int = 1024
    samples: int = 20
    seed: int = 42
    placement: str = "after"
    controls: bool = True

    def __post_init__(self) -> None:
        check_choices("policy", self.policies, NAMES)
        check_choices("task", self.tasks, TASKS)
        check_choices("placement", (self.placement,), PLACEMENTS)
        for budget in self.budgets:
            parse_budget(budget)
        if self.samples < 1:
            raise SpecError("samples", self.samples, "must be at least 1")

    def tokens(self, budget: str) -> int:
        """The one B of Eq. 30 that every policy gets, over the context's tokens."""
        return min(self.length, effective_budget(parse_budget(budget), self.length, PAPER.N_sink, PAPER.W_recent))


@dataclass(frozen=True)
class Cell:
    """One row of the table: a policy, or a control, on one task at one budget."""

    policy: str
    task: str
    length: int
    budget_requested: str
    budget: int
    placement: str
    n: int
    seed: int
    control: bool

    def identity(self, model: str, backend: str) -> dict[str, str | int | bool]:
        """The columns that a stored row must share to be this cell's result."""
        return {**asdict(self), "model": model, "backend": backend, "spec_version": SPEC_VERSION}


def cells(plan: Plan) -> Iterator[Cell]:
    """All cells, tasks outermost; the full cache and the controls have no budget of their own."""
    for task in plan.tasks:
        for policy, budget in product(plan.policies, plan.budgets):
            if policy != FULL:
                yield _cell(plan, task, policy, budget, plan.tokens(budget), control=False)
        if FULL in plan.policies:
            yield _cell(plan, task, FULL, "1.0", plan.length, control=False)
        if plan.controls:
            for control in CONTROL_BOUNDS:
                if task == "needle" or control != "window holds needle":
                    requested = plan.budgets[0] if control.startswith("window") else "1.0"
                    yield _cell(plan, task, control, requested, plan.tokens(requested), control=True)


def _cell(plan: Plan, task: str, policy: str, requested: str, B: int, *, control: bool) -> Cell:
    return Cell(policy, task, plan.length, requested, B, plan.placement, plan.samples, plan.seed, control)


def run_plan(
    subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None], batch_size: int = 1,
) -> Iterator[Row]:
    """Each cell's row, from the results file where it is there already; `progress` is told of every sample."""
    for cell in cells(plan):
        row = find_row(load_rows(path), _identity(subject, cell))
        if row is None:
            row = run_cell(subject, cell, progress, batch_size)
            result_table([row])
            append_row(path, row)
        else:
            for _ in range(cell.n):
                progress(f"{cell.policy} (stored)")
        yield row


def stored_cells(subject: Subject, plan: Plan, path: Path) -> int:
    """How many of a plan's cells are in the results file."""
    rows = load_rows(path)
    return sum(find_row(rows, _identity(subject, cell)) is not None for cell in cells(plan))


def run_cell(subject: Subject, cell: Cell, progress: Callable[[str], None], batch_size: int = 1) -> Row:
    """All samples of one cell, so many at once; a control's one at a time, as each has a policy of its own."""
    samples, answers = _samples(subject, cell), list[Answer]()
    placements = [place(sample, cell.placement) for sample in samples]
    model, stop, done = subject.model, subject.stop_ids, f"{cell.policy}, {cell.task}"
    if cell.control:
        for sample, placement in zip(samples, placements, strict=True):
            answers.append(answer(model, _control_method(cell, sample), placement, MAX_NEW_TOKENS, stop))
            progress(done)
    else:
        policy = subject.policy(cell.policy, cell.budget)
        answers = answer_all(model, policy, placements, MAX_NEW_TOKENS, stop, batch_size, lambda: progress(done))
    right = [score(subject.tokenizer, given.token_ids, sample) for given, sample in zip(answers, samples, strict=True)]
    correct = sum(right)
    return {
        **_identity(subject, cell),
        "correct": correct,
        "accuracy": correct / cell.n,
        "mean_cache": sum(given.mean_cache for given in answers) / len(answers),
        "peak_cache": max(given.peak_cache for given in answers),
        "over_budget": max(0, *(given.kept - cell.budget for given in answers)),
    }


def _samples(subject: Subject, cell: Cell) -> list[Sample]:
    tokenizer, indices = subject.tokenizer, range(cell.n)
    if cell.control:
        return [_control_sample(tokenizer, cell, index) for index in indices]
    return [draw_sample(cell.task, tokenizer, cell.length, index, cell.seed) for index in indices]


def _identity(subject: Subject, cell: Cell) -> dict[str, str | int | bool]:
    """What a stored row must share; a policy that goes by statistics is named with their digest."""
    identity = cell.identity(subject.name, subject.backend)
    if subject.calibration is not None and not cell.control and "calibration" in constants_of(cell.policy):
        identity["policy"] = f"{cell.policy}@{subject.calibration.digest}"
    return identity


def _control_sample(tokenizer: TaskTokenizer, cell: Cell, index: int) -> Sample:
    """A control's sample; those of a window put the needle inside it or outside."""
    if cell.policy.startswith("window") and cell.task == "needle":
        depth = 1.0 if cell.policy == "window holds needle" else 0.25
        return needle_sample(tokenizer, cell.length, depth, (cell.seed, cell.length, index))
    return draw_sample(cell.task, tokenizer, cell.length, index, cell.seed)


def _control_method(cell: Cell, sample: Sample) -> RetentionPolicy:
    """What a control keeps of a sample."""
    if cell.policy.startswith("window"):
        return StreamingLLM(cell.budget)
    keep = without_needle if cell.policy == "without needle" else only_needle
    return CustomPolicy(keep(*sample.needle), cell.budget)
