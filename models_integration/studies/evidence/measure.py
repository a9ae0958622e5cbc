"""One sample under every policy and budget: each cell's cache reads question and gold answer in one forward."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.continuation import Decision
from models_integration.cache.retained_cache import RetainedCache, side_by_side
from models_integration.session.segment import ObservedSegment
from models_integration.session.verbs import NOTHING, compact, read
from models_integration.studies.answers import generated, onward
from models_integration.studies.evidence.kept import BLIND, FULL, Prompt
from models_integration.studies.results import Row
from models_integration.studies.subject import Subject
from models_integration.tasks import Sample, score
from models_integration.tasks.metrics import RIGHT_OR_WRONG
from spec.arrays import BoolVector, Float64, Int64, IntVector, Matrix
from spec.policy import LayerView, Needs
from spec.retention import Granularity, Retention

__all__ = ["Said", "answer_attention", "evidence_kept", "lost_attention", "measure", "said"]


@dataclass(frozen=True)
class Said:
    """What a row of a forward says of the gold answer's tokens."""

    logits: Tensor
    """At the columns that predict them, (a, vocabulary)."""
    gold: Tensor
    """Their ids, (a,)."""

    @cached_property
    def _chosen(self) -> Tensor:
        return self.logits.gather(1, self.gold[:, None])[:, 0]

    @cached_property
    def lse(self) -> Tensor:
        """Log of the sum of powers, (a,)."""
        return self.logits.logsumexp(dim=-1)

    @property
    def likelihood(self) -> float:
        """Log-likelihood of the answer, nats."""
        return float((self._chosen - self.lse).double().sum())

    @cached_property
    def exact(self) -> bool:
        """Whether greedy decoding would begin with the answer: each of its tokens is the most likely one."""
        if (self._chosen < self.logits.amax(dim=-1)).any():  # which settles most, and is a tenth of the work
            return False
        return bool((self.logits.argmax(dim=-1) == self.gold).all())

    @cached_property
    def probabilities(self) -> Tensor:
        """Of all tokens, (a, vocabulary)."""
        return (self.logits - self.lse[:, None]).exp()

    def divergence(self, full: "Said") -> float:
        """KL(full cache || this), mean over the answer's tokens, nats."""
        gaps = (full.probabilities * (full.logits - self.logits)).sum(dim=-1) + self.lse - full.lse
        return float(gaps.double().mean())


def said(observed: ObservedSegment, gold: Sequence[int]) -> Iterator[Said]:
    """Each row of a forward, apart."""
    assert observed.logits is not None
    answer = torch.tensor(gold, device=observed.logits.device)
    for logits in observed.logits:
        yield Said(logits.float(), answer)


def measure(
    subject: Subject, sample: Sample, prompt: Prompt, budgets: Sequence[str], batch_size: int,
) -> Row:
    """All measures of one sample: its cells, the full cache and the blind one among them.

    Args:
        subject: the model.
        sample: with gold answer tokens.
        prompt: that the sample's placement begins with.
        budgets: of its kept sets.
        batch_size: cells that are read side by side, those that keep the same as one. It changes no decision; products
            over several rows may round otherwise than over one.

    Returns:
        A row's `cells` and `seconds`; likelihoods in nats, caches in slots of a layer and KV head.
    """
    start = time.perf_counter()
    reader = _Reader(subject, sample, prompt)
    cells = reader.ends()
    kept = prompt.with_evidence(sample, budgets)
    wanted = [_Cell(name, budget, kept[name][at]) for (at, budget), name in product(enumerate(budgets), kept)]
    different = list({cell.content: cell for cell in wanted}.values())
    rows = dict[_Content, Row]()
    for first in range(0, len(different), batch_size):
        some = different[first : first + batch_size]
        rows.update(zip((cell.content for cell in some), reader.side_by_side(some), strict=True))
    cells += [{**rows[cell.content], "policy": cell.policy, "budget": cell.budget} for cell in wanted]
    return {"cells": cells, "seconds": {**prompt.seconds, "reading": time.perf_counter() - start}}


_Content: TypeAlias = tuple[Granularity, bytes, bytes]


class _Cell(NamedTuple):
    policy: str
    budget: str
    kept: Retention

    @property
    def content(self) -> _Content:
        """All that a reading depends on."""
        return self.kept.granularity, self.kept.positions.tobytes(), self.kept.offsets.tobytes()


