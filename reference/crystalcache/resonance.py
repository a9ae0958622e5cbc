"""Decode: pulses from active trunks raise D along the trunk graph (Section 3.8(b))."""

import numpy as np

from spec.arrays import Bool, BoolVector, Float64, Vector
from spec.decode import TrunkWeights
from spec.parameters import CrystalCacheParameters

__all__ = ["hop", "pulses", "raised", "resonance"]


def hop(
    frontier: dict[int, float], visited: set[int], W: TrunkWeights, parameters: CrystalCacheParameters,
) -> dict[int, float]:
    """Return the trunks that the next hop reaches, each with its strongest pulse.

    Source: Eq. 37. Pulses below tau_pulse stop. Trunks that were visited before are not reached again.
    """
    reached: dict[int, float] = {}
    for g, pulse in frontier.items():
        row = slice(int(W.indptr[g]), int(W.indptr[g + 1]))
        for h, weight in zip(W.indices[row].tolist(), W.weights[row].tolist(), strict=True):
            sent = pulse * weight * parameters.gamma_hop
            if h not in visited and sent >= parameters.tau_pulse:
                reached[h] = max(sent, reached.get(h, 0.0))
    return reached


def pulses(source: int, W: TrunkWeights, parameters: CrystalCacheParameters) -> Float64[Vector, " m"]:
    """Return the pulse that each trunk receives from the active trunk `source`: 1 for the source, 0 if none arrives.

    Implements: CC-PULSE

    Source: Eq. 37. The search is breadth first with a visited set, and has at most max_hops hops.
    """
    received = np.zeros(len(W.indptr) - 1)
    received[source] = 1.0
    frontier, visited = {source: 1.0}, {source}
    for _ in range(parameters.max_hops):
        frontier = hop(frontier, visited, W, parameters)
        visited.update(frontier)
        for h, pulse in frontier.items():
            received[h] = pulse
    return received


def raised(
    D: Float64[Vector, " m"], pulse: Float64[Vector, " m"], alpha_res: float,
) -> Float64[Vector, " m"]:
    """Return D after one pulse per trunk. A trunk regains the share alpha_res * pulse of 1 - D.

    Implements: CC-RAISE

    Source: Eq. 38.
    """
    return np.minimum(1.0, D + alpha_res * pulse * (1.0 - D))


def resonance(
    D: Float64[Vector, " m"], W: TrunkWeights, active: Bool[BoolVector, " m"], parameters: CrystalCacheParameters,
) -> Float64[Vector, " m"]:
    """Return D after every active trunk, in ascending order, has sent its pulse.

    Implements: CC-RESONANCE

    Source: Section 3.8(b). Each pulse multiplies 1 - D by a factor, so the order changes only the rounding.
    """
    for source in np.flatnonzero(active).tolist():
        D = raised(D, pulses(source, W, parameters), parameters.alpha_res)
    return D
