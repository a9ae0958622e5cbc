"""The reference implementation as the backend `numpy`."""

import numpy as np

from reference.crystalcache import coattention as s1
from reference.crystalcache import graph as s4
from reference.crystalcache import impact as s3
from reference.crystalcache import score as s5
from reference.crystalcache.activation import active_trunks, inverse_key_norms
from reference.crystalcache.breath import decay
from reference.crystalcache.coverage import backfill, coverage_reserve
from reference.crystalcache.crystallization import crystallization
from reference.crystalcache.dissolution import dissolve
from reference.crystalcache.hebbian import hebbian, static_graph
from reference.crystalcache.resonance import resonance
from reference.crystalcache.segments import segment_crystallization, segment_graph
from reference.crystalcache.tiers import dissolve_in_tiers
from reference.crystalcache.trunks import trunk_offsets
from reference.diversity import diverse
from reference.nestedkv import anomaly_score
from reference.policies.attention import largest_attention, received_attention, wide_sinks
from reference.policies.expected_attention import expected_weights
from reference.policies.selectors import best_tokens
from spec.arrays import BoolMatrix, BoolVector, IntVector, Matrix, Vector
from spec.backend import Backend
from spec.decode import LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters, NestedKVParameters
from spec.policy import DeviceArray, Selection
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks
from spec.stage_inputs import checked_stages
from spec.validate import check_attention_inputs, check_keys, check_lse, check_positions, check_sinks

__all__ = ["BACKEND"]

_RARITY = {"logarithm": s3.rarity, "reciprocal": s3.reciprocal_rarity, "exponential": s3.exponential_rarity}
_IMPACT = {
    "mixture": s3.impact, "salience": s3.impact_without_rarity, "uniform": s3.uniform_impact, "unit": s3.unit_impact,
}
_DISSOLVE = {"cut": dissolve, "tiers": dissolve_in_tiers}
_HEBB = {"additive": hebbian, "static": static_graph}


@checked_stages("crystal")
class _CrystalStages:
    """Stages S1 to S6 of CrystalCache. Each member calls the functions that implement the items of one stage."""

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters,
        scaling: float, softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None, /,
    ) -> CoAttention:
        """Compute S1 as defined. The softmax sums are computed from the keys. A given lse is checked but not used."""
        check_attention_inputs(q, k)
        check_positions(positions, k.shape[1])
        check_lse(lse, q)
        check_sinks(sinks, q)
        return s1.coattention(q, k, positions, parameters, scaling, softcap, wide_sinks(sinks))

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        U = _RARITY[parameters.rarity](s3.token_counts(token_ids))
        return _IMPACT[parameters.impact](salience, U, parameters)

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        offsets = trunk_offsets(ends, coattention.edges(), coattention.start, parameters)
        M_bar = s3.trunk_impact(impact, offsets - coattention.start)
        unit = parameters.trunk_impact == "unit"
        return Trunks(offsets, s3.unit_trunk_impact(M_bar, parameters.epsilon) if unit else M_bar)

    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        pairs = s4.trunk_pairs(coattention.edges(), trunks.offsets)
        W, kept = s4.trunk_weights(pairs, trunks.sizes, parameters.tau_edge)
        indptr, indices, weights = s4.symmetric_csr(pairs.a[kept], pairs.b[kept], W, len(trunks.sizes))
        degree = s4.degree(indptr, weights)
        D = crystallization(degree, parameters.s, parameters.epsilon)
        return TrunkGraph(indptr, indices, weights, degree, D if parameters.graph == "degree" else np.zeros_like(D))

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        return s5.score(D, s5.normalised_impact(impact, protected, parameters.epsilon), parameters.alpha)

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        reserve = coverage_reserve(trunks.sizes, protected, budget, parameters.coverage)
        run = _DISSOLVE[parameters.allocation]
        dissolution = run(score, trunks.offsets, impact, D, protected, budget - reserve, parameters.N_min)
        return backfill(dissolution, trunks.offsets, D, reserve)


@checked_stages("breath")
class _BreathStages:
    """Decode stages of CrystalCache. Each member calls the functions that implement the items of one stage."""

    def inverse_key_norms(self, k: DeviceArray, /) -> Vector:
        check_keys(k)
        return inverse_key_norms(k)

    def impact(self, salience: Vector, counts: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        return _IMPACT[parameters.impact](salience, _RARITY[parameters.rarity](counts), parameters)

    def decay(self, D: Vector, trunk_impact: Vector, parameters: CrystalCacheParameters, /) -> Vector:
        return decay(D, trunk_impact, parameters)

    def activation(self, live: LiveTrunks, parameters: CrystalCacheParameters, /) -> BoolVector:
        return active_trunks(live, parameters.theta_act)

    def resonance(
        self, D: Vector, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        return resonance(D, W, active, parameters)

    def hebbian(self, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /) -> TrunkWeights:
        return _HEBB[parameters.hebb](W, active, parameters)

    def segment_graph(
        self, coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights,
        parameters: CrystalCacheParameters, /,
    ) -> TrunkWeights:
        return segment_graph(coattention.edges(), bounds, sizes, W, parameters.tau_edge)

    def segment_crystallization(self, degree: Vector, old: int, parameters: CrystalCacheParameters, /) -> Vector:
        return segment_crystallization(degree, old, parameters)


class _DiversityStages:
    """Algorithm 1 of Set-Conditioned Diversity, computed by its definition."""

    def diverse(self, s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float, /) -> IntVector:
        return diverse(s, V, retained, k, lam)


class _NestedKVStages:
    """NestedKV's score, computed by the functions that implement the items of the specification."""

    def anomaly_score(self, k: DeviceArray, parameters: NestedKVParameters, /) -> Matrix:
        check_keys(k)
        return anomaly_score(k, parameters)


@checked_stages("policies")
class _PolicyStages:
    """Parts of the published policies, computed by their definitions."""

    def received_attention(
        self, q: DeviceArray, k: DeviceArray, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        return received_attention(q, k, scaling, softcap, sinks)

    def largest_attention(
        self, q: DeviceArray, k: DeviceArray, norms: Vector, scaling: float, softcap: float | None,
        sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        return largest_attention(q, k, norms, scaling, softcap, sinks)

    def expected_attention(
        self, q: DeviceArray, k: DeviceArray, v: DeviceArray, at: IntVector, ahead: IntVector, inv_freq: Vector,
        factor: float, scaling: float, sinks: DeviceArray | None = None, /,
    ) -> Matrix:
        return expected_weights(q, k, v, at, ahead, inv_freq, factor, scaling, sinks)

    def best_tokens(self, values: Matrix, shares: IntVector, pinned: BoolMatrix, /) -> Selection:
        return best_tokens(values, shares, pinned)


BACKEND = Backend(
    "numpy", crystal=_CrystalStages(), breath=_BreathStages(), diversity=_DiversityStages(),
    nestedkv=_NestedKVStages(), policies=_PolicyStages(),
)
