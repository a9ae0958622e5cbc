"""What is swept: grids of CrystalCache's parameters, each varied alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models_integration.studies.subject import Subject
from models_integration.tasks import TASKS
from reference.crystalcache.protection import effective_budget
from spec import SPEC_VERSION
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import ESSAY, PAPER, CrystalCacheParameters
from spec.validate import check_choices

__all__ = ["BASE", "GRIDS", "Plan"]

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
