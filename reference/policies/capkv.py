"""CapKV: the score of a token is the leverage of its value, weighted by the attention of the mean future query."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.policies.attention import group_mean, mean_rotation, unrotated, wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import check_positive, stacked
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Cube, Float64, Matrix, Vector
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity
from spec.validate import check_whole

__all__ = ["CapKV", "capacity_leverage", "capkv"]

EPSILON = 1e-6


def capacity_leverage(w: Float64[Matrix, "H n"], v: Float64[Cube, "H n d"]) -> Float64[Matrix, "H n"]:
    """Return w_i v_i^T A^-1 v_i with A = I + sum over j of (w_j + EPSILON) v_j v_j^T.

    Implements: PO-CAPKV

    Source: CapKV (arXiv 2604.25975), and CapPress in kvpress.
    """
    A = np.eye(v.shape[2]) + np.matmul((v * (w + EPSILON)[:, :, None]).transpose(0, 2, 1), v)
    solved = np.linalg.solve(A, v.transpose(0, 2, 1)).transpose(0, 2, 1)
    scores: Matrix = w * (v * solved).sum(axis=2)
    return scores


def _unit(x: Float64[Cube, "H n d"]) -> Float64[Cube, "H n d"]:
    length = np.sqrt((x * x).sum(axis=2, keepdims=True))
    unit: Cube = np.divide(x, length, out=np.zeros_like(x), where=length > 0)
    return unit


@dataclass(frozen=True)
class CapKV:
    """Scorer of CapKV. The mean query of the prompt is rotated by the mean rotation of future positions."""

    inv_freq: Vector
    factor: float
    tau: float
    N_sink: int
    N_future: int
    needs: Needs = Needs("all", None, values=True)
    separable: bool = True
    layerwise: ClassVar[bool] = True

    @property
    def provided(self) -> Provided:
        return Provided(unscored=(self.N_sink, 0))

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        return stacked(observation, [self._of_layer(view, observation.seen) for view in observation.layers.values()])

    def _of_layer(self, view: LayerView, seen: int) -> Float64[Matrix, "H_kv n"]:
        """Return the weighted leverage of each value, averaged over the query heads of a group.

        The first N_sink tokens are excluded. The weight of a key is exp(tau (c - max c)), with c the cosine of the key
        and the mean query.

        Implements: PO-CAPKV
        """
        if view.v is None:
            raise SpecError("v", None, "is needed, because CapKV uses the values")
        scores, sinks = np.full(view.k.shape[:2], np.nan), self.N_sink
        at = np.arange(max(seen - view.q.shape[1], sinks), seen)
        if view.k.shape[1] <= sinks or not len(at):
            return scores
        back = unrotated(wide(view.q)[:, -len(at) :], at, self.inv_freq, self.factor)
        R = mean_rotation(np.arange(seen, seen + self.N_future), self.inv_freq, self.factor)
        query = _unit((back.mean(axis=1) @ R.T)[:, None])
        group = len(query) // len(view.k)
        k, v = (np.repeat(wide(x)[:, sinks:], group, axis=0) for x in (view.k, view.v))
        cosine = np.clip((_unit(k) * query).sum(axis=2), -1, 1)
        w = np.exp(self.tau * (cosine - cosine.max(axis=1, keepdims=True)))
        scores[:, sinks:] = group_mean(capacity_leverage(w, v), len(view.k))
        return scores


@named(
    "capkv", "CapKV (arXiv 2604.25975)",
    "the first tokens, and tokens that future queries may attend to and whose values differ most from other values",
    model_constants=frozenset({"inv_freq", "factor"}),
)
def capkv(
    inv_freq: Float64[Vector, " half"], factor: float = 1.0, tau: float = 5.0, N_sink: int = 4, N_future: int = 512,
) -> Policy:
    """Return CapKV as in kvpress: each KV head keeps the first N_sink tokens and the best-scored later tokens.

    As in CapPress, the keys and the mean query are scaled to length 1 before the dot product. The paper does not scale
    them. The paper uses values after the output projection. CapPress and kvspec use values before this projection.

    Raises:
        SpecError: if tau is not positive, if N_sink is negative, or if N_future is not positive.
    """
    if not tau > 0:
        raise SpecError("tau", tau, "must be positive")
    check_whole("N_sink", N_sink)
    scorer = CapKV(inv_freq, factor, tau, N_sink, check_positive("N_future", N_future))
    return Policy("capkv", scorer, even, top_units, SinkAndRecent(N_sink, 0), granularity=Granularity.HEAD)
