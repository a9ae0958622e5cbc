"""The backend `triton`."""

from dataclasses import replace

import numpy as np

from accelerated.numba_cpu.adaptive import adapted
from accelerated.numba_cpu.backend import BACKEND as NUMBA
from accelerated.numba_cpu.impact import unit_trunk_impact
from accelerated.torch_device.backend import BACKEND as TORCH
from accelerated.torch_device.backend import with_host
from accelerated.triton_gpu.activation import inverse_key_norms
from accelerated.triton_gpu.coattention import coattention
from accelerated.triton_gpu.crystallization import crystallization
from accelerated.triton_gpu.device import require_device, takes
from accelerated.triton_gpu.dissolution import dissolve
from accelerated.triton_gpu.graph import trunk_graph
from accelerated.triton_gpu.impact import impact, trunk_impact
from accelerated.triton_gpu.nestedkv import anomaly_score
from accelerated.triton_gpu.score import score
from accelerated.triton_gpu.trunks import trunk_offsets
from spec.arrays import BoolVector, IntVector, Vector
from spec.backend import Backend
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks

__all__ = ["BACKEND", "ON_DEVICE"]

require_device()


class _OnDevice:
    """S1 to S6 as Triton kernels. The essay's formulas and the extensions beyond the paper run on the host."""

    coattention = staticmethod(coattention)

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """Implements: CC-RARITY-FORMS, CC-UNIT-IMPACT

        The host's function computes both items.
        """
        if parameters.impact == "unit" or parameters.rarity != "logarithm":
            return NUMBA.require_crystal().impact(salience, token_ids, parameters)
        return impact(salience, token_ids, parameters)

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters,
        /,
    ) -> Trunks:
        """Implements: CC-ADAPTIVE-MERGE, CC-UNIT-TRUNK-IMPACT

        The host's functions compute both items.
        """
        offsets = trunk_offsets(coattention, ends, adapted(coattention, ends, parameters))
        M_bar = trunk_impact(impact, offsets - coattention.start)
        unit = parameters.trunk_impact == "unit"
        return Trunks(offsets, unit_trunk_impact(M_bar, float(parameters.epsilon)) if unit else M_bar)

    def graph(
        self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /,
    ) -> TrunkGraph:
        indptr, indices, weights, degree = trunk_graph(coattention, trunks.offsets, parameters.tau_edge)
        if parameters.graph == "zero":
            return TrunkGraph(indptr, indices, weights, degree, np.zeros_like(degree))
        D = crystallization(degree, parameters.s, parameters.epsilon)
        return TrunkGraph(indptr, indices, weights, degree, D)

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        return score(D, impact, protected, parameters.alpha, parameters.epsilon)

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        """Implements: CC-TIER-COUNT, CC-TIERS, CC-COVERAGE

        The host's functions compute all three items.
        """
        if parameters.allocation == "tiers" or parameters.coverage:
            host = NUMBA.require_crystal()
            return host.dissolve(score, trunks, impact, D, protected, budget, parameters)
        return Dissolution(*dissolve(score, trunks.offsets, impact, D, protected, budget, parameters.N_min))


class _NestedKVOnDevice:
    """NestedKV's score, computed fully on the device."""

    anomaly_score = staticmethod(anomaly_score)


# S2 to S6 and decode are on the host: there the data is small and the scans are sequential. Both routes are measured by
# `python -m conformance.measure.gpu`, which says which one is the faster.
# Set-conditioned selection is on the host: each pick depends on all before it, so that a device would wait for a launch
# and a reduction over all tokens k times, where lazy greedy looks at a few tokens a pick. What it reads is the
# signatures, one vector a token for the whole cache, and scorers give their scores on the host anyway.
BACKEND = Backend(
    "triton", crystal=with_host(NUMBA.require_crystal(), coattention=coattention),
    breath=with_host(NUMBA.require_breath(), inverse_key_norms=inverse_key_norms), diversity=NUMBA.diversity,
    nestedkv=_NestedKVOnDevice(), policies=TORCH.policies, takes=takes, scores=TORCH.scores,
)
ON_DEVICE = replace(BACKEND, name="triton-on-device", crystal=_OnDevice())
