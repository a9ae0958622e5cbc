"""Running a plan: every cell once, sample by sample, each result stored as soon as it is there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.retained_cache import RetainedCache
from models_integration.policies.methods import RetentionPolicy
from models_integration.policies.published import Published, constants_of
from models_integration.session.session import Session
from models_integration.studies.compare.plan import Cell, Plan, cells
from models_integration.studies.compare.rules import control_method, control_sample
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from models_integration.tasks import MAX_NEW_TOKENS, Placement, Sample, draw_sample, place, score
from spec.tables import result_table

__all__ = ["Answer", "answer", "run_cell", "run_plan"]


@dataclass(frozen=True)
class Answer:
    """What a policy let the model say."""

    token_ids: list[int]
    kept: int
    """Slots that the policy kept, per layer and head."""
    mean_cache: float
    """Slots stored per layer and head, mean over the answer's forwards."""
    peak_cache: int
    """The most slots stored per layer and head at any time, the prompt's own forward included."""


def run_plan(subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Each cell's row, from the results file where it is there already; `progress` is told of every sample."""
    for cell in cells(plan):
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
        sample, method = _drawn(subject, cell, index)
        given = answer(subject.model, method, place(sample, cell.placement), MAX_NEW_TOKENS, subject.stop_ids)
        correct += score(subject.tokenizer, given.token_ids, sample)
        answers.append(given)
        progress(f"{cell.policy}, {cell.task}")
    return {
        **_identity(subject, cell),
        "correct": correct,
        "accuracy": correct / cell.n,
        "mean_cache": sum(given.mean_cache for given in answers) / len(answers),
        "peak_cache": max(given.peak_cache for given in answers),
        "over_budget": max(0, *(given.kept - cell.budget for given in answers)),
    }


def _drawn(subject: Subject, cell: Cell, index: int) -> tuple[Sample, RetentionPolicy]:
    """A sample of a cell, and the policy or control that reads it."""
    if cell.control:
        sample = control_sample(subject.tokenizer, cell, index)
        return sample, control_method(cell, sample)
    sample = draw_sample(cell.task, subject.tokenizer, cell.length, index, cell.seed)
    return sample, subject.policy(cell.policy, cell.budget)


def _identity(subject: Subject, cell: Cell) -> dict[str, str | int | bool]:
    """What a stored row must share; a policy that goes by statistics is named with their digest."""
    identity = cell.identity(subject.name, subject.backend)
    if subject.calibration is not None and not cell.control and "calibration" in constants_of(cell.policy):
        identity["policy"] = f"{cell.policy}@{subject.calibration.digest}"
    return identity


@torch.no_grad()
def answer(
    model: PreTrainedModel, method: RetentionPolicy, placement: Placement, max_new_tokens: int,
    stop_ids: frozenset[int],
) -> Answer:
    """Present one sample in its placement and decode greedily until a stop id or `max_new_tokens`.

    A published policy reads token by token inside its context, so that one that decides in its steps does. What is
    dropped and read again leaves no records behind, so such a policy's prompt ends before it.
    """
    on_model = method.on(model)
    if isinstance(method, Published) and on_model.policy.cadence.every is not None and placement.dropped_slots:
        placement = replace(placement, prompt_ids=placement.prompt_ids[: -placement.dropped_slots], dropped_slots=0)
    with Session(on_model, model) as run:
        prompt = torch.tensor([placement.prompt_ids], device=model.device)
        logits = model(input_ids=prompt, use_cache=True).logits[:, -1:]
        cache = run.cache
        assert cache is not None
        if isinstance(method, Published):
            return _answered(model, logits, cache, placement, max_new_tokens, stop_ids, 1)
    return _answered(model, logits, cache, placement, max_new_tokens, stop_ids, len(placement.fed_ids))


def _answered(
    model: PreTrainedModel, logits: Tensor, cache: RetainedCache, placement: Placement, max_new_tokens: int,
    stop_ids: frozenset[int], at_once: int,
) -> Answer:
    kept, stored = ceil(cache.mean_length), []
    if placement.dropped_slots:
        cache.crop(-placement.dropped_slots)
    for first in range(0, len(placement.fed_ids), at_once or 1):
        fed = torch.tensor([placement.fed_ids[first : first + at_once]], device=model.device)
        logits = model(input_ids=fed, past_key_values=cache).logits
        stored.append(cache.mean_length)
    ids: list[int] = []
    while len(ids) < max_new_tokens:
        token = int(logits[0, -1].argmax())
        ids.append(token)
        if token in stop_ids:
            break
        logits = model(input_ids=torch.tensor([[token]], device=model.device), past_key_values=cache).logits
        stored.append(cache.mean_length)
    return Answer(ids, kept, sum(stored) / len(stored), max(len(placement.prompt_ids), *map(ceil, stored)))