class _Reader:
    """Reads one sample's question and answer on caches of its prompt."""

    def __init__(self, subject: Subject, sample: Sample, prompt: Prompt) -> None:
        self._subject, self._sample, self._prompt = subject, sample, prompt
        self._cache, self._fed, self._gold = prompt.observed.cache, prompt.placement.fed_ids, sample.answer_ids
        self._seen = self._cache.get_seq_length()
        self._evidence = np.zeros(self._seen, dtype=np.bool_)
        for first, stop in sample.evidence:
            self._evidence[first:stop] = True
        stored = [tensor for layer in self._cache.full_layers for tensor in (layer.keys, layer.values)]
        self._slot_bytes = sum(tensor.nbytes for tensor in stored if tensor is not None) // self._seen
        self._full: Said
        self._attention: Matrix

    def ends(self) -> list[Row]:
        """The full cache, which also shows where the answer's rows look, and the question without its context."""
        everything = _Cell(FULL, "1.0", Retention.shared(np.arange(self._seen), self._seen))
        nothing = _Cell(BLIND, "0", Retention.shared(np.arange(0), self._seen))
        needs, cache = Needs("all", len(self._gold)), compact(self._cache, Decision((everything.kept,)))
        shown = self._read(cache, self._fed, needs=needs)
        self._attention = answer_attention(shown.recorder.views(0).values(), self._seen)
        (self._full,) = said(shown, self._gold)
        blind = RetainedCache(self._prompt.observed.architecture.config)
        return [
            *self._rows([everything], shown),
            *self._rows([nothing], self._read(blind, self._sample.question_ids)),
        ]

    def side_by_side(self, cells: Sequence[_Cell]) -> list[Row]:
        """Cells, each on its compacted cache, in one forward."""
        decision = Decision(tuple(cell.kept for cell in cells))
        cache = compact(side_by_side(self._cache, len(cells)), decision)
        return self._rows(cells, self._read(cache, self._fed, len(cells)))

    def _read(
        self, cache: RetainedCache, fed: Sequence[int], rows: int = 1, needs: Needs = NOTHING,
    ) -> ObservedSegment:
        """Question and gold answer but its last token: the last columns predict the answer."""
        ids = torch.tensor([[*fed, *self._gold[:-1]]] * rows, device=self._subject.model.device)
        return read(self._subject.model, cache, ids, needs, last=len(self._gold))

    def _rows(self, cells: Sequence[_Cell], shown: ObservedSegment) -> list[Row]:
        each = list(said(shown, self._gold))
        right: Sequence[float | None] = [row.exact for row in each]
        if not self._evidence.any() and not self._sample.references:
            right = [None] * len(each)
        elif self._sample.metric not in RIGHT_OR_WRONG:
            shown.cache.crop(1 - len(self._gold))
            first = torch.stack([row.logits[0] for row in each])
            forward, stop = onward(self._subject.model, shown.cache), self._subject.stop_ids
            answers = generated(forward, first, stop, self._sample.max_new_tokens)
            right = [score(self._subject.tokenizer, ids, self._sample) for ids in answers]
        return [self._row(*cell, row, judged) for cell, row, judged in zip(cells, each, right, strict=True)]

    def _row(self, policy: str, budget: str, kept: Retention, row: Said, right: float | None) -> Row:
        lengths = np.diff(kept.offsets)
        fed = len(self._sample.question_ids if policy == BLIND else self._fed)
        mean, grown = float(lengths.mean()) + fed, len(self._gold) - 1
        slots = {"mean_cache": mean + grown / 2, "peak_cache": max(self._prompt_tokens(policy), mean + grown)}
        sizes = {name.replace("cache", "bytes"): round(slot * self._slot_bytes) for name, slot in slots.items()}
        return {
            "policy": policy, "budget": budget, "granularity": kept.granularity.value,
            "kept": _short(lengths), "evidence_kept": _short(evidence_kept(kept, self._evidence)),
            "right": right, "exact": row.exact, "likelihood": row.likelihood, "divergence": row.divergence(self._full),
            "lost_attention": lost_attention(kept, self._attention), **slots, **sizes,
        }

    def _prompt_tokens(self, policy: str) -> int:
        return 0 if policy == BLIND else len(self._prompt.placement.prompt_ids)


def _short(counts: IntVector) -> int | list[int]:
    """Counts of kept sets; one number where all agree."""
    return int(counts[0]) if (counts == counts[0]).all() else counts.tolist()


def evidence_kept(kept: Retention, evidence: BoolVector) -> Int64[IntVector, " groups"]:
    """How many tokens of the evidence (seen,) each kept set holds."""
    before = np.concatenate([[0], np.cumsum(evidence[kept.positions])])
    return np.diff(before[kept.offsets]).astype(np.int64)


def answer_attention(layers: Iterable[LayerView], seen: int) -> Float64[Matrix, "groups seen"]:
    """What the rows that were shown give to each of the first `seen` keys, on average, by layer and KV head."""
    return np.concatenate([_mean_weights(view)[:, :seen] for view in layers])


def _mean_weights(view: LayerView) -> Float64[Matrix, "heads n"]:
    q, k = torch.as_tensor(view.q), torch.as_tensor(view.k)
    (H, a, d), (heads, n, _) = q.shape, k.shape
    logits = (q.reshape(heads, -1, d) @ k.mT * view.scaling).reshape(heads, H // heads, a, n)
    if view.softcap is not None:
        logits = torch.tanh(logits / view.softcap) * view.softcap
    later = torch.ones(a, n, dtype=torch.bool, device=k.device).triu(n - a + 1)
    weights = logits.masked_fill(later, -torch.inf).softmax(dim=-1)
    return weights.mean(dim=(1, 2), dtype=torch.float64).cpu().numpy()


def lost_attention(kept: Retention, attention: Float64[Matrix, "groups seen"]) -> float:
    """The share of attention on evicted keys, mean over layers and KV heads."""
    each = attention.reshape(kept.groups, -1, attention.shape[1]).mean(axis=1)
    groups = np.repeat(np.arange(kept.groups), np.diff(kept.offsets))
    return float((each.sum() - each[groups, kept.positions].sum()) / kept.groups)
