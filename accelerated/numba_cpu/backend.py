"""The backend `numba`."""

import numpy as np

from accelerated.numba_cpu.activation import active_trunks, inverse_key_norms
from accelerated.numba_cpu.adaptive import adapted
from accelerated.numba_cpu.arguments import contiguous_arguments
from accelerated.numba_cpu.attention import largest_attention, received_attention
from accelerated.numba_cpu.breath import decay
from accelerated.numba_cpu.coattention import coattention
from accelerated.numba_cpu.coverage import backfill, coverage_reserve
from accelerated.numba_cpu.crystallization import crystallization
from accelerated.numba_cpu.dissolution import dissolve
from accelerated.numba_cpu.diversity import diverse
from accelerated.numba_cpu.expected_attention import expected_attention
from accelerated.numba_cpu.graph import trunk_graph
from accelerated.numba_cpu.hebbian import hebbian
from accelerated.numba_cpu.impact import impact, impact_of_counts, trunk_impact, unit_trunk_impact
from accelerated.numba_cpu.nestedkv import anomaly_score
from accelerated.numba_cpu.resonance import resonance
from accelerated.numba_cpu.rkv import SCORES
from accelerated.numba_cpu.score import score
from accelerated.numba_cpu.segments import segment_crystallization, segment_graph
from accelerated.numba_cpu.selectors import best_tokens
from accelerated.numba_cpu.tiers import dissolve_in_tiers
from accelerated.numba_cpu.trunks import trunk_offsets
from spec.arrays import BoolVector, IntVector, Matrix, Vector
from spec.backend import Backend
from spec.decode import LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters, NestedKVParameters
from spec.policy import DeviceArray
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks
from spec.stage_inputs import checked_stages
from spec.validate import check_attention_inputs, check_diversity, check_keys, check_lse, check_positions, check_sinks

__all__ = ["BACKEND"]

_DISSOLVE = {"cut": dissolve, "tiers": dissolve_in_tiers}


@checked_stages("crystal")
@contiguous_arguments
class _CrystalStages:
    """Stages S1 to S6. The docstring of each stage's module describes the fused loops."""

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters,
        scaling: float, softcap: float | None, lse: DeviceArray | None = None, sinks: DeviceArray | None = None, /,
    ) -> CoAttention:
        check_attention_inputs(q, k)
        check_positions(positions, k.shape[1])
        check_lse(lse, q)
        check_sinks(sinks, q)
        return coattention(q, k, positions, parameters, scaling, softcap, lse, sinks)

    impact = staticmethod(impact)

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        offsets = trunk_offsets(coattention, ends, adapted(coattention, ends, parameters))
        M_bar: Vector = trunk_impact(impact, offsets - coattention.start)
        if parameters.trunk_impact == "unit":
            M_bar = unit_trunk_impact(M_bar, float(parameters.epsilon))
        return Trunks(offsets, M_bar)

    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        indptr, indices, weights, degree = trunk_graph(coattention, trunks.offsets, float(parameters.tau_edge))
        if parameters.graph == "zero":
            return TrunkGraph(indptr, indices, weights, degree, np.zeros_like(degree))
        D: Vector = crystallization(degree, float(parameters.s), float(parameters.epsilon))
        return TrunkGraph(indptr, indices, weights, degree, D)

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        best: Vector = score(D, impact, protected, float(parameters.alpha), float(parameters.epsilon))
        return best

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        reserve = coverage_reserve(trunks.offsets, protected, budget, parameters.coverage)
        run = _DISSOLVE[parameters.allocation]
        kept, r, D_after = run(score, trunks.offsets, impact, D, protected, budget - reserve, parameters.N_min)
        if reserve:
            kept, r, D_after = backfill(kept, r, trunks.offsets, D, reserve)
        return Dissolution(kept, r, D_after)


@checked_stages("breath")
@contiguous_arguments
class _BreathStages:
    """Stages of decoding. The docstring of each stage's module describes the fused loops."""

    def inverse_key_norms(self, k: DeviceArray, /) -> Vector:
        check_keys(k)
        return inverse_key_norms(k)

    impact = staticmethod(impact_of_counts)
    segment_crystallization = staticmethod(segment_crystallization)

    def decay(self, D: Vector, trunk_impact: Vector, parameters: CrystalCacheParameters, /) -> Vector:
        after: Vector = decay(D, trunk_impact, float(parameters.beta_0), float(parameters.D_c))
        return after

    def activation(self, live: LiveTrunks, parameters: CrystalCacheParameters, /) -> BoolVector:
        return active_trunks(live, float(parameters.theta_act))

    def resonance(
        self, D: Vector, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        p = parameters
        after: Vector = resonance(
            D, *W, active, p.max_hops, float(p.gamma_hop), float(p.tau_pulse), float(p.alpha_res)
        )
        return after

    def hebbian(self, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /) -> TrunkWeights:
        p = parameters
        if p.hebb == "static":
            return TrunkWeights(W.indptr.copy(), W.indices.copy(), W.weights.copy())
        return TrunkWeights(*hebbian(*W, active, float(p.eta_Hebb), float(p.gamma_decay), float(p.tau_edge)))

    def segment_graph(
        self, coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights,
        parameters: CrystalCacheParameters, /,
    ) -> TrunkWeights:
        return segment_graph(coattention, bounds, sizes, W, float(parameters.tau_edge))


@contiguous_arguments
class _DiversityStages:
    """Set-conditioned selection by a lazy greedy search."""

    def diverse(self, s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float, /) -> IntVector:
        check_diversity(s, V, retained, k, lam)
        return diverse(s, V, retained, k, float(lam))


@contiguous_arguments
class _NestedKVStages:
    """NestedKV's score in one fused pass."""

    def anomaly_score(self, k: DeviceArray, parameters: NestedKVParameters, /) -> Matrix:
        check_keys(k)
        return anomaly_score(k, parameters)


@checked_stages("policies")
@contiguous_arguments
class _PolicyStages:
    """The slow parts of the published policies."""

    received_attention = staticmethod(received_attention)
    largest_attention = staticmethod(largest_attention)
    expected_attention = staticmethod(expected_attention)
    best_tokens = staticmethod(best_tokens)


BACKEND = Backend(
    "numba", crystal=_CrystalStages(), breath=_BreathStages(), diversity=_DiversityStages(),
    nestedkv=_NestedKVStages(), policies=_PolicyStages(), scores=SCORES,
)
