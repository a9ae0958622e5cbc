"""What a model says under policies: a prompt is read once, each policy scores it once, budgets only select.

What all cells say to a sample is stored as one row, so that a run may be stopped at any time.
"""

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.continuation import Decision
from models_integration.cache.retained_cache import RetainedCache, side_by_side
from models_integration.model.cache_argument import cache_name
from models_integration.session.method import Method
from models_integration.session.segment import ObservedSegment, decide
from models_integration.session.session import Session
from models_integration.session.verbs import compact, observe, read
from models_integration.studies.leases import Leases, unit_named
from models_integration.studies.results import AGAIN, ERROR, Row, load_rows
from models_integration.studies.subject import Subject
from models_integration.tasks import Placement, Sample, place, score
from reference.policies.retain import retain_each
from spec import SPEC_VERSION
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Needs, Policy
from spec.retention import Retention

__all__ = [
    "SAMPLES", "Answer", "Asked", "Key", "Run", "answers", "attempted", "cropped", "generated", "needed", "onward",
    "retentions", "sample_unit",
]

SAMPLES = "samples.jsonl"
"""The file of a run's samples, beside that of its results."""


class Key(NamedTuple):
    """A cell, among those of one sample."""

    policy: str
    budget: int
    """B, tokens."""
    constants: str = ""
    """Of the policy, where its name leaves them open."""


Asked: TypeAlias = tuple[Sample, Mapping[Key, Method]]
"""A sample, and the cells that it is presented to."""
Onward: TypeAlias = Callable[[Tensor], Tensor]
"""Reads tokens (rows, n) behind a cache, and gives the logits (rows, vocabulary) of what is next."""


@dataclass(frozen=True)
class Answer:
    """What a policy let the model say."""

    token_ids: list[int]
    kept: int
    """Slots that the policy kept of the prompt, per layer and head."""
    mean_cache: float
    """Slots stored per layer and head, mean over the answer's forwards."""
    peak_cache: int
    """The most slots stored per layer and head at any time, the prompt's own forward included."""


@torch.no_grad()
def answers(
    subject: Subject, placement: Placement, asked: Mapping[Key, Method], max_new_tokens: int, batch_size: int = 1,
) -> Iterator[tuple[Key, Answer]]:
    """Present one prompt to many methods, and decode greedily until a stop id or `max_new_tokens`.

    A method that decides while tokens are decoded reads token by token, in a context of its own. What is dropped and
    read again would leave no records behind, so its prompt ends before that.

    Args:
        subject: the model.
        placement: of the sample.
        asked: keys that differ in their budget alone have one policy.
        max_new_tokens: at least 1.
        batch_size: cells that are read side by side, where their caches have one shape. Products of several rows may
            round otherwise than those of one.

    Raises:
        SpecError: for a model or a prompt that is not served, and what a policy refuses.
    """
    presented = {key: _read_once(placement) if _steps(method) else placement for key, method in asked.items()}
    for own in dict.fromkeys(presented.values()):
        methods = {key: method for key, method in asked.items() if presented[key] == own}
        ids = torch.tensor([own.prompt_ids], device=subject.model.device)
        observed = observe(subject.model, ids, needs=needed(method.policy.scorer.needs for method in methods.values()))
        decided = dict(_decided(observed, methods))
        # Nobody asks any more what the layers have shown, which may be larger than the cache.
        observed.recorder.seen.clear()
        assert observed.logits is not None
        if own.dropped_slots:
            observed.cache.crop(-own.dropped_slots)
        prompt = _Prompt(subject, own, observed.cache, observed.logits[:, -1], max_new_tokens)
        for keys in _alike(methods, decided, batch_size):
            if _steps(methods[keys[0]]):
                yield keys[0], prompt.in_steps(methods[keys[0]], decided[keys[0]])
            else:
                yield from zip(keys, prompt.side_by_side([decided[key].retentions[0] for key in keys]), strict=True)


def _steps(method: Method) -> bool:
    return method.policy.cadence.every is not None


def _read_once(placement: Placement) -> Placement:
    if not placement.dropped_slots:
        return placement
    return replace(placement, prompt_ids=placement.prompt_ids[: -placement.dropped_slots], dropped_slots=0)


def needed(each: Iterable[Needs]) -> Needs:
    """What all of these scorers must be shown together.

    Raises:
        SpecError: where they need different rehearsals: one observation has one.
    """
    every = list(each)
    layers, rows = {one.layers for one in every}, [one.query_rows for one in every]
    rehearsals = {one.rehearsal for one in every if one.rehearsal is not None}
    if len(rehearsals) > 1:
        raise SpecError("policies", f"{len(rehearsals)} rehearsals", "must share one: give each its own run")
    places = {one.observed for one in every if one.layers == "observed"}
    return Needs(
        "all" if "all" in layers or len(places) > 1 else "observed" if places else "none",
        None if None in rows else max((row for row in rows if row is not None), default=0), next(iter(places), 0),
        any(one.values for one in every), any(one.token_ids for one in every),
        rehearsal=next(iter(rehearsals), None),
    )


