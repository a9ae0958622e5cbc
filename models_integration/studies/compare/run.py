"""Running a plan: every cell once, sample by sample, each result stored as soon as it is there."""

from collections.abc import Callable, Iterator
from pathlib import Path

from models_integration.policies.published import constants_of
from models_integration.studies.answers import Answer, answer, answer_all
from models_integration.studies.compare.plan import Cell, Plan, cells
from models_integration.studies.compare.rules import control_method, control_sample
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from models_integration.tasks import MAX_NEW_TOKENS, Sample, draw_sample, place, score
from spec.tables import result_table

__all__ = ["run_cell", "run_plan", "stored_cells"]


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
            answers.append(answer(model, control_method(cell, sample), placement, MAX_NEW_TOKENS, stop))
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
        return [control_sample(tokenizer, cell, index) for index in indices]
    return [draw_sample(cell.task, tokenizer, cell.length, index, cell.seed) for index in indices]


def _identity(subject: Subject, cell: Cell) -> dict[str, str | int | bool]:
    """What a stored row must share; a policy that goes by statistics is named with their digest."""
    identity = cell.identity(subject.name, subject.backend)
    if subject.calibration is not None and not cell.control and "calibration" in constants_of(cell.policy):
        identity["policy"] = f"{cell.policy}@{subject.calibration.digest}"
    return identity
