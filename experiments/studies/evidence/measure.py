"""Measurement of one sample with every policy and budget: likelihood of the gold answer, and generated answer."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from experiments.studies.answers import generated, make_forward
from experiments.studies.evidence.kept import BLIND, FULL, Prompt, Step, evidence_mask
from experiments.studies.results import Row
from experiments.studies.subject import Subject
from experiments.tasks import Sample, score
from experiments.tasks.metrics import RIGHT_OR_WRONG
from models_integration.cache.continuation import Decision
from models_integration.cache.renumbering import Numbering
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.cache_argument import cache_name
from models_integration.model.frame import decode
from models_integration.session.session import Session
from models_integration.session.verbs import NOTHING, compact, read, side_by_side
from spec.arrays import BoolVector, Float64, Int64, IntVector, Matrix
from spec.policy import LayerView, Needs
from spec.retention import Granularity, Retention

__all__ = ["Prediction", "answer_attention", "evidence_kept", "kept_rows", "lost_attention", "measure"]


@dataclass(frozen=True)
class Prediction:
    """Predictions of the gold answer's tokens by one row of a forward pass."""

    logits: Tensor
    """Logits at the columns that predict the answer's tokens, (a, vocabulary)."""
    gold: Tensor
    """Token ids of the gold answer, (a,)."""

    @cached_property
    def _chosen(self) -> Tensor:
        return self.logits.gather(1, self.gold[:, None])[:, 0]

    @cached_property
    def lse(self) -> Tensor:
        """Log-sum-exp of the logits, (a,)."""
        return self.logits.logsumexp(dim=-1)

    @property
    def likelihood(self) -> float:
        """Log-likelihood of the answer in nats."""
        return float((self._chosen - self.lse).double().sum())

    @cached_property
    def exact(self) -> bool:
        """True if greedy decoding would give the gold answer, because each gold token has the highest logit."""
        if (self._chosen < self.logits.amax(dim=-1)).any():  # decides most cases with a tenth of the work
            return False
        return bool((self.logits.argmax(dim=-1) == self.gold).all())

    @cached_property
    def probabilities(self) -> Tensor:
        """Probabilities of all tokens, (a, vocabulary)."""
        return (self.logits - self.lse[:, None]).exp()

    def divergence(self, full: "Prediction") -> float:
        """Return KL(full cache || this cache) in nats, averaged over the answer's tokens."""
        gaps = (full.probabilities * (full.logits - self.logits)).sum(dim=-1) + self.lse - full.lse
        return float(gaps.double().mean())


_Content: TypeAlias = tuple[Granularity, bytes, bytes, bool]


class _Cell(NamedTuple):
    policy: str
    budget: str
    kept: Retention
    step: Step | None = None
    numbering: Numbering | None = None
    """Numbering of the cache if the policy renumbers positions."""

    @property
    def content(self) -> _Content:
        """All values on which the reading of a cell depends."""
        kept, renumbers = self.kept, self.numbering is not None
        return kept.granularity, kept.positions.tobytes(), kept.offsets.tobytes(), renumbers


class _Reading(NamedTuple):
    """Results of a cache for a question: predictions of the gold answer (if it has tokens), and generated answer."""

    prediction: Prediction | None
    answer: list[int] | None
    """Generated answer, or None if no answer is scored."""
    stored: Sequence[float]
    """Number of slots per layer and KV head at each forward pass after the prompt."""


@torch.no_grad()
def measure(
    subject: Subject, sample: Sample, prompt: Prompt, wanted: Sequence[tuple[str, str]], batch_size: int,
) -> Row:
    """Return all measurements of one sample.

    An answer is generated greedily until a stop id or the sample's limit. With a right-or-wrong metric and a gold
    answer with tokens, an answer is right if it begins with these tokens. Then only this number of tokens is generated.

    Args:
        subject: model of the study.
        sample: question and gold answer.
        prompt: processed prompt that the sample's placement starts with.
        wanted: cells to measure: policies or controls, with budgets.
        batch_size: number of cells in one batch. Cells with equal kept tokens are measured once. The batch size changes
            no decision, but matrix products over several rows may round differently.

    Returns:
        The entries `cells` and `seconds` of a row. Likelihoods are in nats, cache sizes in slots per layer and KV head.
    """
    start = time.perf_counter()
    reader = _Reader(subject, sample, prompt)
    cells = [
        _Cell(
            policy, budget, prompt.set_of(policy, budget, sample), prompt.step_of(policy, budget),
            prompt.renumbered.get(policy),
        ) for policy, budget in wanted
    ]
    result = reader.rows(cells, batch_size)
    return {"cells": result, "seconds": {**prompt.seconds, "reading": time.perf_counter() - start}}