def _decided(observed: ObservedSegment, asked: Mapping[Key, Method]) -> Iterator[tuple[Key, Decision]]:
    for _, group in groupby(asked, lambda key: key._replace(budget=0)):
        keys = list(group)
        methods = [asked[key] for key in keys]
        if _steps(methods[0]):
            yield from zip(keys, (decide(method, observed) for method in methods), strict=True)
        else:
            kept = retentions(methods[0].policy, [method.budget for method in methods], observed)
            yield from zip(keys, (Decision((one,)) for one in kept), strict=True)


def retentions(policy: Policy, budgets: Sequence[Budget], observed: ObservedSegment) -> list[Retention]:
    """What a policy keeps of the one prompt observed, under each budget; it scores once.

    Raises:
        SpecError: where it needs more than was noted, or refuses what it is shown.
    """
    shown = observed.narrowed(policy.scorer.needs).prompt(0, policy.granularity)
    return [retention for retention, _ in retain_each(policy, budgets, shown)]


def cropped(retention: Retention, tokens: int) -> Retention:
    """The same without the last tokens seen, kept or not, as `RetainedCache.crop` leaves it."""
    if not tokens:
        return retention
    seen = retention.seen - tokens
    stays = retention.positions < seen
    before = np.concatenate([[0], np.cumsum(stays)]).astype(np.int64)
    return Retention(retention.positions[stays], before[retention.offsets], seen, retention.granularity)


def _alike(methods: Mapping[Key, Method], decided: Mapping[Key, Decision], size: int) -> Iterator[list[Key]]:
    """Cells whose caches have one shape, so that none is padded; at most so many, and one that decides in steps."""

    def shape(key: Key) -> tuple[bool, str, int, int]:
        (kept,) = decided[key].retentions
        lengths = np.diff(kept.offsets)
        return _steps(methods[key]), kept.granularity.value, int(lengths.min()), int(lengths.max())

    for (steps, *_), group in groupby(sorted(methods, key=shape), shape):
        keys, most = list(group), 1 if steps else size
        yield from (keys[first : first + most] for first in range(0, len(keys), most))


@dataclass(frozen=True)
class _Prompt:
    """A prompt that was read, and what comes behind it."""

    subject: Subject
    placement: Placement
    cache: RetainedCache
    """The full one, less what is dropped."""
    logits: Tensor
    """Of the prompt's last column, (1, vocabulary)."""
    max_new_tokens: int

    def side_by_side(self, kept: Sequence[Retention]) -> list[Answer]:
        """Each on its compacted cache; what is fed is read in one forward."""
        fed, left = self.placement.fed_ids, [cropped(one, self.placement.dropped_slots) for one in kept]
        cache = compact(side_by_side(self.cache, len(kept)), Decision(tuple(left)))
        said = self._said(onward(self.subject.model, cache), [fed] if fed else [], len(kept))
        found = []
        for tokens, one, stays in zip(said, kept, left, strict=True):
            read = len(stays.positions) / stays.groups + len(fed)
            # A forward of what is fed, if anything is, and one of each token said but the last.
            found.append(self._answer(tokens, one, [read + step for step in range(0 if fed else 1, len(tokens))]))
        return found

    def in_steps(self, method: Method, decision: Decision) -> Answer:
        """One cell whose cache is decided about behind every token."""
        model, cache, stored = self.subject.model, compact(self.cache, decision), list[float]()
        name = cache_name(model)

        def step(ids: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=ids, **{name: cache}).logits
            stored.append(cache.mean_length)
            return logits[:, -1]

        with Session(method, model):
            (said,) = self._said(step, [(token,) for token in self.placement.fed_ids])
        return self._answer(said, decision.retentions[0], stored)

    def _said(self, forward: Onward, fed: Iterable[Sequence[int]], rows: int = 1) -> list[list[int]]:
        logits = self.logits.expand(rows, -1)
        for piece in fed:
            logits = forward(torch.tensor([piece] * rows, device=logits.device))
        return generated(forward, logits, self.subject.stop_ids, self.max_new_tokens)

    def _answer(self, said: list[int], kept: Retention, stored: Sequence[float]) -> Answer:
        slots = len(kept.positions) / kept.groups
        mean = sum(stored) / len(stored) if stored else slots
        return Answer(said, ceil(slots), mean, max([len(self.placement.prompt_ids), *map(ceil, stored)]))


def onward(model: PreTrainedModel, cache: RetainedCache) -> Onward:
    """How a model reads on behind a cache, and decides nothing."""

    def forward(ids: Tensor) -> Tensor:
        logits = read(model, cache, ids).logits
        assert logits is not None
        return logits[:, -1]

    return forward


