"""CrystalCache as a policy: stages S1 to S5 score the trunks, and stage S6 (dissolution) selects the tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from reference.crystalcache.dissolution import dissolved_D
from reference.crystalcache.pipeline import observe
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import Dissolve, touched_units
from spec.arrays import BoolVector, Float64, Vector
from spec.backend import Backend, CrystalStages, resolve
from spec.composition import MODEL_SETS, Provided
from spec.parameters import PAPER, CrystalCacheParameters
from spec.parameters.crystalcache import BreathProtection
from spec.policy import Needs, Observation, Policy, Promises, Scores
from spec.records import CrystalRecords, CrystalRetention
from spec.retention import Retention
from spec.validate import check_sentence_ends, check_token_ids

__all__ = ["BREATH_PROTECTION", "crystal_retention", "crystalcache"]

BREATH_PROTECTION: BreathProtection = "sink+recent"
"""Default of `breath_protection` of the policy by name, and of the class CrystalCache. The paper uses "none"."""


@dataclass(frozen=True)
class CrystalScorer:
    """Scorer that runs CrystalCache's stages S1 to S5 on the observed layer.

    If the backend runs all stages together, and the budget is known, the scorer runs S6 too.
    """

    stages: CrystalStages
    sentence_ends: frozenset[int]
    parameters: CrystalCacheParameters
    needs: Needs
    prefill: Callable[..., CrystalRetention] | None = None
    decided: CrystalRetention | None = None
    """Result of `prefill` for the next prompt, if it is known."""
    provided: ClassVar[Provided] = Provided("trunks", MODEL_SETS)

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        decided = self.decided
        if decided is None and self.prefill is not None and observation.B is not None:
            decided = self.prefill(*self.prompt(observation, protected))
        if decided is not None:
            return _scores_of(CrystalRecords(
                decided.coattention, decided.impact, decided.trunks, decided.graph, decided.scores, decided.protected,
                decided, self.parameters,
            ))
        (view,) = observation.layers.values()
        ids = check_token_ids(observation.token_ids, observation.seen)
        coattention, M, trunks, graph = observe(
            self.stages, view.q, view.k, ids, self.sentence_ends, self.parameters, view.scaling, view.softcap,
            view.lse, view.sinks,
        )
        pinned = touched_units(protected, trunks.offsets)
        scores = self.stages.score(graph.D, trunks.impact, pinned, self.parameters)
        return _scores_of(CrystalRecords(coattention, M, trunks, graph, scores, pinned))

    def prompt(self, observation: Observation, protected: BoolVector) -> tuple[Any, ...]:
        """Return the arguments of `prefill` for a prompt."""
        (view,) = observation.layers.values()
        ids = check_token_ids(observation.token_ids, observation.seen)
        return (
            view.q, view.k, ids, np.isin(ids, sorted(self.sentence_ends)), protected, observation.B, self.parameters,
            view.scaling, view.softcap, view.lse, view.sinks,
        )


def _scores_of(records: CrystalRecords) -> Scores:
    return Scores(records.scores[None], records.trunks.offsets, records.impact[None], records)


@named(
    "crystalcache", "Lin, CrystalCache",
    "trunks (runs of tokens within a sentence) with strong attention links to other trunks, or with rare tokens",
    diverse=False, blocks=False, family="crystal",
)
def crystalcache(
    sentence_ends: frozenset[int], parameters: CrystalCacheParameters = PAPER, backend: str | Backend = "numpy",
) -> Policy:
    """Return CrystalCache's prefill as a policy. The policy keeps the same tokens as `reference.crystalcache.prefill`.

    Raises:
        SpecError: if `sentence_ends` is empty, or if the backend is unknown.
        BackendUnavailable: if the backend cannot run here.
    """
    engine = resolve(backend)
    stages = engine.require_crystal()
    needs = Needs(
        layers="observed", query_rows=None, observed=parameters.observed_layer, token_ids=True,
        accepts_tensor=engine.accepts_tensor,
    )
    return Policy(
        "crystalcache",
        CrystalScorer(stages, check_sentence_ends(sentence_ends), parameters, needs, engine.prefill),
        even,
        Dissolve(stages, parameters),
        SinkAndRecent(parameters.N_sink, parameters.W_recent),
        promises=Promises(protection_holds="yes", no_op_at_full_budget="yes", row_independence="yes"),
    )


def crystal_retention(
    records: CrystalRecords, retention: Retention, ratio: Float64[Vector, " m"], B: int,
) -> CrystalRetention:
    """Return the retention with all records, from the scorer's records and the kept ratio r of each trunk."""
    return CrystalRetention(
        retention.positions, retention.offsets, retention.seen, ratio=ratio, scores=records.scores,
        D=dissolved_D(records.graph.D, ratio), protected=records.protected, budget=B, coattention=records.coattention,
        impact=records.impact, trunks=records.trunks, graph=records.graph,
        inverse_norms=None if records.decided is None else records.decided.inverse_norms,
    )
