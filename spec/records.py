"""Records that the stages of CrystalCache return and take as arguments. Every array is a NumPy array on the host."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spec.arrays import BoolVector, Float64, Int64, IntMatrix, IntVector, Matrix, Vector
from spec.retention import Retention

__all__ = ["CoAttention", "CrystalRetention", "Dissolution", "Edges", "TrunkGraph", "Trunks"]


class Edges(NamedTuple):
    """The directed edges of Eq. 15 as three columns: first endpoint, second endpoint, weight."""

    first: IntVector
    second: IntVector
    weight: Vector


@dataclass(frozen=True)
class CoAttention:
    """Result of S1: salience and neighbours of each token of a segment, from the attention of the observed layer.

    Row r belongs to the token at absolute position `start + r`. Neighbours are absolute positions, strongest first.
    Unused entries have position -1 and weight 0.
    """

    start: int
    salience: Float64[Vector, " n"]
    intra: Int64[IntMatrix, "n k_intra"]
    intra_weight: Float64[Matrix, "n k_intra"]
    cross: Int64[IntMatrix, "n k_cross"]
    cross_weight: Float64[Matrix, "n k_cross"]

    def edges(self) -> Edges:
        """Return the edge set E of Eq. 15: intra edges, then cross edges. Each kind is sorted by owner, then by rank.

        Implements: CC-EDGES

        The owner of an edge is the token whose neighbour list contains the edge. An intra edge is (owner, neighbour).
        A cross edge is (source, owner), so the earlier token comes first.
        """
        owner, rank = np.nonzero(self.intra >= 0)
        late, late_rank = np.nonzero(self.cross >= 0)
        return Edges(
            np.concatenate([owner + self.start, self.cross[late, late_rank]]),
            np.concatenate([self.intra[owner, rank], late + self.start]),
            np.concatenate([self.intra_weight[owner, rank], self.cross_weight[late, late_rank]]),
        )


@dataclass(frozen=True)
class Trunks:
    """Result of S2. Trunk g holds the positions offsets[g] to offsets[g + 1] - 1; `impact` is Mbar of Eq. 23."""

    offsets: Int64[IntVector, " m_and_one"]
    impact: Float64[Vector, " m"]

    @property
    def sizes(self) -> Int64[IntVector, " m"]:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TrunkGraph:
    """Result of S4: symmetric trunk graph in CSR form (ascending columns), degrees (Eq. 26) and D (Eq. 27)."""

    indptr: Int64[IntVector, " m_and_one"]
    indices: Int64[IntVector, " edges"]
    weights: Float64[Vector, " edges"]
    degree: Float64[Vector, " m"]
    D: Float64[Vector, " m"]


@dataclass(frozen=True)
class Dissolution:
    """Result of S6: kept positions (ascending), ratio r of each trunk (1 if protected), and D after Eq. 34."""

    kept: Int64[IntVector, " kept"]
    ratio: Float64[Vector, " m"]
    D: Float64[Vector, " m"]


@dataclass(frozen=True)
class CrystalRetention:
    """Result of CrystalCache's prefill: the kept positions and the records of all stages."""

    retention: Retention
    ratio: Float64[Vector, " m"]
    """Kept ratio r of each trunk (Eq. 32); r is 1 for a protected trunk."""
    scores: Float64[Vector, " m"]
    """Score of each trunk (Eq. 29); the score of a protected trunk is NaN."""
    D: Float64[Vector, " m"]
    """D of each trunk after the eviction (Eq. 34)."""
    protected: BoolVector
    """Mask (m,) of the trunks that overlap the attention sinks or the recent window."""
    budget: int
    """Budget B in tokens (Eq. 30)."""
    coattention: CoAttention
    impact: Float64[Vector, " n"]
    """Impact M_i of each token (Eq. 22)."""
    trunks: Trunks
    graph: TrunkGraph

    @property
    def kept(self) -> Int64[IntVector, " kept"]:
        """Return the kept absolute positions, ascending."""
        return self.retention.kept

    @property
    def over_budget(self) -> int:
        """Return the number of kept tokens beyond B. Above 0 only if the protected trunks alone have more than B."""
        return max(0, len(self.kept) - self.budget)