def kept_rows(sample: Sample, prompt: Prompt, wanted: Sequence[tuple[str, str]]) -> Row:
    """Return how many tokens, and how much evidence, each cell keeps. No question is read.

    Returns:
        The entries `cells` and `seconds` of a row.
    """
    evidence, cells = evidence_mask(sample, prompt.observed.cache.get_seq_length()), list[Row]()
    for policy, budget in wanted:
        kept = prompt.set_of(policy, budget, sample)
        cells.append({"policy": policy, "budget": budget, "right": None, **_kept_of(kept, evidence)})
    return {"cells": cells, "seconds": dict(prompt.seconds)}


def _kept_of(kept: Retention, evidence: BoolVector) -> Row:
    return {
        "granularity": kept.granularity.value, "kept": _short(np.diff(kept.offsets)),
        "evidence_kept": _short(evidence_kept(kept, evidence)),
    }


class _Reader:
    """Processes one sample's question and answer with caches of the prompt."""

    def __init__(self, subject: Subject, sample: Sample, prompt: Prompt) -> None:
        self._subject, self._sample, self._prompt = subject, sample, prompt
        self._cache, self._gold = prompt.observed.cache, sample.answer_ids
        self._seen = self._cache.get_seq_length()
        self._evidence = evidence_mask(sample, self._seen)
        stored = [tensor for layer in self._cache.full_layers for tensor in (layer.keys, layer.values)]
        self._slot_bytes = sum(tensor.nbytes for tensor in stored if tensor is not None) // self._seen
        self._of_gold = bool(self._gold) and sample.metric in RIGHT_OR_WRONG
        self._judged = sample.scored
        self._limit = len(self._gold) if self._of_gold else sample.max_new_tokens
        self._full: Prediction | None = None
        self._attention: Matrix | None = None

    def rows(self, cells: Sequence[_Cell], batch_size: int) -> list[Row]:
        """Return the rows of the cells. The full cache is processed first if cells are compared with it."""
        full = _Cell(FULL, "1.0", Retention.shared(np.arange(self._seen), self._seen))
        result = dict[_Content, _Reading]()
        if self._gold and (known := self._read_full(full)):
            result[full.content] = known
        elsewhere = {
            (cell.policy, cell.budget): self._in_steps(cell.step) if cell.step else self._blind()
            for cell in cells if cell.step or cell.policy == BLIND
        }
        different = {cell.content: cell for cell in cells if (cell.policy, cell.budget) not in elsewhere}
        left = [cell for content, cell in different.items() if content not in result]
        left.sort(key=lambda cell: len(cell.kept.positions) / cell.kept.groups)  # to reduce padding
        for alike in ([cell for cell in left if (cell.numbering is None) is kept] for kept in (True, False)):
            for first in range(0, len(alike), batch_size):
                some = alike[first : first + batch_size]
                result.update(zip((cell.content for cell in some), self._side_by_side(some), strict=True))
        if self._full is not None and full.content in result:
            # Rounding in a batch must not make the full cache differ from itself.
            result[full.content] = result[full.content]._replace(prediction=self._full)
        return [
            self._row(cell, elsewhere.get((cell.policy, cell.budget)) or result[cell.content]) for cell in cells
        ]

    def _read_full(self, full: _Cell) -> _Reading | None:
        """Process the full cache, and record the attention of the answer's tokens.

        Return None if the answer must be generated. The full cache then runs in the same steps as the other cells.
        """
        fed = self._prompt.placement.fed_ids
        rows = len(fed) + len(self._gold) - 1
        needs = Needs("all", min(len(self._gold), rows)) if rows else NOTHING
        self._full = self._gold_prediction(self._read(self._compacted([full]), fed, 1, needs)[0])
        answers = self._known_answers([self._full])
        if answers is None:
            return None
        return _Reading(self._full, answers[0], self._stored(self._seen, fed, answers[0]))

    def _blind(self) -> _Reading:
        """Process the question without the context."""
        cache, fed = RetainedCache(self._prompt.observed.architecture.config), self._sample.question_ids
        (result,) = self._predict(cache, fed, [0.0])
        return result

    def _side_by_side(self, cells: Sequence[_Cell]) -> list[_Reading]:
        """Process several cells in one forward pass, each with a compacted cache."""
        lengths = [len(cell.kept.positions) / cell.kept.groups for cell in cells]
        return self._predict(self._compacted(cells), self._prompt.placement.fed_ids, lengths)

    def _compacted(self, cells: Sequence[_Cell]) -> RetainedCache:
        """Return a cache with one row for each cell. All cells must have the same `numbering`."""
        decision = Decision(tuple(cell.kept for cell in cells), numbering=cells[0].numbering)
        return compact(side_by_side(self._cache, len(cells)), decision)

    def _predict(self, cache: RetainedCache, fed: Sequence[int], lengths: Sequence[float]) -> list[_Reading]:
        """Process the fed tokens and the gold answer without its last token, then generate an answer."""
        columns = self._read(cache, fed, len(lengths))
        each = [self._gold_prediction(row) for row in columns]
        answers = self._known_answers(each) or self._answers(cache, columns[:, 0])
        return [
            _Reading(prediction, answer, self._stored(length, fed, answer))
            for prediction, answer, length in zip(each, answers, lengths, strict=True)
        ]

    def _read(self, cache: RetainedCache, fed: Sequence[int], rows: int, needs: Needs = NOTHING) -> Tensor:
        """Process the fed tokens and the gold answer without its last token.

        Returns:
            Logits (rows, columns, vocabulary) of the columns that predict the answer's tokens, at least of one column.
        """
        ids, gold, shown = [*fed, *self._gold[:-1]], max(1, len(self._gold)), list[Tensor]()
        if not fed:
            assert self._prompt.observed.logits is not None
            shown.append(self._prompt.observed.logits[:, -1:].expand(rows, -1, -1))
        if ids:
            given = torch.tensor([ids] * rows, device=self._subject.model.device)
            observed = read(self._subject.model, cache, given, needs, last=min(gold, len(ids)))
            assert observed.logits is not None
            shown.append(observed.logits)
            if needs.layers != "none":
                self._attention = answer_attention(observed.recorder.views(0).values(), self._seen)
        return torch.cat(shown, dim=1)

    def _gold_prediction(self, columns: Tensor) -> Prediction | None:
        if not self._gold:
            return None
        return Prediction(columns.float(), torch.tensor(self._gold, device=columns.device))

    def _known_answers(self, predictions: Sequence[Prediction | None]) -> Sequence[list[int] | None] | None:
        """Return the answers if they follow from the predictions, or None if a row needs generation."""
        if not self._judged:
            return [None] * len(predictions)
        if self._of_gold and all(one is not None and one.exact for one in predictions):
            return [list(self._gold)] * len(predictions)
        return None

    def _answers(self, cache: RetainedCache, first: Tensor) -> list[list[int]]:
        """Return greedy answers with a cache that has processed the gold answer, from the logits of the first token."""
        if len(self._gold) > 1:
            cache.crop(1 - len(self._gold))
        forward = make_forward(self._subject.model, cache)
        return generated(forward, first, self._subject.stop_ids, self._limit, cache.batch_select_indices)

    def _stored(self, length: float, fed: Sequence[int], answer: list[int] | None) -> list[float]:
        """Return the cache size at each forward pass: one for the fed tokens, one for each answer token except the
        last. If a gold answer exists, its tokens are processed, so that all cells have the same length."""
        tokens = len(self._gold or answer or ())
        return [length + len(fed) + step for step in range(0 if fed else 1, tokens)]

    def _in_steps(self, step: Step) -> _Reading:
        """Process a cell whose policy evicts while decoding, token by token."""
        fed, gold_score, stored, answer = step.placement.fed_ids, None, list[float](), None
        if self._gold:
            columns = self._steps(step, [*fed, *self._gold[:-1]], stored)
            gold_score = self._gold_prediction(torch.cat(columns[-len(self._gold) :]))
        if gold_score is not None and self._of_gold and gold_score.exact:
            answer = list(self._gold)
        elif self._judged:
            answer = self._answer_in_steps(step, fed, [] if self._gold else stored)
        return _Reading(gold_score, answer, stored)

    def _steps(self, step: Step, tokens: Sequence[int], stored: list[float]) -> list[Tensor]:
        """Return the logits (1, vocabulary) of the prompt's last token and of each given token."""
        assert step.observed.logits is not None
        cache, result = compact(step.observed.cache, step.decision), [step.observed.logits[:, -1]]
        with Session(step.method, self._subject.model):
            result += [self._step(cache, torch.tensor([[token]]), stored) for token in tokens]
        return result

    def _answer_in_steps(self, step: Step, fed: Sequence[int], stored: list[float]) -> list[int]:
        assert step.observed.logits is not None
        cache, logits = compact(step.observed.cache, step.decision), step.observed.logits[:, -1]
        with Session(step.method, self._subject.model):
            for token in fed:
                logits = self._step(cache, torch.tensor([[token]]), stored)
            (answer,) = generated(
                lambda ids: self._step(cache, ids, stored), logits, self._subject.stop_ids, self._limit
            )
        return answer

    def _step(self, cache: RetainedCache, ids: Tensor, stored: list[float]) -> Tensor:
        model = self._subject.model
        logits: Tensor = model(input_ids=ids.to(model.device), **{cache_name(model): cache}).logits
        stored.append(cache.mean_length)
        return logits[:, -1]

    def _row(self, cell: _Cell, reading: _Reading) -> Row:
        gold, kept = reading.prediction, cell.kept
        lengths = np.diff(kept.offsets)
        placement = cell.step.placement if cell.step else self._prompt.placement
        slots, prompt = float(lengths.mean()), 0 if cell.policy == BLIND else len(placement.prompt_ids)
        mean = float(np.mean(reading.stored)) if reading.stored else slots
        sizes = {"mean_cache": mean, "peak_cache": max([prompt, *map(ceil, reading.stored)])}
        result = {
            "policy": cell.policy, "budget": cell.budget, **_kept_of(kept, self._evidence),
            "answer_slots": mean - slots, "right": self._right(reading),
            "answer": None if reading.answer is None else decode(self._subject.tokenizer, reading.answer),
            **sizes, **{name.replace("cache", "bytes"): round(slot * self._slot_bytes) for name, slot in sizes.items()},
        }
        if gold is None or self._full is None:
            return result
        lost = None if self._attention is None else lost_attention(kept, self._attention)
        return {
            **result, "exact": gold.exact, "likelihood": gold.likelihood, "divergence": gold.divergence(self._full),
            "lost_attention": lost,
        }

    def _right(self, reading: _Reading) -> float | None:
        if reading.answer is None:
            return None
        if self._of_gold and reading.prediction is not None:
            return reading.prediction.exact
        return score(self._subject.tokenizer, reading.answer, self._sample)


