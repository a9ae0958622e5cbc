"""VaSE keeps tokens whose values have a wide range, and draws other tokens at random, in proportion to attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np

from reference.crystalcache.coattention import attention
from reference.policies.attention import average_pool, group_mean, wide, wide_sinks
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.rkv import last_queries
from reference.policies.scorers import check_odd, check_positive, host_rows, stacked, with_window
from reference.policies.selectors import staged
from spec.arrays import BoolVector, Float64, Int64, IntMatrix, IntVector, Matrix, Vector
from spec.composition import Provided, Required, requires
from spec.errors import SpecError
from spec.policy import Cadence, DeviceArray, LayerView, Needs, Observation, Policy, Scores, Selection
from spec.retention import Granularity

__all__ = [
    "Sampled", "exponential_numbers", "ranges_first", "uniform_numbers", "value_range", "vase", "window_attention",
]

Records: TypeAlias = tuple[tuple[DeviceArray, ...], IntMatrix]


def uniform_numbers(seed: int, group: int, seen: int, n: int) -> Float64[Vector, " n"]:
    """Return a uniform random number in (0, 1) for each of the first n positions.

    A number is (w + 1/2) / 2^52, with w the upper 52 bits of a Philox4x64-10 output word.

    Implements: PO-UNIFORM

    Source: Salmon et al., Parallel random numbers, Section 4.
    """
    words = np.random.Philox(key=seed, counter=np.array([0, group, seen, 0], dtype=np.uint64)).random_raw(n)
    numbers: Vector = ((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return numbers


def exponential_numbers(seed: int, first: int, seen: int, at: Int64[IntMatrix, "g n"]) -> Float64[Matrix, "g n"]:
    """Return an exponential random number -log(u) for each position in `at`. Each u is a uniform random number.

    `first` is the index of the first group.

    Implements: PO-UNIFORM
    """
    numbers = [uniform_numbers(seed, group, seen, seen)[positions] for group, positions in enumerate(at, first)]
    return -np.log(np.stack(numbers))


def window_attention(view: LayerView, W: int, kernel: int) -> Float64[Matrix, "H_kv past"]:
    """Return the mean attention of the last W queries on each key before the window.

    The mean is average-pooled along the keys for each query head, then averaged over the query heads of a group.

    Implements: PO-VASE

    Source: VaSE's official code. The softmax excludes the keys of the window.
    """
    q, k = wide(view.q)[:, -W:], wide(view.k)
    past = k[:, : k.shape[1] - q.shape[1]]
    if not past.shape[1]:
        return np.zeros((len(k), 0))
    at = np.arange(k.shape[1])
    A = attention(q, past, at[past.shape[1] :], at[: past.shape[1]], view.scaling, view.softcap, wide_sinks(view.sinks))
    return group_mean(average_pool(A.mean(axis=1), kernel), len(k))


def value_range(v: DeviceArray) -> Float64[Matrix, "H_kv n"]:
    """Return the range of each value vector: its largest channel minus its smallest channel.

    Implements: PO-VASE

    Source: VaSE, Section 4.
    """
    widths: Matrix = wide(v).max(axis=2) - wide(v).min(axis=2)
    return widths


@requires(Required(second="sample", device=True))
def ranges_first(
    scores: Scores, budgets: IntVector, protected: BoolVector, /, share: Fraction, N_sink: int,
) -> Selection:
    """Select a group's protected tokens, then tokens by value range, then a random sample up to the budget.

    The sinks and the tokens selected by value range together fill the fraction `share` of the budget.

    Implements: PO-VASE

    Source: VaSE, Section 4.
    """
    pinned = int(protected.sum())
    large = budgets * share.numerator // share.denominator - N_sink
    return staged(scores, pinned + np.clip(large, 0, budgets - pinned), budgets, protected)


@dataclass(frozen=True)
class Sampled:
    """Scorer of VaSE. The first score is the value range. The second score is attention / exponential random number.

    The tokens with the largest second scores are a random sample, weighted by attention. The scorer stores the last W
    queries of each layer and the positions of the cached tokens.
    """

    W: int
    kernel: int
    seed: int
    accepts_tensor: Callable[[DeviceArray], bool] | None = None
    range: Callable[[DeviceArray], Matrix] = value_range
    attend: Callable[[LayerView, int, int], Matrix] = window_attention
    layerwise: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs("all", self.W, values=True, accepts_tensor=self.accepts_tensor)

    @property
    def provided(self) -> Provided:
        return Provided(unscored=(0, self.W), second="sample", no_steps="")

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        at = np.arange(observation.seen) if observation.positions is None else observation.positions
        records = last_queries((), observation, self.W), np.tile(at, (observation.groups, 1))
        return self._scores(observation, records)

    def step(self, records: object, observation: Observation, /) -> Scores:
        return self._scores(observation, self.record(cast(Any, records), observation))

    def record(self, records: Records | None, observation: Observation, /) -> Records:
        """Add the new queries and positions to the records."""
        old, at = records or ((), np.empty((observation.groups, 0), dtype=np.int64))
        new = next(iter(observation.layers.values())).k.shape[1] - at.shape[1]
        later = np.tile(np.arange(observation.seen - new, observation.seen), (len(at), 1))
        return last_queries(old, observation, self.W), np.concatenate([at, later], axis=1)

    def keep(self, records: object, slots: Int64[IntMatrix, "g kept"], /) -> object:
        assert isinstance(records, tuple)
        queries, at = records
        return queries, np.take_along_axis(at, slots, axis=1)

    def join(self, records: Sequence[Records], /) -> object:
        queries, at = zip(*records, strict=True)
        return tuple(chain(*queries)), np.concatenate(at)

    def _scores(self, observation: Observation, records: Records) -> Scores:
        queries, at = records
        views = [replace(view, q=q) for view, q in zip(observation.layers.values(), queries, strict=True)]
        if any(view.v is None for view in views):
            raise SpecError("v", None, "is needed, because VaSE uses the values")
        n, past = at.shape[1], at.shape[1] - views[0].q.shape[1]
        rows = [self.range(view.v)[:, :past] for view in views]
        rows += [self.attend(view, self.W, self.kernel) for view in views]
        ranges, A = np.split(with_window(host_rows(rows), n), 2)
        second = A / exponential_numbers(self.seed, observation.first, observation.seen, at)
        return replace(stacked(observation, np.split(ranges, len(views)), records), second=second)


@named(
    "vase", "Chang et al., VaSE",
    "the first and last tokens, tokens whose values have a wide range, and a random sample of the remaining tokens",
    diverse=False, blocks=False,
)
def vase(
    W: int = 64, kernel: int = 5, N_sink: int = 4, share: Fraction = Fraction(1, 4), seed: int = 0,
) -> Policy:
    """Return VaSE: each KV head keeps sinks, the last W tokens, tokens with wide value ranges, and a random sample.

    While decoding, the policy evicts each time the number of tokens seen is a multiple of W. The official code does not
    evict from prompts. The official code decides when to evict by the number of cached tokens, not by the number of
    tokens seen. The official code always selects 1024 tokens by value range (for a budget of 4096). The official code
    samples with the device's random generator.

    Raises:
        SpecError: if the window is not positive, the kernel is even, the share is outside [0, 1], or the seed does not
            fit 64 bits.
    """
    if not 0 <= share <= 1:
        raise SpecError("share", share, "must lie in [0, 1]")
    if not 0 <= seed < 2**64:
        raise SpecError("seed", seed, "must lie in [0, 2^64)")
    return Policy(
        "vase", Sampled(check_positive("W", W), check_odd(kernel), seed), even,
        partial(ranges_first, share=share, N_sink=N_sink), SinkAndRecent(N_sink, W), Cadence(every=W), Granularity.HEAD,
    )
