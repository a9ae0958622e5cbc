"""Parameters of CrystalCache, from Table 14 of the paper. Names are the symbols of the paper."""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from spec.errors import SpecError

__all__ = [
    "ESSAY", "PAPER", "TINY", "AllocationForm", "BreathProtection", "CrystalCacheParameters", "GraphForm",
    "HeadsForm", "HebbForm", "ImpactForm", "MergeForm", "RarityForm", "TrunkImpactForm",
]

HeadsForm = Literal["sum", "mean"]
ImpactForm = Literal["mixture", "salience", "uniform", "unit"]
RarityForm = Literal["logarithm", "reciprocal", "exponential"]
TrunkImpactForm = Literal["mean", "unit"]
MergeForm = Literal["fixed", "median"]
GraphForm = Literal["degree", "zero"]
AllocationForm = Literal["cut", "tiers"]
HebbForm = Literal["additive", "static"]
BreathProtection = Literal["none", "sink+recent"]

_AT_LEAST_ONE = ("C", "T_max", "T_breath")
_AT_LEAST_ZERO = ("k_intra", "k_cross", "k_heads", "N_sink", "W_recent", "N_min", "max_hops")
# Sums of these with token counts stay inside int64 in every backend.
_LARGEST = 2**31 - 1
_NON_NEGATIVE = ("tau_intra", "tau_cross", "tau_merge", "tau_edge", "M_min", "alpha", "theta_act", "tau_pulse")
_POSITIVE = ("M_max", "s", "epsilon", "D_c")
# Shares: above 1 a decay would grow, or overshoot what it moves towards.
_AT_MOST_ONE = ("beta_0", "gamma_hop", "alpha_res", "eta_Hebb", "gamma_decay", "renewal", "coverage")
_FORMS = {
    "heads": get_args(HeadsForm), "impact": get_args(ImpactForm), "rarity": get_args(RarityForm),
    "trunk_impact": get_args(TrunkImpactForm), "merge": get_args(MergeForm), "graph": get_args(GraphForm),
    "allocation": get_args(AllocationForm), "hebb": get_args(HebbForm),
    "breath_protection": get_args(BreathProtection),
}


