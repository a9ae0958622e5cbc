"""Records that the stages of CrystalCache take and return. Every array in a record is a NumPy array on the host."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spec.arrays import BoolVector, Float64, Int64, IntMatrix, IntVector, Matrix, Vector
from spec.parameters import CrystalCacheParameters
from spec.retention import Retention

__all__ = ["CoAttention", "CrystalRecords", "CrystalRetention", "Dissolution", "Edges", "TrunkGraph", "Trunks"]


class Edges(NamedTuple):
    """Directed edges between tokens as three columns: first endpoint, second endpoint, weight (Eq. 15)."""

    first: IntVector
    second: IntVector
    weight: Vector


@dataclass(frozen=True)
class CoAttention:
    """Result of stage S1: salience and neighbours of each token of a segment.

    Salience and neighbours are computed from the attention of the observed layer. Row r of each array belongs to the
    token at absolute position `start + r`. Neighbours are given as absolute positions, the strongest neighbour first.
    Unused entries of a list of neighbours have position -1 and weight 0.
    """

    start: int
    salience: Float64[Vector, " n"]
    intra: Int64[IntMatrix, "n k_intra"]
    intra_weight: Float64[Matrix, "n k_intra"]
    cross: Int64[IntMatrix, "n k_cross"]
    cross_weight: Float64[Matrix, "n k_cross"]

    def edges(self) -> Edges:
        """Return the edge set E (Eq. 15): first edges inside chunks (intra), then edges to earlier chunks (cross).

        Implements: CC-EDGES

        The owner of an edge is the token whose list of neighbours contains the edge. Both kinds of edges are sorted by
        owner, then by rank in the list. An intra edge is stored as (owner, neighbour). A cross edge is stored as
        (neighbour, owner), because the neighbour is the earlier token.
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
    """Result of stage S2: the trunks and the impact Mbar of each trunk (Eq. 23).

    Trunk g contains the positions offsets[g] to offsets[g + 1] - 1.
    """

    offsets: Int64[IntVector, " m_and_one"]
    impact: Float64[Vector, " m"]

    @property
    def sizes(self) -> Int64[IntVector, " m"]:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TrunkGraph:
    """Result of stage S4: the symmetric trunk graph in CSR form, and degree and D of each trunk (Equations 26 and 27).

    Columns ascend in each row of the CSR matrix.
    """

    indptr: Int64[IntVector, " m_and_one"]
    indices: Int64[IntVector, " edges"]
    weights: Float64[Vector, " edges"]
    degree: Float64[Vector, " m"]
    D: Float64[Vector, " m"]


@dataclass(frozen=True)
class Dissolution:
    """Result of stage S6: kept positions (ascending), and for each trunk the kept ratio r and the new D (Eq. 34).

    The ratio of a protected trunk is 1.
    """

    kept: Int64[IntVector, " kept"]
    ratio: Float64[Vector, " m"]
    D: Float64[Vector, " m"]


@dataclass(frozen=True, kw_only=True)
class CrystalRetention(Retention):
    """Retention of CrystalCache after a prompt, with the records of all stages."""

    ratio: Float64[Vector, " m"]
    """Fraction r of each trunk's tokens that is kept (Eq. 32). The fraction of a protected trunk is 1."""
    scores: Float64[Vector, " m"]
    """Score of each trunk (Eq. 29). The score of a protected trunk is NaN."""
    D: Float64[Vector, " m"]
    """Crystallization D of each trunk after the eviction (Eq. 34)."""
    protected: BoolVector
    """Mask (m,) that is True for each trunk that overlaps the attention sinks or the recent window."""
    budget: int
    """Budget B in tokens (Eq. 30)."""
    coattention: CoAttention
    impact: Float64[Vector, " n"]
    """Impact M_i of each token (Eq. 22)."""
    trunks: Trunks
    graph: TrunkGraph
    inverse_norms: Float64[Vector, " n"] | None = None
    """Mean of 1 / ||k|| over the KV heads for each token, or None if the backend has not computed the means."""

    @property
    def over_budget(self) -> int:
        """Return the number of kept tokens above the budget B.

        The result is 0 unless the protected trunks alone contain more than B tokens.
        """
        return max(0, len(self.kept) - self.budget)


@dataclass(frozen=True)
class CrystalRecords:
    """Results of stages S1 to S5, from which a `CrystalRetention` is built after S6."""

    coattention: CoAttention
    impact: Float64[Vector, " n"]
    trunks: Trunks
    graph: TrunkGraph
    scores: Float64[Vector, " m"]
    protected: BoolVector
    decided: CrystalRetention | None = None
    """Result of S1 to S6 with these records, if the backend has already run S6."""
    parameters: CrystalCacheParameters | None = None
    """Parameters of `decided`."""
