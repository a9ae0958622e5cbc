"""What is compared: a plan and its cells, each of which is run once, and its result stored."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

from models_integration.policies.methods import CustomPolicy, RetentionPolicy, StreamingLLM
from models_integration.policies.spelled import spelled
from models_integration.session.method import Method
from models_integration.studies.answers import SAMPLES, Asked, Key, Run
from models_integration.studies.compare.rules import CONTROL_BOUNDS, only_needle, without_needle
from models_integration.studies.leases import taken_up
from models_integration.studies.results import Row, find_row, load_rows
from models_integration.studies.subject import Subject, check_compared, policy_in_rows, task_in_rows
from models_integration.tasks import PLACEMENTS, TASKS, Sample, needle_sample
from models_integration.tasks.samples import DELAYED_ASSOCIATION, NEEDLE
from reference.crystalcache.protection import effective_budget
from spec import SPEC_VERSION
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.tables import result_table
from spec.validate import check_choices

__all__ = ["FULL", "Cell", "Plan", "cells", "run_cells", "run_plan", "stored_cells"]

FULL = "fullcache"
"""The policy that needs no budget."""
_CONTROL_DEPTHS = {"window holds needle": 1.0, "window misses needle": 0.25}
"""Of the controls that need a sample of their own."""
_WINDOWS = {NEEDLE: tuple(_CONTROL_DEPTHS), DELAYED_ASSOCIATION: ("window misses needle",)}
"""Those about the recent window, by task: a fact in prose may stand in it or not."""


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
        for policy in self.policies:
            spelled(policy)
        check_compared(self.tasks)
        check_choices("placement", (self.placement,), PLACEMENTS)
        for budget in self.budgets:
            parse_budget(budget)
        for name in ("samples", "length"):
            if (value := getattr(self, name)) < 1:
                raise SpecError(name, value, "must be at least 1")

    def tokens(self, budget: str) -> int:
        """The one B that every policy gets, over the context's tokens; a policy's floor is that policy's own."""
        return min(self.length, parse_budget(budget).tokens(self.length))

    def control_tokens(self, budget: str) -> int:
        """B of a control: it holds sinks and window, which a control is about."""
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
                if control not in _CONTROL_DEPTHS or control in _WINDOWS.get(task, ()):
                    requested = plan.budgets[0] if control.startswith("window") else "1.0"
                    yield _cell(plan, task, control, requested, plan.control_tokens(requested), control=True)


def _cell(plan: Plan, task: str, policy: str, requested: str, B: int, *, control: bool) -> Cell:
    return Cell(policy, task, plan.length, requested, B, plan.placement, plan.samples, plan.seed, control)


def run_plan(
    subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None], batch_size: int = 1,
    again: bool = False,
) -> Iterator[Row]:
    """Each cell's row, from the results file where it is there already; `progress` is told of every sample.

    Beside that file, `SAMPLES` has a row for each sample: a run that was stopped goes on behind the last of them. A
    task of which one failed has no rows, until that is made `again`.
    """
    about = {"length": plan.length, "seed": plan.seed}
    run = Run(subject, path.with_name(SAMPLES), about, plan.placement, batch_size, progress, again)
    for task in plan.tasks:
        identities = {cell: _identity(subject, cell) for cell in cells(plan) if cell.task == task}
        yield from taken_up(path, identities, progress, partial(run_cells, run))


def stored_cells(subject: Subject, plan: Plan, path: Path) -> int:
    """How many of a plan's cells are in the results file."""
    rows = load_rows(path)
    return sum(find_row(rows, _identity(subject, cell)) is not None for cell in cells(plan))


def run_cells(run: Run, wanted: Sequence[Cell]) -> list[Row]:
    """All samples of one task's cells, at least one; each prompt is read once for all that share it."""
    subject, task, n = run.subject, wanted[0].task, wanted[0].n
    keys = {cell: Key(str(_identity(subject, cell)["policy"]), cell.budget) for cell in wanted}
    methods = {
        cell: subject.policy(cell.policy, cell.budget).on(subject.model) for cell in wanted if not cell.control
    }

    def asked(index: int) -> Iterable[Asked]:
        found: dict[float | None, tuple[Sample, dict[Key, Method]]] = {}
        for cell in wanted:
            depth = _CONTROL_DEPTHS.get(cell.policy) if task == NEEDLE else None
            if depth not in found:
                found[depth] = _sample(subject, cell, index, depth), {}
            sample, own = found[depth]
            own[keys[cell]] = methods[cell] if cell in methods else _control(cell, sample).on(subject.model)
        return found.values()

    said = run.task(task_in_rows(task), n, asked)
    rows = [_row(subject, cell, [each[key] for each in said]) for cell, key in keys.items() if said]
    if rows:
        result_table(rows)
    return rows


def _row(subject: Subject, cell: Cell, said: Sequence[Row]) -> Row:
    correct = sum(each["right"] for each in said)
    return {
        **_identity(subject, cell),
        "correct": correct,
        "accuracy": correct / cell.n,
        "mean_kept": sum(each["kept"] for each in said) / cell.n,
        "mean_cache": sum(each["mean_cache"] for each in said) / cell.n,
        "peak_cache": max(each["peak_cache"] for each in said),
        "over_budget": max(0, *(each["kept"] - cell.budget for each in said)),
    }


def _identity(subject: Subject, cell: Cell) -> dict[str, str | int | bool]:
    """What a stored row must share."""
    identity = cell.identity(subject.name, subject.backend)
    if not cell.control:
        identity["policy"] = policy_in_rows(cell.policy, subject.calibration)
    return {**identity, "task": task_in_rows(cell.task)}


def _sample(subject: Subject, cell: Cell, index: int, depth: float | None) -> Sample:
    """The sample of all cells; or that of a control, which has its needle at a depth of its own."""
    if depth is None:
        return subject.sample(cell.task, cell.length, index, cell.seed)
    return needle_sample(subject.tokenizer, cell.length, depth, (cell.seed, cell.length, index))


def _control(cell: Cell, sample: Sample) -> RetentionPolicy:
    """What a control keeps of a sample."""
    if cell.policy in _CONTROL_DEPTHS:
        return StreamingLLM(cell.budget)
    keep = without_needle if cell.policy == "without needle" else only_needle
    return CustomPolicy(keep(*sample.needle), cell.budget)
