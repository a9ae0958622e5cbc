"""Running a plan: every cell once, each result stored as soon as it is there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models_integration.model.identity import ModelIdentity, identify
from models_integration.policies.methods import CrystalCache, FullCache, Method, StreamingLLM
from models_integration.policies.published import NAMES, Published, constants_of
from models_integration.studies.cells import Cell
from models_integration.studies.compare.controls import only_needle, without_needle
from models_integration.studies.compare.runner import Answer, answer
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.tasks import MAX_NEW_TOKENS, Sample, draw_sample, needle_sample, place, score
from reference.calibration import Calibration
from spec.budget import parse_budget
from spec.tables import result_table

__all__ = ["CONTROL_BOUNDS", "Subject", "named_method", "run_cell", "run_cells", "verdict"]

CONTROL_BOUNDS: dict[str, tuple[str, float]] = {
    "without needle": ("<=", 0.05),
    "only needle": (">=", 0.9),
    "window holds needle": (">=", 0.9),
    "window misses needle": ("<=", 0.1),
}


@dataclass(frozen=True)
class Subject:
    """A model under test."""

    label: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sentence_ends: frozenset[int]
    backend: str
    stop_ids: frozenset[int]
    calibration: Calibration | None = None
    """TriAttention's statistics of this model."""

    @cached_property
    def identity(self) -> ModelIdentity:
        """Made when a row or a file first needs it: it reads all parameters."""
        return identify(self.model)

    @property
    def name(self) -> str:
        """What rows of results call it."""
        return self.identity.named(self.label)


def verdict(row: Row) -> str:
    """What a control must show and whether it does, as "<= 0.05; holds"."""
    relation, bound = CONTROL_BOUNDS[row["policy"]]
    holds = row["accuracy"] <= bound if relation == "<=" else row["accuracy"] >= bound
    return f"{relation} {bound}; {'holds' if holds else 'FAILS'}"


def run_cells(
    subject: Subject, cells: Sequence[Cell], path: Path, progress: Callable[[str], None],
) -> Iterator[Row]:
    """Each cell's row, from the results file where it is there already; `progress` is told of every sample."""
    for cell in cells:
        row = find_row(load_rows(path), _identity(subject, cell))
        if row is None:
            row = run_cell(subject, cell, progress)
            result_table([row])
            append_row(path, row)
        else:
            for _ in range(cell.n):
                progress(f"{cell.policy} (stored)")
        yield row


def run_cell(subject: Subject, cell: Cell, progress: Callable[[str], None]) -> Row:
    """All samples of one cell."""
    correct, answers = 0, []
    for index in range(cell.n):
        sample = _sample(subject, cell, index)
        method = _method(subject, cell, sample)
        given = answer(subject.model, method, place(sample, cell.placement), MAX_NEW_TOKENS, subject.stop_ids)
        correct += score(subject.tokenizer, given.token_ids, sample)
        answers.append(given)
        progress(f"{cell.policy}, {cell.task}")
    return {
        **_identity(subject, cell),
        "correct": correct,
        "accuracy": correct / cell.n,
        **_storage(answers, cell.budget),
    }


def _identity(subject: Subject, cell: Cell) -> dict[str, str | int | bool]:
    """What a stored row must share; a policy that goes by statistics is named with their digest."""
    found = cell.identity(subject.name, subject.backend)
    if subject.calibration is not None and _wants(cell.policy, "calibration"):
        found["policy"] = f"{cell.policy}@{subject.calibration.digest}"
    return found


def _wants(policy: str, constant: str) -> bool:
    return policy in NAMES and constant in constants_of(policy)


def _storage(answers: Sequence[Answer], B: int) -> dict[str, float]:
    return {
        "mean_cache": sum(given.mean_cache for given in answers) / len(answers),
        "peak_cache": max(given.peak_cache for given in answers),
        "over_budget": max(0, *(given.kept - B for given in answers)),
    }


def _sample(subject: Subject, cell: Cell, index: int) -> Sample:
    if cell.policy.startswith("window") and cell.task == "needle":
        depth = 1.0 if cell.policy == "window holds needle" else 0.25
        return needle_sample(subject.tokenizer, cell.length, depth, (cell.seed, cell.length, index))
    return draw_sample(cell.task, subject.tokenizer, cell.length, index, cell.seed)


def named_method(subject: Subject, policy: str, budget: int | str) -> Method | Published:
    """CrystalCache, or a published policy, by name.

    Raises:
        SpecError: for an unknown name or budget.
    """
    if policy == "crystalcache":
        return CrystalCache(budget, sentence_ends=subject.sentence_ends, backend=subject.backend)
    offered = {"backend": subject.backend, "calibration": subject.calibration}
    constants = {name: value for name, value in offered.items() if _wants(policy, name)}
    return Published(policy, budget, identity=subject.identity if "calibration" in constants else None, **constants)


def _method(subject: Subject, cell: Cell, sample: Sample) -> Method | Published:
    start, stop = sample.needle
    if cell.policy == "streamingllm" or cell.policy.startswith("window"):
        return StreamingLLM(cell.budget)
    if cell.policy == "crystalcache" or cell.policy in NAMES:
        return named_method(subject, cell.policy, cell.budget)
    if cell.policy == "without needle":
        return Method(without_needle(start, stop), parse_budget(cell.budget))
    if cell.policy == "only needle":
        return Method(only_needle(start, stop), parse_budget(cell.budget))
    return FullCache()
