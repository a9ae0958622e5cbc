"""Our half: prompts of the study's development part, what our policies keep of each, and what the model then says."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import torch

from conformance.measure.peers.prompts.plan import COUNTERPARTS, MAX_NEW_TOKENS, MODEL, TASKS, Plan, by_name
from conformance.measure.peers.sets import Array, digest, packed
from models_integration.cache.continuation import Decision
from models_integration.cache.retained_cache import side_by_side
from models_integration.session.verbs import compact
from models_integration.studies.answers import generated, onward
from models_integration.studies.evidence.kept import Prompt, read_prompt
from models_integration.studies.evidence.rules import Rules
from models_integration.studies.evidence.run import Item, items, methods
from models_integration.studies.results import Row, append_row
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks import place
from models_integration.tasks.prose import read_prose
from spec.retention import Granularity, Retention

__all__ = ["drawn", "groups_of", "run_ours"]

ROWS = 8


def drawn(subject: Subject, rules: Rules, plan: Plan) -> Iterator[Item]:
    """The first prompts of the development part, contexts beyond the study's own among them; tasks take turns.

    The context's digest decides its part, so that none of them can confirm anything.
    """
    prose = read_prose(subject.tokenizer)
    chosen = replace(
        rules, contexts=prose.windows(plan.length), questions=1, lengths=(plan.length,), placements=("after",),
        tasks=TASKS, claims=(), bare=True,
    )
    for _, item in zip(range(plan.prompts), items(chosen, subject, ("dev",)), strict=False):
        yield item


def run_ours(rules: Rules, plan: Plan, progress: Callable[[str], None], model: str = MODEL) -> None:
    """Write the prompts that are not written yet, one line each."""
    subject, done = Loading(model).subject(), plan.rows("ours")
    chosen = replace(rules, policies=tuple(COUNTERPARTS.values()), claims=())
    policies = methods(chosen, subject)
    for item in drawn(subject, rules, plan):
        if item.digest not in done:
            start = time.process_time()
            prompt = read_prompt(subject, policies, plan.budgets, place(item.sample))
            row = {**described(item, subject), "budgets": list(plan.budgets), **decided(subject, prompt, plan.budgets)}
            append_row(plan.file("ours"), {**row, "seconds": time.process_time() - start})
            progress(f"{item.task} {item.index}")


def described(item: Item, subject: Subject) -> Row:
    """A prompt, with all that the other half and the page must know of it."""
    sample = item.sample
    return {
        "prompt": item.digest, "part": Rules.part_of(sample.context_digest), "task": item.task, "length": item.length,
        "index": item.index, "context": list(sample.context_ids), "question": list(sample.question_ids),
        "gold": list(sample.answer_ids), "metric": sample.metric,
        "references": list(sample.references or (sample.expected,)), "model": subject.name,
        "stop": sorted(subject.stop_ids),
        "versions": {name: version(name) for name in ("transformers", "torch", "numpy")},
    }


def decided(subject: Subject, prompt: Prompt, budgets: Sequence[str]) -> Row:
    """Kept sets and greedy answers by policy and budget, the full cache's answer, and the prompt's keys by digest."""
    layers, names = prompt.observed.cache.full_layers, COUNTERPARTS.values()
    cells = {(name, budget): prompt.kept[name][at] for name in names for at, budget in enumerate(budgets)}
    answers = answered(subject, prompt, cells)
    everything = Retention.shared(np.arange(prompt.observed.columns), prompt.observed.columns)
    kept = {cell: packed(groups_of(found, len(layers), layers[0].heads)) for cell, found in cells.items()}
    return {
        "kept": by_name(kept), "answers": by_name(answers),
        "full": answered(subject, prompt, {("full", ""): everything})["full", ""],
        "keys": [digest(layer.keys[0].numpy()) for layer in layers if layer.keys is not None],
    }


def groups_of(kept: Retention, layers: int, heads: int) -> Array:
    """Which tokens each layer and KV head keeps, (layers * heads, seen), whatever the granularity."""
    found = np.zeros((kept.groups, kept.seen), dtype=np.bool_)
    for group in range(kept.groups):
        found[group, kept.group(group)] = True
    copies = {Granularity.MODEL: layers * heads, Granularity.LAYER: heads, Granularity.HEAD: 1}[kept.granularity]
    return found.repeat(copies, axis=0)


def answered(
    subject: Subject, prompt: Prompt, cells: Mapping[tuple[str, str], Retention]
) -> dict[tuple[str, str], list[int]]:
    """What the model says greedily behind each compacted cache, its stop id included."""
    found: dict[tuple[str, str], list[int]] = {}
    names, fed = list(cells), prompt.placement.fed_ids
    for first in range(0, len(names), ROWS):
        some = names[first : first + ROWS]
        cache = compact(side_by_side(prompt.observed.cache, len(some)), Decision(tuple(cells[name] for name in some)))
        forward = onward(subject.model, cache)
        logits = forward(torch.tensor([fed] * len(some)))
        answers = generated(forward, logits, subject.stop_ids, MAX_NEW_TOKENS)
        found.update(zip(some, answers, strict=True))
    return found
