"""H2O: half of the budget is for keys with the most attention so far (heavy hitters), half for the newest tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from reference.policies.attention import received_attention
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, Received, Score, check_positive, stacked
from reference.policies.selectors import recent_half, top_tokens
from spec.arrays import BoolVector, Float64, Int64, IntMatrix, Matrix
from spec.backend import Backend, resolve
from spec.composition import Provided
from spec.policy import Cadence, LayerView, Needs, Observation, Policy, Promises, Scores
from spec.retention import Granularity

__all__ = ["HeavyHitters", "h2o", "h2o_described", "h2o_score"]


def h2o_score(view: LayerView, received: Received = received_attention) -> Float64[Matrix, "H_kv n"]:
    """Return the attention that each key of each KV head receives, summed over all queries and query heads.

    Implements: PO-H2O-DESCRIBED

    Source: Section 4 of H2O, and Eq. 5 of CrystalCache.
    """
    return received(view.q, view.k, view.scaling, view.softcap, view.sinks)


@dataclass(frozen=True)
class HeavyHitters:
    """Scorer that sums the attention that each cached token receives. The sum of an evicted token is discarded."""

    needs: Needs = Needs("all", None)
    score: Score = h2o_score
    layerwise: ClassVar[bool] = True
    provided: ClassVar[Provided] = Provided(no_steps="")

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        scores = stacked(observation, [self.score(view) for view in observation.layers.values()])
        return Scores(scores.values, scores.offsets, carry=scores.values, heads=scores.heads)

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Add the attention of the new queries to the sum of each key. The sum of a new key starts at 0.

        Implements: PO-H2O
        """
        new = stacked(observation, [self.score(view) for view in observation.layers.values()])
        old, sums = np.asarray(records), new.values
        sums[:, : old.shape[1]] += old
        return replace(new, values=sums, carry=sums)

    def keep(self, records: object, slots: Int64[IntMatrix, "g kept"], /) -> Float64[Matrix, "g kept"]:
        kept: Matrix = np.take_along_axis(np.asarray(records), slots, axis=1)
        return kept

    def join(self, records: Sequence[Matrix], /) -> Float64[Matrix, "g kept"]:
        return np.concatenate(records)


@named(
    "h2o", "Zhang et al., H2O (arXiv 2306.14048)",
    "tokens with the largest sums of attention for half of the budget, the newest tokens for the second half",
    diverse=False,
)
def h2o(backend: str | Backend = "numpy") -> Policy:
    """Return H2O: at every decode step each KV head keeps the B / 2 newest tokens and the heavy hitters.

    The policy follows the real-drop version of the official repository. The repository has three more versions: a
    simulation by masks with one slot fewer, a one-pass version with future queries, and a version for FlexGen. H2O in
    KVCache-Factory evicts once, after the prompt. ObservedAttention in kvpress averages the attention over the queries
    that attend to a key, and has no window. The paper's models have no grouped-query attention. kvspec sums the
    attention over the query heads of a KV head.

    Raises:
        SpecError: if the backend is unknown.
        BackendUnavailable: if the backend cannot run here, or lacks the stage family `policies`.
    """
    engine = resolve(backend)
    stages = engine.require_policies()
    scorer = HeavyHitters(
        Needs("all", None, accepts_tensor=engine.accepts_tensor), partial(h2o_score, received=stages.received_attention)
    )
    selector = partial(recent_half, choose=stages.best_tokens)
    # The newest half is not a protection, because a protection cannot depend on the budget. The suite does not test it.
    return Policy(
        "h2o", scorer, even, selector, SinkAndRecent(0, 0), Cadence(every=1), Granularity.HEAD,
        promises=Promises("yes", "N/A", "yes", "no", "yes", "yes", "yes"),
    )


@named(
    "h2o-described", "Lin, CrystalCache, Eq. 5", "the last W tokens and the tokens with the largest sums of attention"
)
def h2o_described(W: int = 128, backend: str | Backend = "numpy") -> Policy:
    """Return H2O as described in the CrystalCache paper (Eq. 5): heavy hitters and a recent window of W tokens.

    The policy evicts once, at the end of the prompt. The budget B includes the window. The paper gives no value for W,
    so kvspec chose the default.

    Raises:
        SpecError: if the window is not positive, or if the backend is unknown.
        BackendUnavailable: as in `h2o`.
    """
    engine = resolve(backend)
    stages = engine.require_policies()
    score = partial(h2o_score, received=stages.received_attention)
    return Policy(
        "h2o-described", LayerScorer(Needs("all", None, accepts_tensor=engine.accepts_tensor), score), even,
        partial(top_tokens, choose=stages.best_tokens), SinkAndRecent(0, check_positive("W", W)),
        granularity=Granularity.HEAD,
    )
