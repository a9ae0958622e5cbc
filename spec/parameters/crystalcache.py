"""Parameters of CrystalCache: Table 14 of the paper, under the paper's symbols."""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from spec.errors import SpecError

__all__ = [
    "ESSAY", "PAPER", "TINY", "AllocationForm", "CrystalCacheParameters", "GraphForm", "HeadsForm", "ImpactForm",
    "MergeForm", "RarityForm", "TrunkImpactForm",
]

HeadsForm = Literal["sum", "mean"]
ImpactForm = Literal["mixture", "salience", "uniform", "unit"]
RarityForm = Literal["logarithm", "reciprocal", "exponential"]
TrunkImpactForm = Literal["mean", "unit"]
MergeForm = Literal["fixed", "median"]
GraphForm = Literal["degree", "zero"]
AllocationForm = Literal["cut", "tiers"]

_AT_LEAST_ONE = ("C", "T_max")
_AT_LEAST_ZERO = ("k_intra", "k_cross", "k_heads", "N_sink", "W_recent", "N_min")
# Sums of these with token counts stay inside int64 in every backend.
_LARGEST = 2**31 - 1
_NON_NEGATIVE = ("tau_intra", "tau_cross", "tau_merge", "tau_edge", "M_min", "alpha")
_POSITIVE = ("M_max", "s", "epsilon")
_SHARES = ("coverage", "renewal")
_FORMS = {
    "heads": get_args(HeadsForm), "impact": get_args(ImpactForm), "rarity": get_args(RarityForm),
    "trunk_impact": get_args(TrunkImpactForm), "merge": get_args(MergeForm), "graph": get_args(GraphForm),
    "allocation": get_args(AllocationForm),
}


@dataclass(frozen=True)
class CrystalCacheParameters:
    """Every constant of S1 to S6. Defaults are the paper's (Table 14).

    Table 10's ablations are values of these parameters: `impact="uniform"` (M_i = 1), `impact="salience"` (no Von
    Restorff: M_i = clip(S_i)), `alpha=0` (D only), `graph="zero"` (M only: D = 0) and `T_max=1` (token level).
    `ESSAY` holds the author's essay; what goes beyond the paper is off by default (spec/crystalcache-essay.md).

    Raises:
        SpecError: when a value is of the wrong kind or out of its range.
    """

    C: int = 1024
    """Chunk size of S1, tokens."""
    k_heads: int = 3
    """Heads summed per token in Eq. 11."""
    k_intra: int = 8
    """Neighbours kept per token inside a chunk, Eq. 13."""
    tau_intra: float = 0.3
    """Strict lower bound on a cosine, Eq. 13."""
    k_cross: int = 4
    """Sources kept per token in earlier chunks, Eq. 14."""
    tau_cross: float = 0.02
    """Strict lower bound on a head-mean attention weight, Eq. 14."""
    M_min: float = 0.1
    """Lower clip of salience and impact, Eq. 11 and 22."""
    M_max: float = 20.0
    """Upper clip of salience and impact, Eq. 11 and 22."""
    tau_merge: float = 0.3
    """Strict lower bound on the interface strength, Eq. 19."""
    T_max: int = 32
    """Largest trunk, tokens, Eq. 19 and Step 3."""
    tau_edge: float = 0.05
    """Strict lower bound on a trunk edge, Eq. 25."""
    s: float = 5.0
    """Steepness of the logistic, Eq. 27."""
    epsilon: float = 1e-8
    """The one epsilon of Eq. 12, 27 and 28."""
    alpha: float = 1.0
    """Weight of the impact path, Eq. 29."""
    N_sink: int = 4
    """First tokens that are protected, Eq. 30."""
    W_recent: int = 128
    """Last tokens that are protected, Eq. 30."""
    N_min: int = 3
    """Fewest tokens that a partly dissolved trunk keeps, Eq. 32 and 33."""
    impact: ImpactForm = "mixture"
    """Which M_i: Eq. 22, its ablation without rarity, M_i = 1, or the essay's on [0, 1]."""
    graph: GraphForm = "degree"
    """Which D: Eq. 27, or the ablation D = 0."""
    heads: HeadsForm = "sum"
    """What becomes of a token's top heads: their sum (Eq. 11), or the essay's mean."""
    trunk_impact: TrunkImpactForm = "mean"
    """Eq. 23 as it is, or normalised to [0, 1] over the trunks as in the essay."""
    allocation: AllocationForm = "cut"
    """Stage 1: Eq. 32, or the essay's tiers."""
    renewal: float = 0.0
    """Share of 1 - D that an active trunk regains at a breath, in [0, 1]; the essay's 0.3."""
    rarity: RarityForm = "logarithm"
    """Which U_i: Eq. 21, or one of the two other forms of the paper's F5."""
    merge: MergeForm = "fixed"
    """What an interface must exceed: tau_merge, or the segment's median strength (F4)."""
    coverage: float = 0.0
    """Share of the unprotected budget for evenly spaced tokens of evicted trunks (F3), in [0, 1]."""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name))
        if self.M_min > self.M_max:
            raise SpecError("M_min", self.M_min, f"must not exceed M_max = {self.M_max}")

    @staticmethod
    def _check(name: str, value: object) -> None:
        if name in _FORMS:
            if value not in _FORMS[name]:
                raise SpecError(name, value, f"must be one of {', '.join(_FORMS[name])}")
        elif name in _AT_LEAST_ONE or name in _AT_LEAST_ZERO:
            low = int(name in _AT_LEAST_ONE)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _LARGEST:
                raise SpecError(name, value, f"must be an int from {low} to {_LARGEST}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise SpecError(name, value, "must be a finite number")
        elif name in _SHARES and not 0 <= value <= 1:
            raise SpecError(name, value, "must lie in [0, 1]")
        elif name in _NON_NEGATIVE and value < 0:
            raise SpecError(name, value, "must not be negative")
        elif name in _POSITIVE and value <= 0:
            raise SpecError(name, value, "must be positive")


PAPER = CrystalCacheParameters()

# The author's essay. Its salience has no clip: a mean of column sums over C queries lies in [0, C].
ESSAY = replace(
    PAPER, C=128, k_cross=0, s=2.0, M_min=0.0, M_max=128.0, heads="mean", impact="unit", trunk_impact="unit",
    allocation="tiers", renewal=0.3,
)

# Small enough that a few dozen tokens cross chunks, fill trunks and overflow the protected set.
TINY = CrystalCacheParameters(C=8, k_intra=3, k_cross=2, T_max=5, N_sink=2, W_recent=3)