@torch.no_grad()
def generated(forward: Onward, logits: Tensor, stop_ids: frozenset[int], max_new_tokens: int) -> list[list[int]]:
    """What each row says greedily, its stop id included, from the logits (rows, vocabulary) of what is next.

    Rows that have stopped are fed on beside the others.
    """
    said: list[list[int]] = [[] for _ in logits]
    while True:
        tokens = logits.argmax(dim=-1)
        for own, token in zip(said, tokens.tolist(), strict=True):
            if not own or own[-1] not in stop_ids:
                own.append(token)
        if all(own[-1] in stop_ids or len(own) == max_new_tokens for own in said):
            return said
        logits = forward(tokens[:, None])


_DEATHS_MOST = 3
"""Workers that a unit may kill before it is left alone."""


def attempted(make: Callable[[], Row], leases: Leases) -> Row:
    """What `make` gives for the held unit; where it raises, the ERROR as one line and its traceback, its memory freed.

    A unit on which workers died again and again has an ERROR without another attempt.
    """
    if leases.deaths >= _DEATHS_MOST:
        return {ERROR: f"{leases.deaths} workers died while they made it: out of memory, or killed"}
    try:
        return make()
    except Exception as error:
        said = " ".join("".join(traceback.format_exception_only(error)).split())
        failed = {ERROR: said, "traceback": traceback.format_exc()}
    torch.cuda.empty_cache()
    return failed


@dataclass(frozen=True)
class Run:
    """Samples under way. What their cells say goes to a file, and what is there already is not asked again.

    Attributes:
        subject: the model.
        path: of the file: a row a sample, added once all its cells have answered.
        about: what the rows of this run share, beside the task, the model, its backend and the specification.
        placement: by name.
        batch_size: as of `answers`.
        progress: told of each cell of each sample.
        again: whether samples that failed before are asked again.
    """

    subject: Subject
    path: Path
    about: Mapping[str, int]
    placement: str
    batch_size: int
    progress: Callable[[str], None]
    again: bool = False

    def task(self, task: str, samples: int, asked: Callable[[int], Iterable[Asked]]) -> list[dict[Key, Row]]:
        """The cells of each sample of a task, one after the other; none at all where a sample failed.

        Args:
            task: its name.
            samples: how many.
            asked: what is asked as sample number so and so.

        Raises:
            SpecError: for what cannot be asked.
        """
        identity = {
            "task": task, **self.about, "placement": self.placement, "model": self.subject.name,
            "backend": self.subject.backend, "spec_version": SPEC_VERSION,
        }
        every = {index: list(asked(index)) for index in range(samples)}
        stored, left = self._stored(identity), dict[str, tuple[int, frozenset[Key]]]()
        for index, own in every.items():
            keys = frozenset(key for _, methods in own for key in methods)
            for key in keys & stored[index].keys():
                self.progress(f"{key.policy} (stored)")
            if missing := keys - stored[index].keys():
                left[_unit({**identity, "index": index}, missing)] = index, missing
        with Leases(self.path, sample_unit) as leases:
            told: defaultdict[str, set[Key]] = defaultdict(set)
            if self.again:
                leases.again(left)

            def done(unit: str) -> None:
                for key in left[unit][1] - told[unit]:
                    self.progress(f"{key.policy}, {task}{' FAILED' if unit in leases.failed else ''}")

            for unit in leases.units(left, done):
                index, missing = left[unit]
                made = attempted(partial(self._cells, every[index], missing, told[unit]), leases)
                named = {} if "cells" in made else {"cells": [key._asdict() for key in sorted(missing)]}
                leases.add({**identity, "index": index, **made, **named})
            if leases.failed.keys() & left:
                return []
        stored = self._stored(identity)
        return [stored[index] for index in range(samples)]

    def _stored(self, identity: Row) -> defaultdict[int, dict[Key, Row]]:
        """What cells have said, by sample."""
        found: defaultdict[int, dict[Key, Row]] = defaultdict(dict)
        for row in load_rows(self.path):
            if all(row.get(name) == value for name, value in identity.items()):
                found[row["index"]] |= {_key(cell): cell for cell in row["cells"]}
        return found

    def _cells(self, asked: Iterable[Asked], wanted: Container[Key], told: set[Key]) -> Row:
        start, cells = time.perf_counter(), list[Row]()
        for sample, methods in asked:
            own = {key: method for key, method in methods.items() if key in wanted}
            placement = place(sample, self.placement)
            for key, given in answers(self.subject, placement, own, sample.max_new_tokens, self.batch_size):
                told.add(key)
                self.progress(f"{key.policy}, {sample.task}")
                right = score(self.subject.tokenizer, given.token_ids, sample)
                cells.append({**key._asdict(), "right": right, **asdict(given)})
        return {"cells": cells, "seconds": time.perf_counter() - start}


def _key(cell: Row) -> Key:
    return Key(*(cell[name] for name in Key._fields))


def _unit(identity: Row, keys: Iterable[Key]) -> str:
    return unit_named([identity, sorted(keys)])


_NOT_IDENTITY = {"cells", "seconds", ERROR, "traceback", AGAIN}


def sample_unit(row: Row) -> str:
    """The unit of a row of `SAMPLES`."""
    identity = {name: value for name, value in row.items() if name not in _NOT_IDENTITY}
    return _unit(identity, map(_key, row["cells"]))