@dataclass(frozen=True)
class CrystalCacheParameters:
    """All constants of stages S1 to S6 and of decoding. The defaults are the values of the paper (Table 14).

    These values give the ablations of Table 10: `impact="uniform"` (M_i = 1), `impact="salience"` (no Von
    Restorff: M_i = clip(S_i)), `alpha=0` (D only), `graph="zero"` (M only: D = 0) and `T_max=1` (token level).
    `ESSAY` follows the author's essay. Parts beyond the paper are off by default (spec/crystalcache_essay.md).

    Raises:
        SpecError: if a value has the wrong type or is out of range.
    """

    C: int = 1024
    """Chunk size of S1, tokens."""
    k_heads: int = 3
    """Number of heads whose attention to a token is summed, Eq. 11."""
    k_intra: int = 8
    """Largest number of neighbours of a token inside its chunk, Eq. 13."""
    tau_intra: float = 0.3
    """Cosine that a neighbour inside the chunk must exceed, Eq. 13."""
    k_cross: int = 4
    """Largest number of neighbours of a token in earlier chunks, Eq. 14."""
    tau_cross: float = 0.02
    """Attention weight, averaged over heads, that a neighbour in earlier chunks must exceed, Eq. 14."""
    M_min: float = 0.1
    """Smallest salience and impact after clipping, Eq. 11 and 22."""
    M_max: float = 20.0
    """Largest salience and impact after clipping, Eq. 11 and 22."""
    tau_merge: float = 0.3
    """Mean edge weight between two sentences above which the sentences are merged, Eq. 19."""
    T_max: int = 32
    """Largest number of tokens in a trunk, Eq. 19 and Step 3."""
    tau_edge: float = 0.05
    """Weight that an edge between two trunks must exceed, Eq. 25."""
    s: float = 5.0
    """Steepness of the logistic function, Eq. 27."""
    epsilon: float = 1e-8
    """Small number epsilon of Eq. 12, 27 and 28."""
    alpha: float = 1.0
    """Weight of the impact in the score; D has weight 1, Eq. 29."""
    N_sink: int = 4
    """Number of first tokens that are protected, Eq. 30."""
    W_recent: int = 128
    """Number of last tokens that are protected, Eq. 30."""
    N_min: int = 3
    """Smallest number of tokens that a partly evicted trunk keeps, Eq. 32 and 33."""
    impact: ImpactForm = "mixture"
    """Formula of M_i: Eq. 22, the ablation without rarity, the ablation M_i = 1, or the essay's form on [0, 1]."""
    graph: GraphForm = "degree"
    """Formula of D: Eq. 27, or the ablation D = 0."""
    heads: HeadsForm = "sum"
    """Combination of the attention of the k_heads heads: the sum (Eq. 11), or the mean (the essay)."""
    trunk_impact: TrunkImpactForm = "mean"
    """Formula of a trunk's impact: Eq. 23, or the essay's form, normalised to [0, 1] over the trunks."""
    allocation: AllocationForm = "cut"
    """Formula of stage 1: Eq. 32, or the tiers of the essay."""
    renewal: float = 0.0
    """Fraction of 1 - D that is added to D of an active trunk at a breath, in [0, 1]; 0.3 in the essay."""
    rarity: RarityForm = "logarithm"
    """Formula of the rarity U_i: Eq. 21, or one of two forms of F5."""
    merge: MergeForm = "fixed"
    """Threshold for merging sentences: tau_merge, or the median strength of the segment (F4)."""
    coverage: float = 0.0
    """Fraction of the unprotected budget for evenly spaced tokens of evicted trunks (F3), in [0, 1]."""
    T_breath: int = 64
    """Number of decode steps from one breath (decode-time eviction) to the next, Section 3.8."""
    beta_0: float = 0.05
    """Largest fraction of D that one decode step subtracts, Eq. 36."""
    D_c: float = 2.0
    """Divisor of D times impact in the exponent of Eq. 36."""
    theta_act: float = 0.3
    """Normalised inverse key norm that an active token must exceed, Section 3.8(a)."""
    max_hops: int = 2
    """Largest number of hops of a pulse, Eq. 37."""
    gamma_hop: float = 0.5
    """Factor that multiplies a pulse at each hop, Eq. 37."""
    tau_pulse: float = 0.01
    """Smallest pulse that is passed on, Eq. 37."""
    alpha_res: float = 0.15
    """Fraction of 1 - D that a pulse of 1 adds to D, Eq. 38."""
    eta_Hebb: float = 0.05
    """Weight that an edge between two active trunks gains at a breath, Eq. 39."""
    gamma_decay: float = 0.99
    """Factor that multiplies all other edges at a breath, Eq. 40."""
    hebb: HebbForm = "additive"
    """Update of W at a breath: Eq. 39 and 40, or the ablation without an update."""
    breath_protection: BreathProtection = "none"
    """Protected trunks at a breath: none (the paper), or trunks that touch the sinks or the recent window."""
    observed_layer: int = 0
    """Index of the full-attention layer that S1 observes: 0 is the first (the paper), -1 the last."""

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
        elif name == "observed_layer":
            if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
                raise SpecError(name, value, f"must be an int from {-_LARGEST} to {_LARGEST}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise SpecError(name, value, "must be a finite number")
        elif name in _NON_NEGATIVE and value < 0:
            raise SpecError(name, value, "must not be negative")
        elif name in _POSITIVE and value <= 0:
            raise SpecError(name, value, "must be positive")
        elif name in _AT_MOST_ONE and not 0 <= value <= 1:
            raise SpecError(name, value, "must lie in [0, 1]")


PAPER = CrystalCacheParameters()

# The author's essay. Its salience has no clip: a mean of column sums over C queries lies in [0, C].
ESSAY = replace(
    PAPER, C=128, k_cross=0, s=2.0, M_min=0.0, M_max=128.0, heads="mean", impact="unit", trunk_impact="unit",
    allocation="tiers", renewal=0.3, breath_protection="sink+recent",
)

# Small enough that a few dozen tokens cross chunks, fill trunks and overflow the protected set.
TINY = CrystalCacheParameters(C=8, k_intra=3, k_cross=2, T_max=5, N_sink=2, W_recent=3)
