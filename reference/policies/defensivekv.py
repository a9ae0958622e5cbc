"""DefensiveKV: a key's score is max(largest attention weight, prior) times the L1 norm of the projected value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from reference.policies.attention import average_pool, group_maximum, group_mean, observed_attention, wide
from reference.policies.budgets import Competition
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import check_odd, check_positive, stacked, with_window
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Cube, Float64, IntVector, Matrix
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = [
    "Defensive", "defensive_maximum", "defensive_score", "defensivekv", "first_stage", "output_share", "output_size",
]

COVERED = 0.9


def defensive_maximum(A: Float64[Cube, "H w past"], kernel: int, H_kv: int) -> Float64[Matrix, "H_kv past"]:
    """Return each key's largest pooled attention weight over the queries and the query heads of a KV head.

    A result below the mean of all keys' largest pooled weights is raised to this mean.

    Before the maximum, each attention row is average-pooled, then rescaled to the sum that the row had before pooling.

    Implements: PO-DEFENSIVEKV

    Source: DefensiveKV, Section 4 (worst-case estimate and adaptive prior).
    """
    pooled = average_pool(A.reshape(-1, A.shape[2]), kernel).reshape(A.shape)
    mass = pooled.sum(axis=2, keepdims=True)
    pooled *= np.divide(A.sum(axis=2, keepdims=True), mass, out=np.zeros_like(mass), where=mass > 0)
    worst = group_maximum(pooled, H_kv).max(axis=1)
    held: Matrix = np.maximum(worst, worst.mean(axis=1, keepdims=True))
    return held


def output_size(v: DeviceArray, W_o: DeviceArray) -> Float64[Matrix, "H_kv n"]:
    """Return each token's ||W_o v||_1, averaged over the query heads of a KV head. W_o has the shape (H, d, hidden).

    Implements: PO-DEFENSIVEKV, PO-CRITICALKV

    Source: CriticalKV, Section 4, and DefensiveKV's official code.
    """
    output = np.abs(np.matmul(np.repeat(wide(v), len(W_o) // len(v), axis=0), wide(W_o))).sum(axis=2)
    return group_mean(output, len(v))


def output_share(v: Float64[Cube, "H_kv n d"], W_o: Float64[Cube, "H d hidden"]) -> Float64[Matrix, "H_kv n"]:
    """Return the `output_size` of a token in each KV head, divided by the sum over the KV heads.

    Implements: PO-DEFENSIVEKV

    Source: DefensiveKV's official code.

    Raises:
        SpecError: if a token has output size 0 in every head.
    """
    size = output_size(v, W_o)
    total = size.sum(axis=0)
    if (total == 0).any():
        raise SpecError(
            "v", 0.0,
            f"the projected value of token {int(np.argmin(total))} is zero in every head, so no share can be computed",
        )
    share: Matrix = size / total
    return share


def first_stage(A: Float64[Cube, "H w past"], H_kv: int, W: int, most: int) -> list[IntVector]:
    """Return the keys of each KV head with the largest mean attention.

    At most `most` keys are returned for each head, and the sum of the keys' shares is bounded.

    The share of a key is its mean attention divided by the sum of mean attention over all keys before the window. The
    bound is 0.9 - a. To compute a, attention is summed over the last W keys before the window, then averaged over all
    heads and queries.

    Implements: PO-DEFENSIVEKV

    Source: DefensiveKV's official code. If the attention of a head before the window is 0, no key of the head is
    returned.
    """
    mean = group_mean(A.mean(axis=1), H_kv)
    total = mean.sum(axis=1, keepdims=True)
    share = np.divide(mean, total, out=np.full_like(mean, np.nan), where=total > 0)  # with NaN, no key is selected
    bound = COVERED - A[:, :, -W:].sum(axis=2).mean()
    order = np.argsort(-share, axis=1, kind="stable")
    covered = np.cumsum(np.take_along_axis(share, order, axis=1), axis=1)
    counts = np.minimum((covered < bound).sum(axis=1), max(0, most))
    return [row[:count] for row, count in zip(order, counts, strict=True)]


def defensive_score(view: LayerView, W_o: DeviceArray, B: int, W: int, kernel: int) -> Float64[Matrix, "H_kv n"]:
    """Return `defensive_maximum` times `output_share`. Keys of `first_stage` have the layer's largest score instead.

    Implements: PO-DEFENSIVEKV
    """
    A, H_kv = observed_attention(view, W), len(view.k)
    n = A.shape[2]
    past = n - A.shape[1]
    if past == 0:
        return np.full((H_kv, n), np.nan)
    A = A[:, :, :past]
    scores = defensive_maximum(A, kernel, H_kv) * output_share(wide(view.v)[:, :past], wide(W_o))
    largest = scores.max()
    for row, first in zip(scores, first_stage(A, H_kv, W, B - W), strict=True):
        row[first] = largest
    return with_window(scores, n)


@dataclass(frozen=True)
class Defensive:
    """DefensiveKV's scorer. `W_o` maps the index of a layer to the layer's output projection (H, d, hidden)."""

    W_o: Mapping[int, DeviceArray]
    W: int
    kernel: int
    accepts_tensor: Callable[[DeviceArray], bool] | None = None
    score: Callable[..., Matrix] = defensive_score
    layerwise: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs("all", self.W, values=True, budget=True, accepts_tensor=self.accepts_tensor)

    @property
    def provided(self) -> Provided:
        return Provided(unscored=(0, self.W))

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        assert observation.B is not None
        if any(view.v is None for view in observation.layers.values()):
            raise SpecError("v", None, "is needed, because DefensiveKV uses the values")
        return stacked(observation, [
            self.score(view, self.W_o[layer], observation.B, self.W, self.kernel)
            for layer, view in observation.layers.items()
        ])


@named(
    "defensivekv", "Feng et al., DefensiveKV (arXiv 2510.13334)",
    "tokens with the largest product of attention and norm of the projected value; heads of a layer share one budget",
    model_constants=frozenset({"W_o"}),
)
def defensivekv(W_o: Mapping[int, DeviceArray], W: int = 32, kernel: int = 5) -> Policy:
    """Return DefensiveKV: each layer keeps the last W tokens and the best-scored earlier tokens of all KV heads.

    In the layer-wise form of the official code, the layers also compete for the budget. If the budget is below W, the
    first stage of the official code selects nearly every token. kvspec does not implement Eq. 8 of the CrystalCache
    paper, because the paper does not define the risk that Eq. 8 subtracts.

    Raises:
        SpecError: if the window is not positive, or if the kernel is even.
    """
    scorer = Defensive(W_o, check_positive("W", W), check_odd(kernel))
    return Policy(
        "defensivekv", scorer, Competition(Fraction(0)), top_units, SinkAndRecent(0, W),
        granularity=Granularity.HEAD,
    )
