"""What is compared: the plan, its cells, and what identifies a cell's result."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

from models_integration.tasks import PLACEMENTS, TASKS
from reference.crystalcache.protection import effective_budget
from reference.policies.names import NAMES
from spec import SPEC_VERSION
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.validate import check_choices

__all__ = ["CONTROLS", "FULL", "Cell", "Plan", "cells"]

FULL = "fullcache"
"""The policy that needs no budget."""
CONTROLS = ("without needle", "only needle", "window holds needle", "window misses needle")


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
            for control in CONTROLS:
                if task == "needle" or control != "window holds needle":
                    requested = plan.budgets[0] if control.startswith("window") else "1.0"
                    yield _cell(plan, task, control, requested, plan.tokens(requested), control=True)


def _cell(plan: Plan, task: str, policy: str, requested: str, B: int, *, control: bool) -> Cell:
    return Cell(policy, task, plan.length, requested, B, plan.placement, plan.samples, plan.seed, control)
