"""Expected Attention: a key's score is the attention expected from future queries, which are modelled as Gaussian."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from reference.policies.attention import group_mean, mean_rotation, softmax, tables, turned_back, wide, wide_sinks
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import stacked
from reference.policies.selectors import top_tokens
from spec.arrays import BoolVector, Cube, Float64, Int64, IntVector, Matrix, Vector
from spec.backend import Backend, resolve
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = [
    "ExpectedAttention", "expected_attention", "expected_logits", "expected_weights", "query_statistics",
    "weights_from_statistics",
]


def query_statistics(q: Float64[Cube, "H m d"]) -> tuple[Float64[Matrix, "H d"], Float64[Cube, "H d d"]]:
    """Return the mean and the covariance (divisor m) of each head's m queries before RoPE.

    Implements: PO-EXPECTED-ATTENTION

    Source: Expected Attention, Section 3.1.
    """
    mean: Matrix = q.mean(axis=1)
    centred = q - mean[:, None]
    covariance: Cube = np.matmul(centred.transpose(0, 2, 1), centred) / q.shape[1]
    return mean, covariance


def expected_logits(
    mean: Float64[Matrix, "H d"], covariance: Float64[Cube, "H d d"], k: Float64[Cube, "H n d"], scaling: float,
) -> Float64[Matrix, "H n"]:
    """Return log E[exp(scaling q.k)] for each key k and a Gaussian query q.

    Implements: PO-EXPECTED-ATTENTION

    Source: Expected Attention, Section 3.2.
    """
    linear = np.einsum("hd,hnd->hn", mean, k) * scaling
    quadratic = np.einsum("hnd,hnd->hn", np.matmul(k, covariance), k) * scaling**2 / 2
    logits: Matrix = linear + quadratic
    return logits


def expected_weights(
    q: DeviceArray, k: DeviceArray, v: DeviceArray, at: Int64[IntVector, " m"], ahead: Int64[IntVector, " N_future"],
    inv_freq: Float64[Vector, " half"], factor: float, scaling: float, sinks: DeviceArray | None = None,
) -> Float64[Matrix, "H_kv n"]:
    """Return the softmax of the expected logits, averaged over query heads, then multiplied by the norm of each value.

    This function is the reference of the backend stage `expected_attention`. Query heads are processed one by one, so
    the data of a head fits in the CPU cache.

    Implements: PO-EXPECTED-ATTENTION
    """
    turns, each = tables(at, inv_freq), list[tuple[Matrix, Cube]]()
    for head in range(len(q)):
        back = turned_back(wide(q[head : head + 1]), *turns) / factor
        each.append(query_statistics(back))
    mean, covariance = (np.concatenate(part) for part in zip(*each, strict=True))
    return weights_from_statistics(mean, covariance, k, v, ahead, inv_freq, factor, scaling, sinks)


def weights_from_statistics(
    mean: Float64[Matrix, "H d"], covariance: Float64[Cube, "H d d"], k: DeviceArray, v: DeviceArray,
    ahead: Int64[IntVector, " N_future"], inv_freq: Float64[Vector, " half"], factor: float, scaling: float,
    sinks: DeviceArray | None = None,
) -> Float64[Matrix, "H_kv n"]:
    """Return the softmax of the expected logits, averaged over query heads, then multiplied by the norm of each value.

    Queries are Gaussian with the given mean and covariance before RoPE, and have the positions `ahead`.

    Implements: PO-EXPECTED-ATTENTION, PO-EXPECTED-ATTENTION-STATS
    """
    R, group, values = mean_rotation(ahead, inv_freq, factor), len(mean) // len(k), wide(v)
    logits_of_heads = []
    for head in range(len(mean)):
        one, keys = slice(head, head + 1), wide(k[head // group : head // group + 1])
        logits_of_heads.append(expected_logits(mean[one] @ R.T, R @ covariance[one] @ R.T, keys, scaling))
    weights = group_mean(softmax(np.concatenate(logits_of_heads), wide_sinks(sinks)), len(k))
    weighted: Matrix = weights * np.sqrt(np.einsum("hnd,hnd->hn", values, values))
    return weighted


Weigh = Callable[
    [DeviceArray, DeviceArray, DeviceArray, IntVector, IntVector, Vector, float, float, DeviceArray | None], Matrix,
]


@dataclass(frozen=True)
class ExpectedAttention:
    """Scorer of Expected Attention.

    The scorer uses the model's RoPE frequencies to undo the rotations of past positions, and to average the rotations
    over future positions.
    """

    inv_freq: Vector
    factor: float
    N_sink: int
    N_future: int
    needs: Needs = Needs("all", None, values=True)
    separable: bool = True
    layerwise: ClassVar[bool] = True
    weigh: Weigh = expected_weights

    @property
    def provided(self) -> Provided:
        return Provided(unscored=(self.N_sink, 0))

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        return stacked(observation, [self.score_layer(view, observation.seen) for view in observation.layers.values()])

    def score_layer(self, view: LayerView, seen: int) -> Float64[Matrix, "H_kv n"]:
        """Return each key's expected attention weight, averaged over query heads, then multiplied by the value's norm.

        The first N_sink tokens are excluded from the keys and from the queries. The queries belong to the last tokens
        before position `seen`.

        Implements: PO-EXPECTED-ATTENTION
        """
        if view.v is None:
            raise SpecError("v", None, "is needed, because Expected Attention uses the values")
        H_kv, n = view.k.shape[:2]
        scores = np.full((H_kv, n), np.nan)
        if n <= self.N_sink:
            return scores
        at = np.arange(max(seen - view.q.shape[1], self.N_sink), seen)
        scores[:, self.N_sink :] = self.weigh(
            view.q[:, view.q.shape[1] - len(at) :], view.k[:, self.N_sink :], view.v[:, self.N_sink :], at,
            np.arange(seen, seen + self.N_future), self.inv_freq, self.factor, view.scaling, view.sinks,
        )
        return scores


@named(
    "expected-attention", "Devoto et al., Expected Attention (arXiv 2510.00636)",
    "tokens that future queries would attend to most, if future queries were Gaussian",
    model_constants=frozenset({"inv_freq", "factor"}),
)
def expected_attention(
    inv_freq: Float64[Vector, " half"], factor: float = 1.0, N_sink: int = 4, N_future: int = 512,
    backend: str | Backend = "numpy",
) -> Policy:
    """Return Expected Attention: each KV head keeps the first N_sink tokens and the best-scored later tokens.

    The policy follows the authors' code in kvpress. The paper uses the norm of the value after the output projection,
    but the code uses the norm of the value before this projection. The code and the paper ignore the variance that RoPE
    adds over future positions.

    Args:
        inv_freq: inverse frequencies of the model's RoPE, one per pair of channels.
        factor: attention factor of the RoPE tables. The factor is 1 except with YaRN and similar scalings.
        N_sink: number of first tokens that are always kept, and excluded from the statistics.
        N_future: number of positions after the prompt over which the RoPE rotation is averaged.

    Raises:
        SpecError: if N_sink is negative, if N_future or factor is not positive, or if the backend is unknown.
        BackendUnavailable: if the backend cannot run here, or lacks the stage family `policies`.
    """
    for name, value, least in (("N_sink", N_sink, 0), ("N_future", N_future, 1)):
        if value < least:
            raise SpecError(name, value, f"must be at least {least}")
    if not factor > 0:
        raise SpecError("factor", factor, "must be positive")
    engine = resolve(backend)
    stages = engine.require_policies()
    scorer = ExpectedAttention(
        inv_freq, factor, N_sink, N_future, Needs("all", None, values=True, accepts_tensor=engine.accepts_tensor),
        weigh=stages.expected_attention,
    )
    return Policy(
        "expected-attention", scorer, even, partial(top_tokens, choose=stages.best_tokens), SinkAndRecent(N_sink, 0),
        granularity=Granularity.HEAD,
    )
