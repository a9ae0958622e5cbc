"""Numba as a backend: `backend="numba"`."""

import numpy as np

from accelerated.numba_cpu.coattention import coattention
from accelerated.numba_cpu.crystallization import crystallization
from accelerated.numba_cpu.dissolution import dissolve
from accelerated.numba_cpu.graph import trunk_graph
from accelerated.numba_cpu.impact import impact, trunk_impact
from accelerated.numba_cpu.score import score
from accelerated.numba_cpu.trunks import trunk_offsets
from spec.arrays import BoolVector, IntVector, Vector
from spec.backend import Backend
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks
from spec.validate import check_attention_inputs, check_lse

__all__ = ["BACKEND"]


class _CrystalStages:
    """S1 to S6, each fused as its module says."""

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters,
        scaling: float, softcap: float | None, lse: DeviceArray | None = None, /,
    ) -> CoAttention:
        check_attention_inputs(q, k)
        check_lse(lse, q)
        return coattention(q, k, positions, parameters, scaling, softcap, lse)

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        return impact(salience, token_ids, parameters)

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        offsets = trunk_offsets(coattention, ends, parameters)
        M_bar: Vector = trunk_impact(impact, offsets - coattention.start)
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
        return Dissolution(*dissolve(score, trunks.offsets, impact, D, protected, budget, parameters.N_min))


BACKEND = Backend("numba", crystal=_CrystalStages())