def _short(counts: IntVector) -> int | list[int]:
    """Return the counts of all sets of kept tokens, or one number if all are equal."""
    return int(counts[0]) if (counts == counts[0]).all() else counts.tolist()


def evidence_kept(kept: Retention, evidence: BoolVector) -> Int64[IntVector, " groups"]:
    """Return the number of evidence tokens in each set of kept tokens. `evidence` (seen,) is a mask."""
    before = np.concatenate([[0], np.cumsum(evidence[kept.positions])])
    return np.diff(before[kept.offsets]).astype(np.int64)


def answer_attention(layers: Iterable[LayerView], seen: int) -> Float64[Matrix, "groups seen"]:
    """Return the mean attention of the captured queries on the first `seen` keys, by layer and KV head."""
    return np.concatenate([_mean_weights(view)[:, :seen] for view in layers])


def _mean_weights(view: LayerView) -> Float64[Matrix, "heads n"]:
    q, k = torch.as_tensor(view.q), torch.as_tensor(view.k)
    (H, a, d), (heads, n, _) = q.shape, k.shape
    logits = (q.reshape(heads, -1, d) @ k.mT * view.scaling).reshape(heads, H // heads, a, n)
    if view.softcap is not None:
        logits = torch.tanh(logits / view.softcap) * view.softcap
    later = torch.ones(a, n, dtype=torch.bool, device=k.device).triu(n - a + 1)
    logits = logits.masked_fill(later, -torch.inf)
    if view.sinks is not None:
        sinks = torch.as_tensor(view.sinks).to(logits).view(heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(dim=-1)[..., :n]
    return weights.mean(dim=(1, 2), dtype=torch.float64).cpu().numpy()


def lost_attention(kept: Retention, attention: Float64[Matrix, "groups seen"]) -> float:
    """Return the fraction of attention on evicted keys, averaged over layers and KV heads."""
    each = attention.reshape(kept.groups, -1, attention.shape[1]).mean(axis=1)
    groups = np.repeat(np.arange(kept.groups), np.diff(kept.offsets))
    return float((each.sum() - each[groups, kept.positions].sum()) / kept.groups)
