"""What both halves agree on: presses with their counterparts, constants, budgets, and files of one line a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from conformance.measure.peers.inputs import Constants
from models_integration.studies.results import Row, load_rows
from spec.budget import parse_budget
from spec.errors import SpecError

__all__ = ["COUNTERPARTS", "MAX_NEW_TOKENS", "MODEL", "TASKS", "UNEXPLAINED", "Plan", "by_name", "constants", "ratio"]

MODEL = "smollm2"
TASKS = ("needle_in_prose", "keys_in_prose_2", "keys_in_prose_4", "key_value_short")
MAX_NEW_TOKENS = 6
"""A space, four digits, and what ends the number."""
UNEXPLAINED = "unexplained"
COUNTERPARTS: Mapping[str, str] = {
    "StreamingLLM": "streamingllm", "SnapKV": "snapkv", "PyramidKV": "pyramidkv", "ChunkKV": "chunkkv",
    "KeyDiff": "keydiff", "Knorm": "knorm", "AdaKV": "adakv", "ExpectedAttention": "expected-attention",
}


def constants(layers: int) -> Constants:
    """Our policies' defaults, which the presses are given too."""
    return Constants(window=32, kernel=7, chunk=10, sinks=4, future=512, layers=layers, lag=128, rehearsed=2000)


@dataclass(frozen=True)
class Plan:
    """What is compared, and where its files are.

    Raises:
        SpecError: for no prompt, or a length at which a budget is no ratio.
    """

    prompts: int
    length: int
    budgets: tuple[str, ...]
    out: Path

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise SpecError("prompts", self.prompts, "must be at least 1")
        for budget in self.budgets:
            ratio(budget, self.length)

    def rows(self, half: str) -> dict[str, Row]:
        """What a half has written of prompts of this length under these budgets, by the prompt's digest."""
        rows, wanted = load_rows(self.file(half)), (self.length, list(self.budgets))
        return {row["prompt"]: row for row in rows if (row["length"], row["budgets"]) == wanted}

    def file(self, half: str) -> Path:
        """Where a half writes."""
        return self.out / f"{half}.jsonl"


def by_name(cells: Mapping[tuple[str, str], object]) -> Row:
    """Of (name, budget), as JSON has it: budgets inside names."""
    found: Row = {}
    for (name, budget), value in cells.items():
        found.setdefault(name, {})[budget] = value
    return found


def ratio(budget: str, n: int) -> str:
    """The part of n tokens that a press is told to remove, so that it keeps as many as our budget.

    Raises:
        SpecError: where no float says it exactly: kvpress truncates, and would keep one fewer.
    """
    B = parse_budget(budget).tokens(n)
    removed = str(1 - B / n)
    if not 1 - Fraction(removed) == 1 - Fraction(float(removed)) == Fraction(B, n):
        raise SpecError("length", n, f"must be such that {B} of its tokens are an exact share, as of a power of two")
    return removed
