"""Running a sweep: CrystalCache's variants on the same samples, each result stored as soon as it is there."""

from collections.abc import Callable, Iterator
from pathlib import Path

from models_integration.policies.methods import CrystalCache
from models_integration.studies.answers import answer_all
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from models_integration.studies.sweep.plan import GRIDS, Plan
from models_integration.tasks import MAX_NEW_TOKENS, draw_sample, place, score
from reference.statistics import wilson

__all__ = ["run_plan", "run_variant"]


def run_plan(
    subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None], batch_size: int = 1,
) -> Iterator[Row]:
    """Each variant on each task, from the results file where it is there already."""
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
