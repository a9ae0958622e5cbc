"""Algorithm 2 by brute force: from q, k and token ids to the kept positions."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

from conformance.oracles import s1, s2, s3, s4, s5, s6
from spec.parameters import CrystalCacheParameters


@dataclass(frozen=True)
class Prefill:
    """All records of Algorithm 2."""

    segment: s1.Segment
    impact: list[float]
    trunks: list[s2.Trunk]
    trunk_impact: list[float]
    degree: list[float]
    D: list[float]
    protected: list[bool]
    score: dict[int, float]
    budget: int
    eviction: s6.Eviction


def prefill(
    q: s1.Block, k: s1.Block, ids: Sequence[int], ends: Set[int], share: Fraction | int, p: CrystalCacheParameters,
    scaling: float, softcap: float | None = None, sinks: Sequence[float] | None = None,
) -> Prefill:
    """Run S1, S3, S2, S4, S5 and S6, in this order, and return all records."""
    n = len(ids)
    segment = s1.coattention(q, k, range(n), p, scaling, softcap, sinks)
    E = s1.edges(segment)
    M = s3.impact(segment.salience, ids, p)
    trunks = s2.trunks([token in ends for token in ids], E, p)
    M_bar = s3.unit_trunk_impact([s3.trunk_impact(M, g) for g in trunks], p)
    deg = s4.degree(s4.weight_matrix(E, trunks, p))
    D = s4.crystallization(deg, p)
    is_protected = s6.protected(trunks, n, p.N_sink, p.W_recent)
    alive = [g for g in range(len(trunks)) if not is_protected[g]]
    score = s5.score(D, M_bar, alive, p)
    B = s6.effective_budget(share, n, p.N_sink, p.W_recent)
    eviction = s6.evict(trunks, score, M, D, is_protected, B, p)
    return Prefill(segment, M, trunks, M_bar, deg, D, is_protected, score, B, eviction)
