"""What is swept, grids of CrystalCache's parameters, each varied alone; every variant is run on the same samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from models_integration.policies.methods import CrystalCache
from models_integration.studies.answers import answer_all
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from models_integration.tasks import MAX_NEW_TOKENS, TASKS, draw_sample, place, score
from reference.crystalcache.protection import effective_budget
from reference.statistics import wilson
from spec import SPEC_VERSION
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import ESSAY, PAPER, CrystalCacheParameters
from spec.validate import check_choices

__all__ = ["BASE", "GRIDS", "Plan", "run_plan", "run_variant"]

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
        check_choices("task", self.tasks, TASKS)
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
            "grid": self.grid, "variant": variant, "parameters": repr(GRIDS[self.grid][variant]), "task": task,
            "length": self.length, "budget_requested": self.budget, "budget": self.tokens, "n": self.samples,
            "seed": self.seed, "model": subject.name, "backend": subject.backend, "spec_version": SPEC_VERSION,
        }


def run_plan(
    subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None], batch_size: int = 1,
) -> Iterator[Row]:
    """Each variant on each task, from the results file where it is there already, and stored there where it is not."""
    for variant in GRIDS[plan.grid]:
        for task in plan.tasks:
            row = find_row(load_rows(path), plan.identity(variant, task, subject))
            if row is None:
                row = run_variant(subject, plan, variant, task, progress, batch_size)
                append_row(path, row)
            else:
                for _ in range(plan.samples):
                    progress(f"{variant} (stored)")
            yield row


def run_variant(
    subject: Subject, plan: Plan, variant: str, task: str, progress: Callable[[str], None], batch_size: int = 1,
) -> Row:
    """All samples of one variant; `outcomes` says which were right, for comparisons sample by sample."""
    method = CrystalCache(
        plan.tokens, sentence_ends=subject.sentence_ends, parameters=GRIDS[plan.grid][variant], backend=subject.backend
    )
    samples = [draw_sample(task, subject.tokenizer, plan.length, index, plan.seed) for index in range(plan.samples)]
    answers = answer_all(
        subject.model, method, [place(sample, "after") for sample in samples], MAX_NEW_TOKENS, subject.stop_ids,
        batch_size, lambda: progress(f"{variant}, {task}"),
    )
    tokenizer = subject.tokenizer
    outcomes = [int(score(tokenizer, one.token_ids, sample)) for one, sample in zip(answers, samples, strict=True)]
    stored, most = sum(one.mean_cache for one in answers), max(one.kept for one in answers)
    low, high = wilson(sum(outcomes), plan.samples)
    return {
        **plan.identity(variant, task, subject), "correct": sum(outcomes), "accuracy": sum(outcomes) / plan.samples,
        "low": low, "high": high, "mean_cache": stored / plan.samples, "most_kept": most, "outcomes": outcomes,
    }
