"""Running the study: every conversation under every arm, one stored row per conversation."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.measure.studies.decode.plan import PROMPT, Conversation, Plan, Question, draw_conversation
from conformance.measure.studies.decode.probes import changed_flags, flags_of, trunk_summary
from conformance.measure.studies.decode.rules import ARMS, T_BREATH, Breathing, Memory, Reading
from models_integration.attention.capture import Attended, Recorder, observing
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import describe
from models_integration.model.cache_argument import CACHE
from models_integration.studies.results import Row, append_row, find_row, load_rows
from models_integration.studies.subject import Subject
from spec.backend import Backend, resolve
from spec.policy import Needs
from spec.retention import Retention

__all__ = ["blocks", "hold", "is_right", "read_block", "read_prompt", "run_arm", "run_plan"]


class _Observer:
    """Records the prompt's queries and keys of the observed layer."""

    def __init__(self) -> None:
        self.recorder = Recorder(Needs(layers="observed", query_rows=None))

    def wants_lse(self, layer: int) -> bool:
        return False

    def attended(self, module: torch.nn.Module, seen: Attended) -> None:
        self.recorder.record(module, seen)


def read_prompt(subject: Subject, ids: tuple[int, ...]) -> tuple[Reading, Callable[[], RetainedCache]]:
    """Read a prompt once; the function makes caches that hold all of it."""
    architecture, observer = describe(subject.model), _Observer()
    cache = RetainedCache(architecture.config)
    with observing(architecture, cache, observer, (architecture.full_layers[0],)):
        subject.model(input_ids=torch.tensor([ids]), **{CACHE: cache}, logits_to_keep=1)
    view = observer.recorder.views(0)[architecture.full_layers[0]]
    tensors = [(cast(Tensor, layer.keys), cast(Tensor, layer.values)) for layer in cache.full_layers]

    def filled() -> RetainedCache:
        fresh = RetainedCache(architecture.config)
        for index, (keys, values) in enumerate(tensors):
            fresh.update(keys, values, index)
        return fresh

    return Reading(np.array(ids), view, subject.sentence_ends, resolve(subject.backend)), filled


def read_block(
    model: PreTrainedModel, cache: RetainedCache, memory: Memory, ids: tuple[int, ...], engine: Backend,
) -> Memory:
    """Read tokens through the cache, and evict what the memory, which is returned, does not hold afterwards."""
    model(input_ids=torch.tensor([ids]), **{CACHE: cache}, logits_to_keep=1)
    keys = cast(Tensor, cache.full_layers[0].keys)[0, :, -len(ids) :]
    after = memory.after(np.array(ids), np.asarray(engine.require_breath().inverse_key_norms(keys.numpy())))
    hold(cache, after)
    return after


def blocks(ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What is read between two breaths."""
    return [ids[start : start + T_BREATH] for start in range(0, len(ids), T_BREATH)]


def hold(cache: RetainedCache, memory: Memory) -> None:
    """Evict what the memory does not hold."""
    if len(memory.held) < cache.stored_length:
        cache.compact([Retention.shared(memory.held, cache.get_seq_length())])


def is_right(model: PreTrainedModel, cache: RetainedCache, question: Question) -> bool:
    """Whether greedy decoding writes the answer; the cache is as it was afterwards."""
    ids, n = (*question.ids, *question.answer_ids[:-1]), len(question.answer_ids)
    logits = model(input_ids=torch.tensor([ids]), **{CACHE: cache}, logits_to_keep=n).logits
    cache.crop(-len(ids))
    best: list[int] = logits[0].argmax(dim=1).tolist()
    return best == list(question.answer_ids)


def run_arm(subject: Subject, conversation: Conversation, reading: Reading, cache: RetainedCache, name: str) -> Row:
    """One conversation under one arm: which strata were right, what was stored, and what the breaths did."""
    memory = ARMS[name].start(reading)
    hold(cache, memory)
    sizes: list[int] = []
    flags = [flags_of(memory.state, memory.parameters, memory.engine)] if isinstance(memory, Breathing) else []
    for block in blocks(conversation.ids[PROMPT:]):
        sizes += range(cache.stored_length + 1, cache.stored_length + len(block) + 1)
        memory = read_block(subject.model, cache, memory, block, reading.engine)
        if isinstance(memory, Breathing):
            flags.append(flags_of(memory.state, memory.parameters, memory.engine))
    end = cache.stored_length
    right = {question.stratum: int(is_right(subject.model, cache, question)) for question in conversation.questions}
    row: Row = {"right": right, "mean": sum(sizes) / len(sizes), "peak": max(sizes), "end": end}
    if isinstance(memory, Breathing):
        changes = [changed_flags(before, after) for before, after in pairwise(flags)]
        row["changed"] = [sum(changed for changed, _ in changes), sum(common for _, common in changes)]
        row["trunks"] = trunk_summary(memory.state, memory.parameters, memory.engine)
    return row


@torch.no_grad()
def run_plan(subject: Subject, plan: Plan, path: Path, progress: Callable[[str], None]) -> Iterator[Row]:
    """Each conversation's row, from the results file where it is there already."""
    for index in range(plan.first, plan.first + plan.samples):
        identity = plan.identity(index, subject)
        row = find_row(load_rows(path), identity)
        if row is None:
            conversation = draw_conversation(subject.tokenizer, index, plan.tokens)
            reading, filled = read_prompt(subject, conversation.ids[:PROMPT])
            by_arm = {}
            for name in plan.arms:
                by_arm[name] = run_arm(subject, conversation, reading, filled(), name)
                progress(f"{index}: {name}")
            row = {**identity, "found": by_arm}
            append_row(path, row)
        else:
            for _ in plan.arms:
                progress(f"{index} (stored)")
        yield row
