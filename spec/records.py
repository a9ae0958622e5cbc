"""What flows between the stages of CrystalCache. Every array is NumPy on the host."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spec.arrays import BoolVector, Float64, Int64, IntMatrix, IntVector, Matrix, Vector
from spec.retention import Retention

__all__ = ["CoAttention", "CrystalRetention", "Dissolution", "Edges", "TrunkGraph", "Trunks"]


class Edges(NamedTuple):
    """Eq. 15's directed triples, as three columns: first endpoint, second endpoint, weight."""

    first: IntVector
    second: IntVector
    weight: Vector


@dataclass(frozen=True)
class CoAttention:
    """S1: what the observed layer's attention says of each token of a segment.

    Row r belongs to the segment's r-th token, at absolute position `start + r`. Neighbours are absolute positions,
    best first, padded with -1; the weight of a padded slot is 0.
    """

    start: int
    salience: Float64[Vector, " n"]
    intra: Int64[IntMatrix, "n k_intra"]
    intra_weight: Float64[Matrix, "n k_intra"]
    cross: Int64[IntMatrix, "n k_cross"]
    cross_weight: Float64[Matrix, "n k_cross"]

    def edges(self) -> Edges:
        """The set E of Eq. 15 in its stated order: intra then cross, each by owner, then by rank.

        Implements: CC-EDGES

        An intra edge is stored (owner, neighbour); a cross edge (source, owner), the earlier token first.
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
    """S2: trunk g holds positions offsets[g] to offsets[g + 1]; `impact` is Eq. 23's constant."""

    offsets: Int64[IntVector, " m_and_one"]
    impact: Float64[Vector, " m"]

    @property
    def sizes(self) -> Int64[IntVector, " m"]:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class TrunkGraph:
    """S4: the symmetric trunk graph in CSR form (columns ascending), its degrees (Eq. 26) and D (Eq. 27)."""

    indptr: Int64[IntVector, " m_and_one"]
    indices: Int64[IntVector, " edges"]
    weights: Float64[Vector, " edges"]
    degree: Float64[Vector, " m"]
    D: Float64[Vector, " m"]


@dataclass(frozen=True)
class Dissolution:
    """S6: the kept positions (ascending), each trunk's ratio r (protected: 1), and D after Eq. 34."""

    kept: Int64[IntVector, " kept"]
    ratio: Float64[Vector, " m"]
    D: Float64[Vector, " m"]


@dataclass(frozen=True)
class CrystalRetention:
    """The result of CrystalCache's prefill, with every record that led to it."""

    retention: Retention
    ratio: Float64[Vector, " m"]
    """r of Eq. 32 per trunk; 1 where protected."""
    scores: Float64[Vector, " m"]
    """Eq. 29 per trunk; NaN where protected: such a trunk is not scored."""
    D: Float64[Vector, " m"]
    """D after Eq. 34."""
    protected: BoolVector
    """Trunks that touch the sink or the recent window, (m,)."""
    budget: int
    """B of Eq. 30, tokens."""
    coattention: CoAttention
    impact: Float64[Vector, " n"]
    """M_i of Eq. 22 per token."""
    trunks: Trunks
    graph: TrunkGraph

    @property
    def kept(self) -> Int64[IntVector, " kept"]:
        """Kept absolute positions, ascending."""
        return self.retention.kept

    @property
    def over_budget(self) -> int:
        """Tokens kept beyond B, because the protected trunks alone exceed it; 0 otherwise."""
        return max(0, len(self.kept) - self.budget)
