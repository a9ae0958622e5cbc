"""Policies that keep whole chunks of tokens by the scores of single tokens, and few tokens of spiky chunks."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from reference.policies.scorers import check_positive
from reference.policies.selectors import top_tokens, top_units
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector
from spec.composition import Provided, Required, provided_by
from spec.errors import SpecError
from spec.policy import LayerwiseScorer, Needs, Observation, Policy, Scorer, Scores, Selection, SeparableScorer
from spec.retention import Granularity

__all__ = ["HeadSums", "InChunks", "best_chunks", "chunk_entropy", "in_chunks"]


def chunk_entropy(x: Float64[Vector, " m"]) -> float:
    """Return the entropy of scores, divided by the logarithm of their number. One score has the entropy 0.

    Implements: PO-CHUNKS

    Source: kvpress's EntropyGatedChunkKVPress. Negative scores are first raised by the size of the lowest. Sums are
    rounded once, so chunks with the same scores in a different order tie.
    """
    raised = x - min(0.0, x.min())
    total = math.fsum(raised)
    if len(x) == 1 or total == 0:
        return 0.0
    if raised.min() == raised.max():
        return 1.0
    p = raised[raised > 0] / total
    return min(1.0, -math.fsum(p * np.log(p)) / math.log(len(x)))


def best_chunks(
    row: Float64[Vector, " n"], B: int, protected: Bool[BoolVector, " n"], c: int, gate: int,
) -> Int64[IntVector, " kept"]:
    """Return the protected tokens, chunks of c tokens by their mean scores, then the best tokens, up to B.

    The gate applies to chunks whose mean is at least the median, and whose entropy is below the median. If `gate` is
    above 0, only the `gate` best tokens of such a chunk are kept.

    Implements: PO-CHUNKS
    """
    kept = protected.copy()
    runs = [start + np.flatnonzero(~protected[start : start + c]) for start in range(0, len(row), c)]
    chunks = [run for run in runs if len(run)]
    means, entropies = [math.fsum(row[u]) / len(u) for u in chunks], [chunk_entropy(row[u]) for u in chunks]
    middle, level = (sorted(x)[(len(x) - 1) // 2] if x else 0.0 for x in (means, entropies))
    for u in sorted(range(len(chunks)), key=lambda u: (-means[u], u)):
        spiky = gate > 0 and means[u] >= middle and entropies[u] < level
        most = min(gate, len(chunks[u])) if spiky else len(chunks[u])
        kept[_best(row, chunks[u], min(most, B - int(kept.sum())))] = True
    kept[_best(row, np.flatnonzero(~kept), B - int(kept.sum()))] = True
    return np.flatnonzero(kept)


def _best(row: Float64[Vector, " n"], tokens: IntVector, number: int) -> IntVector:
    return tokens[np.argsort(-row[tokens], kind="stable")[: max(0, number)]]


@dataclass(frozen=True)
class InChunks:
    """Selector of whole chunks of c tokens by the scores of single tokens (`best_chunks`)."""

    c: int
    gate: int
    required: ClassVar[Required] = Required()

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        groups = [
            best_chunks(row, int(B), protected, self.c, self.gate)
            for row, B in zip(scores.values, budgets, strict=True)
        ]
        return Selection(np.concatenate(groups), np.cumsum([0, *map(len, groups)]).astype(np.int64))


@dataclass(frozen=True)
class HeadSums:
    """Scorer that adds the scores of the KV heads of each layer.

    `by_head` is False if the host has one row of scores for each layer or for the model.
    """

    host: Scorer
    by_head: bool

    @property
    def needs(self) -> Needs:
        return self.host.needs

    @property
    def provided(self) -> Provided | None:
        host = provided_by(self.host)
        if host is None:
            return None
        sets = frozenset({Granularity.LAYER}) if self.by_head else host.sets - {Granularity.HEAD}
        return replace(host, sets=sets, no_steps="chooses chunks of a whole segment: leave chunks= or the cadence out")

    @property
    def separable(self) -> bool:
        return isinstance(self.host, SeparableScorer) and self.host.separable

    @property
    def layerwise(self) -> bool:
        return isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Implements: PO-CHUNKS"""
        if not self.by_head:
            return self.host(observation, protected)
        H = len(next(iter(observation.layers.values())).k)
        shown = replace(observation, groups=H * observation.groups, first=H * observation.first)
        scores = self.host(shown, protected)
        values = scores.values.reshape(-1, H, scores.values.shape[1]).sum(axis=1)
        return replace(scores, values=values, heads=1)


def in_chunks(host: Policy, c: int = 10, gate: int = 0) -> Policy:
    """Return the host policy, which keeps whole chunks of c tokens in each layer, as ChunkKV does.

        policy = kvspec.policy_from_name("snapkv/chunks=10:gate=4", budget=0.5)

    The heads of a layer keep the same tokens, by the sum of their scores. With `gate=4` the policy keeps only the best
    4 tokens of a chunk whose score comes from few tokens.

    Implements: PO-CHUNKS

    Raises:
        SpecError: if c is below 1, or if the gate is negative or not below c. Also if the host does not keep single
            tokens by their scores alone.
    """
    scorer, by_head = provided_by(host.scorer), host.granularity is Granularity.HEAD
    tokens = getattr(host.selector, "func", host.selector) in (top_units, top_tokens)
    if not tokens or scorer is None or scorer.units != "tokens":
        reason = "must keep single tokens, by their scores alone: use score=NAME with a scorer of tokens"
        raise SpecError("chunks", host.name, reason)
    if by_head and host.scorer.needs.layers != "all":
        raise SpecError("chunks", host.name, "has the same scores in all heads: use sets=layer")
    check_positive("chunks", c)
    if not 0 <= gate < c:
        raise SpecError("gate", gate, f"must be at least 0 and below the {c} tokens of a chunk")
    granularity = Granularity.LAYER if by_head else host.granularity
    return replace(
        host, name=f"chunks({host.name})", scorer=HeadSums(host.scorer, by_head), selector=InChunks(c, gate),
        granularity=granularity,
    )
