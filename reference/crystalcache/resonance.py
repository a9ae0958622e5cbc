"""Decode: pulses from active trunks raise D along the trunk graph (Section 3.8(b))."""

import numpy as np

from spec.arrays import Bool, BoolVector, Float64, Vector
from spec.decode import TrunkWeights
from spec.parameters import CrystalCacheParameters

__all__ = ["hop", "pulses", "raised", "resonance"]


def hop(
    frontier: dict[int, float], visited: set[int], W: TrunkWeights, parameters: CrystalCacheParameters,
) -> dict[int, float]:
    """Return the trunks that receive a pulse in the next hop, and the strongest pulse that each trunk receives.

    Source: Eq. 37. Pulses below tau_pulse are not sent. A trunk that has already been visited receives no further
    pulse. The paper does not state what a trunk with several senders receives. In kvspec it is the strongest pulse,
    which does not depend on the order of the trunks.
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
    """Return the pulse that each trunk receives from the active trunk `source`.

    Implements: CC-PULSE

    Source: Section 3.8(b), Eq. 37. The pulse has strength 1 at hop 0, so an active trunk also raises its own D. A trunk
    that no pulse reaches has pulse 0. The search is breadth-first, visits each trunk at most once, and has at most
    max_hops hops.
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
    """Return D after each trunk has received one pulse. A pulse adds alpha_res * pulse * (1 - D). D is at most 1.

    Implements: CC-RAISE

    Source: Eq. 38.
    """
    return np.minimum(1.0, D + alpha_res * pulse * (1.0 - D))


def resonance(
    D: Float64[Vector, " m"], W: TrunkWeights, active: Bool[BoolVector, " m"], parameters: CrystalCacheParameters,
) -> Float64[Vector, " m"]:
    """Return D after the pulses of all active trunks, applied in ascending order of the trunks.

    Implements: CC-RESONANCE

    Source: Section 3.8(b). Each pulse multiplies 1 - D by a factor, so the order of the pulses changes only the
    rounding.
    """
    for source in np.flatnonzero(active).tolist():
        D = raised(D, pulses(source, W, parameters), parameters.alpha_res)
    return D
