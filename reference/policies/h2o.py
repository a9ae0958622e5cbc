"""H2O: heavy hitters, the keys that have received most attention so far, and the newest half."""

from dataclasses import dataclass, replace

import numpy as np

from reference.policies.attention import accumulated_attention, group_sum
from reference.policies.budgets import even
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, check_positive, stacked
from reference.policies.selectors import recent_half, top_units
from spec.arrays import BoolVector, Float64, Int64, IntMatrix, Matrix
from spec.policy import Cadence, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["HeavyHitters", "h2o", "h2o_described", "h2o_score"]


def h2o_score(view: LayerView) -> Float64[Matrix, "H_kv n"]:
    """Attention on each key, summed over all queries and over the group.

    Implements: PO-H2O-DESCRIBED

    Source: H2O, Section 4; CrystalCache, Eq. 5.
    """
    return group_sum(accumulated_attention(view), len(view.k))


@dataclass(frozen=True)
class HeavyHitters:
    """The sums live with their tokens: a token that is evicted takes its sum along."""

    needs: Needs = Needs("all", None)

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        scores = stacked(observation, [h2o_score(view) for view in observation.layers.values()])
        return Scores(scores.values, scores.offsets, carry=scores.values, heads=scores.heads)

    def step(self, records: object, observation: Observation, /) -> Scores:
        """What new queries give to each cached key is added; their own keys start at what these give them.

        Implements: PO-H2O
        """
        new = stacked(observation, [h2o_score(view) for view in observation.layers.values()])
        old = np.asarray(records)
        sums: Matrix = np.pad(old, ((0, 0), (0, new.values.shape[1] - old.shape[1]))) + new.values
        return replace(new, values=sums, carry=sums)

    def keep(self, records: object, slots: Int64[IntMatrix, "g kept"], /) -> Float64[Matrix, "g kept"]:
        kept: Matrix = np.take_along_axis(np.asarray(records), slots, axis=1)
        return kept


def h2o() -> Policy:
    """Half of B the newest tokens, half the heaviest, per KV head; decided anew in every decode step.

    This is the official repository's real-drop form; it also holds a simulation by masks that has one slot less, a
    one-pass form that sees future queries, and a FlexGen form. KVCache-Factory decides once, after the prompt.
    kvpress's ObservedAttention averages over the queries that see a key, and has no window. The group sum is chosen
    here: the paper's models have none.
    """
    return Policy(
        "h2o", HeavyHitters(), even, recent_half, SinkAndRecent(0, 0), Cadence(every=1), Granularity.HEAD
    )


def h2o_described(W: int = 128) -> Policy:
    """As CrystalCache describes it (Eq. 5, heavy hitters and a recent window): once, W inside B; W is chosen here.

    Raises:
        SpecError: for a window that is not positive.
    """
    scorer = LayerScorer(Needs("all", None), h2o_score)
    return Policy(
        "h2o-described", scorer, even, top_units, SinkAndRecent(0, check_positive("W", W)),
        granularity=Granularity.HEAD, floor=W,
    )
