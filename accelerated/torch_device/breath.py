"""Decay of D at each decode step, and the stages of decoding for NumPy arrays (Section 3.8)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerated.torch_device import impact as s3
from accelerated.torch_device.activation import active_trunks
from accelerated.torch_device.coattention import inverse_key_norms
from accelerated.torch_device.device import on_arrays
from accelerated.torch_device.graph import crystallization
from accelerated.torch_device.hebbian import hebbian
from accelerated.torch_device.records import Neighbours
from accelerated.torch_device.resonance import resonance
from accelerated.torch_device.segments import segment_graph
from spec.arrays import BoolVector, IntVector, Vector
from spec.decode import LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention
from spec.stage_inputs import checked_stages

__all__ = ["BreathStages", "decay"]


def decay(D: Tensor, M_bar: Tensor, parameters: CrystalCacheParameters) -> Tensor:
    """Return D of each trunk after one decode step.

    Implements: CC-DECAY
    """
    return (D - parameters.beta_0 * torch.exp(-(D * M_bar / parameters.D_c)) * D).clamp(min=0.0)


@checked_stages("breath")
class BreathStages:
    """Stages of decoding for NumPy arrays. A stage copies its arguments to the device, and its result to the host."""

    inverse_key_norms = staticmethod(inverse_key_norms)

    def impact(self, salience: Vector, counts: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        return on_arrays(s3.impact, salience, counts, parameters)[0]

    def decay(self, D: Vector, trunk_impact: Vector, parameters: CrystalCacheParameters, /) -> Vector:
        return on_arrays(decay, D, trunk_impact, parameters)[0]

    def activation(self, live: LiveTrunks, parameters: CrystalCacheParameters, /) -> BoolVector:
        return on_arrays(active_trunks, live.inverse_norms, live.offsets, parameters.theta_act)[0]

    def resonance(
        self, D: Vector, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        return on_arrays(resonance, D, *W, np.flatnonzero(active), parameters)[0]

    def hebbian(self, W: TrunkWeights, active: BoolVector, parameters: CrystalCacheParameters, /) -> TrunkWeights:
        return _used(*on_arrays(hebbian, *W, active, parameters))

    def segment_graph(
        self, coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights,
        parameters: CrystalCacheParameters, /,
    ) -> TrunkWeights:
        S1, start = Neighbours.of_host(coattention, 0), coattention.start
        return _used(*on_arrays(segment_graph, S1, start, bounds, sizes, *W, parameters.tau_edge)[:3])

    def segment_crystallization(self, degree: Vector, old: int, parameters: CrystalCacheParameters, /) -> Vector:
        return on_arrays(crystallization, degree, np.array([len(degree)]), parameters)[0][old:]


def _used(*W: Any) -> TrunkWeights:
    """Return the graph without the unused places at the end of its arrays."""
    indptr, indices, weights = W
    return TrunkWeights(indptr, indices[: indptr[-1]], weights[: indptr[-1]])
