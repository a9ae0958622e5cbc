"""Running a sweep: CrystalCache's variants on the same samples, each result stored as soon as it is there."""

from collections.abc import Callable, Iterator
from pathlib import Path

from models_integration.policies.methods import CrystalCache
from models_integration.studies.compare.run import answer
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from models_integration.studies.sweep.plan import GRIDS, Plan
from models_integration.tasks import MAX_NEW_TOKENS, draw_sample, place, score
from reference.statistics import wilson

__all__ = ["run_plan", "run_variant"]


def run_plan(subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Each variant on each task, from the results file where it is there already."""
    for variant in GRIDS[plan.grid]:
        for task in plan.tasks:
            row = find_row(load_rows(path), plan.identity(variant, task, subject))
            if row is None:
                row = run_variant(subject, plan, variant, task, progress)
                append_row(path, row)
            else:
                for _ in range(plan.samples):
                    progress(f"{variant} (stored)")
            yield row


def run_variant(
    subject: Subject, plan: Plan, variant: str, task: str, progress: Callable[[str], None],
) -> Row:
    """All samples of one variant; `outcomes` says which were right, for comparisons sample by sample."""
    outcomes, stored, most = [], 0.0, 0
    method = CrystalCache(
        plan.tokens, sentence_ends=subject.sentence_ends, parameters=GRIDS[plan.grid][variant], backend=subject.backend
    )
    for index in range(plan.samples):
        sample = draw_sample(task, subject.tokenizer, plan.length, index, plan.seed)
        given = answer(subject.model, method, place(sample, "after"), MAX_NEW_TOKENS, subject.stop_ids)
        outcomes.append(int(score(subject.tokenizer, given.token_ids, sample)))
        stored += given.mean_cache
        most = max(most, given.kept)
        progress(f"{variant}, {task}")
    low, high = wilson(sum(outcomes), plan.samples)
    return {
        **plan.identity(variant, task, subject), "correct": sum(outcomes), "accuracy": sum(outcomes) / plan.samples,
        "low": low, "high": high, "mean_cache": stored / plan.samples, "most_kept": most, "outcomes": outcomes,
    }
