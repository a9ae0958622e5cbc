"""Compactor and its two scores: leverage of the keys before RoPE, and attention inside chunks without a causal mask."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from reference.policies.attention import average_pool, group_mean, softmax, unrotated, wide, wide_sinks
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, check_positive, stacked
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Cube, Float64, IntVector, Matrix, Vector
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity
from spec.validate import check_whole

__all__ = [
    "Compactor", "Leverage", "chunk_attention", "compactor", "leverage", "leverage_scores", "noncausal",
    "noncausal_score",
]

RIDGE = 0.01
LEAST_SPREAD = 1e-6


def leverage_scores(x: Float64[Cube, "H n d"]) -> Float64[Matrix, "H n"]:
    """Return x_i (X^T X + RIDGE I)^-1 x_i for each row x_i of the centred matrix X of a head.

    Implements: PO-LEVERAGE

    Source: Compactor, approximate leverage scores. kvspec computes the exact scores.
    """
    X = x - x.mean(axis=1, keepdims=True)
    gram = np.matmul(X.transpose(0, 2, 1), X) + RIDGE * np.eye(x.shape[2])
    scores: Matrix = (X * np.linalg.solve(gram, X.transpose(0, 2, 1)).transpose(0, 2, 1)).sum(axis=2)
    return scores


def chunk_attention(view: LayerView, c: int) -> Float64[Matrix, "H n"]:
    """Return the attention that each key receives from all queries of its chunk, also from earlier queries.

    The softmax of a query includes the keys of the query's chunk only. The last chunk may be shorter. If the view has
    fewer queries than keys, the queries belong to the last keys.

    Implements: PO-NONCAUSAL
    """
    q, k, sinks = wide(view.q), wide(view.k), wide_sinks(view.sinks)
    H, n = len(q), k.shape[1]
    k, before, total = np.repeat(k, H // len(k), axis=0), n - q.shape[1], np.zeros((H, n))
    for first in range(0, n, c):
        rows = q[:, max(0, first - before) : max(0, first + c - before)]
        keys = k[:, first : first + c]
        logits = np.matmul(rows, keys.transpose(0, 2, 1)) * view.scaling
        if view.softcap is not None:
            logits = view.softcap * np.tanh(logits / view.softcap)
        asked = rows.shape[1]
        beside = None if sinks is None else np.repeat(sinks, asked)
        if asked:
            A = softmax(logits.reshape(-1, keys.shape[1]), beside).reshape(logits.shape)
            total[:, first : first + c] = A.sum(axis=1)
    return total


def noncausal_score(view: LayerView, c: int) -> Float64[Matrix, "H_kv n"]:
    """Return the attention inside chunks, averaged over a group, times the value's norm, average-pooled over 3 tokens.

    Implements: PO-NONCAUSAL

    Source: Compactor, non-causal attention.

    Raises:
        SpecError: if the values were not captured.
    """
    if view.v is None:
        raise SpecError("v", None, "is needed, because Compactor uses the values")
    v = wide(view.v)
    return average_pool(group_mean(chunk_attention(view, c), len(v)) * np.sqrt((v * v).sum(axis=2)), 3)


@named(
    "noncausal", "Chari and Van Durme, Compactor (arXiv 2507.08143)",
    "tokens that earlier and later tokens of the same chunk would attend to most, without a causal mask",
)
def noncausal(c: int = 256) -> Policy:
    """Return Compactor's attention alone: each KV head keeps the tokens with the most attention inside their chunk.

    kvspec multiplies logits by the scaling of the model. NonCausalAttnPress in kvpress does not, and fills the last
    chunk with zeros that receive attention.

    Raises:
        SpecError: if c is not positive.
    """
    score = partial(noncausal_score, c=check_positive("c", c))
    scorer = LayerScorer(Needs("all", None, values=True), score, separable=False)
    return Policy("noncausal", scorer, even, top_units, SinkAndRecent(0, 0), granularity=Granularity.HEAD)


def _positions(observation: Observation) -> IntVector:
    return np.arange(observation.seen) if observation.positions is None else observation.positions


@dataclass(frozen=True)
class Leverage:
    """Scorer of leverage scores. RoPE is removed from the cached keys."""

    inv_freq: Vector
    factor: float
    needs: Needs = Needs("all", query_rows=0)
    separable: bool = True
    layerwise: ClassVar[bool] = True
    provided: ClassVar[Provided] = Provided(no_steps="needs positions, which no record stores: leave the cadence out")

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        at = _positions(observation)
        return stacked(observation, [
            leverage_scores(unrotated(wide(view.k), at, self.inv_freq, self.factor))
            for view in observation.layers.values()
        ])


@named(
    "leverage", "Chari and Van Durme, Compactor (arXiv 2507.08143)",
    "tokens whose keys before RoPE have the largest leverage, that is, are outliers",
    model_constants=frozenset({"inv_freq", "factor"}),
)
def leverage(inv_freq: Float64[Vector, " half"], factor: float = 1.0) -> Policy:
    """Return leverage scores alone: each KV head keeps the tokens whose keys are farthest from all other keys.

    Compactor and LeverageScorePress in kvpress approximate the scores: they multiply the keys by a random Gaussian
    matrix with 48 columns. kvspec computes the exact scores.
    """
    return Policy(
        "leverage", Leverage(inv_freq, factor), even, top_units, SinkAndRecent(0, 0), granularity=Granularity.HEAD,
    )


@dataclass(frozen=True)
class Compactor:
    """Scorer of Compactor: a weighted sum of the z-scores of leverage and attention inside chunks."""

    inv_freq: Vector
    factor: float
    c: int
    N_sink: int
    N_recent: int
    needs: Needs = Needs("all", None, values=True, budget=True)
    separable: ClassVar[bool] = False
    layerwise: ClassVar[bool] = True

    @property
    def provided(self) -> Provided:
        return Provided(unscored=(self.N_sink, self.N_recent))

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        assert observation.B is not None
        blend, at = max(0.0, 1 - observation.B / observation.seen), _positions(observation)
        return stacked(observation, [self._of_layer(view, at, blend) for view in observation.layers.values()])

    def _of_layer(self, view: LayerView, at: IntVector, blend: float) -> Float64[Matrix, "H_kv n"]:
        """Return `blend` times the z-score of the leverage, plus the z-score of the attention inside chunks.

        The first N_sink and the last N_recent tokens are excluded.

        Implements: PO-COMPACTOR

        Source: Compactor, and CompactorPress in kvpress.
        """
        n = view.k.shape[1]
        scores, inner = np.full(view.k.shape[:2], np.nan), slice(self.N_sink, max(self.N_sink, n - self.N_recent))
        if len(at[inner]):
            queries = slice(max(0, self.N_sink - n + view.q.shape[1]), view.q.shape[1] - self.N_recent)
            values = None if view.v is None else view.v[:, inner]
            part = replace(view, q=view.q[:, queries], k=view.k[:, inner], v=values)
            X = unrotated(wide(part.k), at[inner], self.inv_freq, self.factor)
            scores[:, inner] = blend * _z(leverage_scores(X)) + _z(noncausal_score(part, self.c))
        return scores


def _z(x: Float64[Matrix, "H n"]) -> Float64[Matrix, "H n"]:
    """Return the z-scores of all tokens of all heads of a layer."""
    z: Matrix = (x - x.mean()) / max(float(x.std()), LEAST_SPREAD)
    return z


@named(
    "compactor", "Chari and Van Durme, Compactor (arXiv 2507.08143)",
    "the first and the last tokens, and the tokens with the most leverage and attention inside their chunk",
    model_constants=frozenset({"inv_freq", "factor"}),
)
def compactor(
    inv_freq: Float64[Vector, " half"], factor: float = 1.0, c: int = 256, N_sink: int = 8, N_recent: int = 4,
) -> Policy:
    """Return Compactor: each KV head keeps the tokens with the largest sums of two z-scores.

    The leverage has the share of evicted tokens as weight, as in CompactorPress in kvpress. kvspec computes exact
    leverage scores, and attention as in `noncausal`.

    Raises:
        SpecError: if c is not positive, or if N_sink or N_recent is negative.
    """
    for name, value in (("N_sink", N_sink), ("N_recent", N_recent)):
        check_whole(name, value)
    scorer = Compactor(inv_freq, factor, check_positive("c", c), N_sink, N_recent)
    return Policy(
        "compactor", scorer, even, top_units, SinkAndRecent(N_sink, N_recent), granularity=Granularity.HEAD,
    )
