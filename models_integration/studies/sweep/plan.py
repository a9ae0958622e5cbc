"""What is swept, grids of CrystalCache's parameters, each varied alone; every variant is run on the same samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from models_integration.policies.methods import CrystalCache
from models_integration.session.method import Method
from models_integration.studies.answers import SAMPLES, Asked, Key, Run
from models_integration.studies.leases import taken_up
from models_integration.studies.results import Row
from models_integration.studies.subject import Subject, check_compared, task_in_rows
from models_integration.tasks import TASKS
from reference.crystalcache.protection import effective_budget
from reference.statistics import wilson
from spec import SPEC_VERSION
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import ESSAY, PAPER, CrystalCacheParameters
from spec.validate import check_choices

__all__ = ["BASE", "GRIDS", "Plan", "run_plan", "run_variants"]

BASE = "PAPER"

Variants = Mapping[str, CrystalCacheParameters]

GRIDS: dict[str, Variants] = {
    # The values that Appendix A says were swept; each grid has the base in it once.
    "appendix-a": {
        BASE: PAPER,
        **{f"T_max={value}": replace(PAPER, T_max=value) for value in (16, 24, 48)},
        **{f"s={value:g}": replace(PAPER, s=value) for value in (2.0, 10.0)},
        **{f"alpha={value:g}": replace(PAPER, alpha=value) for value in (0.25, 0.5, 2.0, 8.0)},
    },
    "extensions": {
        BASE: PAPER,
        "ESSAY": ESSAY,
        "tiers": replace(PAPER, allocation="tiers"),
        **{f"coverage={value:g}": replace(PAPER, coverage=value) for value in (0.1, 0.25, 0.5)},
        "merge=median": replace(PAPER, merge="median"),
        "rarity=reciprocal": replace(PAPER, rarity="reciprocal"),
        "rarity=exponential": replace(PAPER, rarity="exponential"),
    },
}


@dataclass(frozen=True)
class Plan:
    """What is swept, on what.

    Raises:
        SpecError: for an unknown grid or task, a budget of no known form, or no samples.
    """

    grid: str = "appendix-a"
    budget: str = "0.3"
    tasks: tuple[str, ...] = TASKS
    length: int = 1024
    samples: int = 10
    seed: int = 42

    def __post_init__(self) -> None:
        check_choices("grid", (self.grid,), GRIDS)
        check_compared(self.tasks)
        parse_budget(self.budget)
        if self.samples < 1:
            raise SpecError("samples", self.samples, "must be at least 1")

    @property
    def tokens(self) -> int:
        """B of Eq. 30, the same for every variant."""
        return min(self.length, effective_budget(parse_budget(self.budget), self.length, PAPER.N_sink, PAPER.W_recent))

    def identity(self, variant: str, task: str, subject: Subject) -> dict[str, str | int]:
        """What a stored row must share to answer the same question."""
        return {
            "grid": self.grid, "variant": variant, "parameters": repr(GRIDS[self.grid][variant]),
            "task": task_in_rows(task), "length": self.length, "budget_requested": self.budget, "budget": self.tokens,
            "n": self.samples, "seed": self.seed, "model": subject.name, "backend": subject.backend,
            "spec_version": SPEC_VERSION,
        }


def run_plan(
    subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None], batch_size: int = 1,
    again: bool = False,
) -> Iterator[Row]:
    """Each variant on each task, from the results file where it is there already, and stored there where it is not.

    Beside that file, `SAMPLES` has a row for each sample, as in a comparison.
    """
    about = {"length": plan.length, "seed": plan.seed}
    run = Run(subject, path.with_name(SAMPLES), about, "after", batch_size, progress, again)
    for task in plan.tasks:
        identities = {variant: plan.identity(variant, task, subject) for variant in GRIDS[plan.grid]}
        yield from taken_up(path, identities, progress, partial(run_variants, run, plan, task))


def run_variants(run: Run, plan: Plan, task: str, variants: Sequence[str]) -> list[Row]:
    """All samples of variants; `outcomes` says which were right, for comparisons sample by sample."""
    subject, methods = run.subject, dict[Key, Method]()
    for variant in variants:
        parameters = GRIDS[plan.grid][variant]
        policy = CrystalCache(plan.tokens, subject.sentence_ends, parameters, subject.backend)
        methods[Key(variant, plan.tokens, repr(parameters))] = policy.on(subject.model)

    def asked(index: int) -> list[Asked]:
        return [(subject.sample(task, plan.length, index, plan.seed), methods)]

    said = run.task(task_in_rows(task), plan.samples, asked)
    return [_row(subject, plan, task, key.policy, [each[key] for each in said]) for key in methods if said]


def _row(subject: Subject, plan: Plan, task: str, variant: str, said: Sequence[Row]) -> Row:
    outcomes = [int(each["right"]) for each in said]
    low, high = wilson(sum(outcomes), plan.samples)
    return {
        **plan.identity(variant, task, subject), "correct": sum(outcomes), "accuracy": sum(outcomes) / plan.samples,
        "low": low, "high": high, "mean_kept": sum(each["kept"] for each in said) / plan.samples,
        "mean_cache": sum(each["mean_cache"] for each in said) / plan.samples,
        "most_kept": max(each["kept"] for each in said), "outcomes": outcomes,
    }
