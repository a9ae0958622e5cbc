"""R-KV: decode-time eviction by a key's attention (importance) and the key's similarity to other keys (redundancy)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, cast

import numpy as np

from reference.policies.attention import group_maximum, max_pool, softmax, wide, wide_sinks
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import Score, check_odd, check_positive, stacked, with_window
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Float64, Int64, IntMatrix, Matrix
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import Cadence, DeviceArray, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["QueryCache", "last_queries", "rkv", "rkv_importance", "rkv_redundancy", "rkv_score"]

EPSILON = 1e-8
SIMILAR = 0.5
_ROWS = 64  # rows of cosines at a time, so that the memory is linear in the number of keys


def rkv_importance(view: LayerView, W: int, kernel: int) -> Float64[Matrix, "H_kv past"]:
    """Return the importance of each key before the window: the mean attention of the last W queries, max-pooled.

    The logit of a KV head is the largest logit of its query heads. The softmax weights are averaged over the W queries,
    then max-pooled along the keys.

    Implements: PO-RKV

    Source: R-KV's official code. The softmax excludes the keys of the window.
    """
    q, k = wide(view.q)[:, -W:], wide(view.k)
    past = k[:, : k.shape[1] - q.shape[1]]
    logits = np.matmul(q, np.repeat(past, len(q) // len(k), axis=0).transpose(0, 2, 1)) * view.scaling
    if view.softcap is not None:
        logits = view.softcap * np.tanh(logits / view.softcap)
    largest = group_maximum(logits, len(k))
    sinks = wide_sinks(view.sinks)
    if sinks is not None:
        sinks = np.repeat(group_maximum(sinks[:, None, None], len(k)), q.shape[1])
    A = softmax(largest.reshape(-1, past.shape[1]), sinks).reshape(largest.shape)
    return max_pool(A.mean(axis=1), kernel)


def rkv_redundancy(k: Float64[Matrix, "n d"]) -> Float64[Matrix, "one n"]:
    """Compute each key's mean cosine with all other keys, and return the softmax of these means over the keys.

    Before the mean, the last cosine above 1/2 (compared in float32) in each row is set to 0. If a row has no cosine
    above 1/2, the cosine in column 0 of the row is set to 0.

    Implements: PO-RKV

    Source: R-KV's official code.
    """
    unit = k / (np.sqrt((k * k).sum(axis=1, keepdims=True)) + EPSILON)
    columns, total = np.arange(len(k)), np.zeros(len(k))
    for first in range(0, len(k), _ROWS):
        C = np.matmul(unit[first : first + _ROWS], unit.T)
        rows = np.arange(len(C))
        C[rows, first + rows] = 0.0
        similar = C.astype(np.float32) > np.float32(SIMILAR)
        C[rows, np.where(similar, columns, 0).max(axis=1)] = 0.0
        total += C.sum(axis=0)
    return softmax((total / len(k))[None])


def rkv_score(view: LayerView, W: int, kernel: int, lam: float) -> Float64[Matrix, "H_kv n"]:
    """Return the score lambda I - (1 - lambda) R of each key before the window: I is importance, R is redundancy.

    Implements: PO-RKV

    Source: R-KV, Section 3.
    """
    k = wide(view.k)
    n = k.shape[1]
    past = n - min(W, wide(view.q).shape[1])
    if past == 0:
        return np.full((len(k), n), np.nan)
    R = np.concatenate([rkv_redundancy(head) for head in k])[:, :past]
    return with_window(lam * rkv_importance(view, W, kernel) - (1 - lam) * R, n)


def last_queries(old: Sequence[DeviceArray], observation: Observation, W: int) -> tuple[DeviceArray, ...]:
    """Return the last W queries of each layer from the old and the new queries. Tensors stay on their device."""
    new = [view.q if hasattr(view.q, "cpu") else wide(view.q) for view in observation.layers.values()]
    return tuple(q[:, -W:] for q in (map(_joined, old, new) if old else new))


def _joined(old: DeviceArray, new: DeviceArray) -> DeviceArray:
    if isinstance(new, np.ndarray):
        return np.concatenate([old, new], axis=1)
    whole = new.new_empty((len(new), old.shape[1] + new.shape[1], new.shape[2]))
    whole[:, : old.shape[1]], whole[:, old.shape[1] :] = old, new
    return whole


@dataclass(frozen=True)
class QueryCache:
    """Scorer that stores the last W queries of each layer and scores the cached keys by these queries."""

    W: int
    score: Score
    accepts_tensor: Callable[[DeviceArray], bool] | None = None
    layerwise: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs("all", self.W, accepts_tensor=self.accepts_tensor)

    @property
    def provided(self) -> Provided:
        return Provided(unscored=(0, self.W), no_steps="")

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        return self.step(None, observation)

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Add the new queries to the records and return the scores of the cached tokens.

        Implements: PO-RKV, PO-MORPHKV
        """
        queries = self.record(cast(Any, records), observation)
        views = [replace(view, q=q) for view, q in zip(observation.layers.values(), queries, strict=True)]
        return stacked(observation, [self.score(view) for view in views], queries)

    def record(self, records: tuple[DeviceArray, ...] | None, observation: Observation, /) -> tuple[DeviceArray, ...]:
        return last_queries(records or (), observation, self.W)

    def keep(self, records: object, slots: Int64[IntMatrix, "g kept"], /) -> object:
        return records

    def join(self, records: Sequence[tuple[DeviceArray, ...]], /) -> tuple[DeviceArray, ...]:
        return tuple(chain(*records))


@named(
    "rkv", "Cai et al., R-KV (arXiv 2505.24133)",
    "tokens that the last queries attend to most, and whose keys differ most from all other keys",
)
def rkv(W: int = 8, kernel: int = 7, lam: float = 0.1, every: int = 128) -> Policy:
    """Return R-KV: each KV head keeps the last W tokens and the best-scored earlier tokens.

    The policy evicts each time the number of tokens seen is a multiple of `every`. The paper uses lambda = 0.1, and the
    official class 0.07. The official code evicts one forward pass later than kvspec. The official code continues to
    count tokens across samples unless the counter is reset. If a row of cosines has no cosine above 1/2, the official
    code and kvspec set column 0 of the row to 0.

    Raises:
        SpecError: if W, `kernel` or `every` is not positive, if the kernel is even, or if lambda is outside [0, 1].
    """
    if not 0 <= lam <= 1:
        raise SpecError("lam", lam, "must lie in [0, 1]")
    score = partial(rkv_score, W=check_positive("W", W), kernel=check_odd(kernel), lam=lam)
    return Policy(
        "rkv", QueryCache(W, score), even, top_units, SinkAndRecent(0, W), Cadence(every=every), Granularity.HEAD,
    )
