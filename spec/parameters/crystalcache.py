"""Parameters of CrystalCache, from Table 14 of the paper. The parameters are named after the paper's symbols."""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from spec.errors import SpecError

__all__ = [
    "ESSAY", "PAPER", "TINY", "AllocationForm", "BreathProtection", "CrystalCacheParameters", "GraphForm",
    "HeadsForm", "HebbForm", "ImpactForm", "MergeForm", "RarityForm", "TrunkImpactForm", "preset",
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
# An int parameter plus a number of tokens fits in int64 in every backend.
_LARGEST = 2**31 - 1
_NON_NEGATIVE = ("tau_intra", "tau_cross", "tau_merge", "tau_edge", "M_min", "alpha", "theta_act", "tau_pulse")
_POSITIVE = ("M_max", "s", "epsilon", "D_c")
# A fraction above 1 would let a decayed value grow, or move a value past the target.
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

    The following values give the ablations of Table 10:

    - `impact="uniform"`: M_i = 1.
    - `impact="salience"`: M_i = clip(S_i), without the Von Restorff term.
    - `alpha=0`: the score of a trunk is D alone.
    - `graph="zero"`: the score of a trunk is the impact alone, because D = 0.
    - `T_max=1`: each trunk is a single token.

    The preset `ESSAY` follows the author's essay. Parts that are not in the paper are off by default
    (spec/crystalcache_essay.md).

    Raises:
        SpecError: if a value has the wrong type or is out of range.
    """

    C: int = 1024
    """Number of tokens in a chunk of stage S1."""
    k_heads: int = 3
    """Number of heads whose attention to a token is summed (Eq. 11)."""
    k_intra: int = 8
    """Largest number of neighbours that a token has in the same chunk (Eq. 13)."""
    tau_intra: float = 0.3
    """Two tokens of the same chunk are neighbours if their cosine exceeds this number (Eq. 13)."""
    k_cross: int = 4
    """Largest number of neighbours that a token has in earlier chunks (Eq. 14)."""
    tau_cross: float = 0.02
    """A token of an earlier chunk is a neighbour if the weight, averaged over heads, exceeds this number (Eq. 14)."""
    M_min: float = 0.1
    """Lower bound to which salience and impact are clipped (Equations 11 and 22)."""
    M_max: float = 20.0
    """Upper bound to which salience and impact are clipped (Equations 11 and 22)."""
    tau_merge: float = 0.3
    """Two neighbouring sentences are merged if the mean weight of their common edges exceeds this number (Eq. 19)."""
    T_max: int = 32
    """Largest number of tokens in a trunk (Equation 19 and Step 3)."""
    tau_edge: float = 0.05
    """The trunk graph keeps an edge between two trunks if the weight of the edge exceeds this number (Eq. 25)."""
    s: float = 5.0
    """Steepness of the logistic function that gives D (Eq. 27)."""
    epsilon: float = 1e-8
    """Small positive constant epsilon of Equations 12, 27 and 28."""
    alpha: float = 1.0
    """Factor of the normalised impact in the score of a trunk (Eq. 29). D has the factor 1."""
    N_sink: int = 4
    """Number of tokens at the start of the sequence that are protected (Eq. 30)."""
    W_recent: int = 128
    """Number of tokens at the end of the sequence that are protected (Eq. 30)."""
    N_min: int = 3
    """Smallest number of tokens that a partly evicted trunk keeps (Equations 32 and 33)."""
    impact: ImpactForm = "mixture"
    """Formula of M_i: Eq. 22 (`mixture`), only salience (`salience`), M_i = 1 (`uniform`), or the essay's (`unit`).

    With `unit`, generated tokens have no salience only if M_min is 0, as in ESSAY. Otherwise they have the largest one.
    """
    graph: GraphForm = "degree"
    """Formula of D: `degree` is Equation 27, and `zero` is the ablation D = 0."""
    heads: HeadsForm = "sum"
    """How the attention of the k_heads heads is combined: `sum` as in Equation 11, or `mean` as in the essay."""
    trunk_impact: TrunkImpactForm = "mean"
    """Formula of a trunk's impact: `mean` is Equation 23, and `unit` is the essay's formula with values in [0, 1]."""
    allocation: AllocationForm = "cut"
    """How S6 divides the budget among trunks: `cut` uses Equation 32, and `tiers` the essay's tiers of scores."""
    renewal: float = 0.0
    """Fraction of 1 - D, in [0, 1], that is added to D of an active trunk at a breath. The essay uses 0.3."""
    rarity: RarityForm = "logarithm"
    """Formula of the rarity U_i: Equation 21 (`logarithm`), or one of two variants for the paper's question F5."""
    merge: MergeForm = "fixed"
    """Threshold for merging two sentences: `fixed` is tau_merge, and `median` the median of all strengths (F4)."""
    coverage: float = 0.0
    """Fraction of the unprotected budget, in [0, 1], that is spent on evenly spaced tokens of evicted trunks (F3)."""
    T_breath: int = 64
    """Number of decode steps from one breath (decode-time eviction) to the next breath (Section 3.8)."""
    beta_0: float = 0.05
    """Largest fraction of D that one decode step subtracts from D (Eq. 36)."""
    D_c: float = 2.0
    """Constant D_c in the exponent of the decay, which is -(D times impact / D_c) (Eq. 36)."""
    theta_act: float = 0.3
    """A token is active if the normalised inverse key norm exceeds this number (Section 3.8(a))."""
    max_hops: int = 2
    """Largest number of edges along which a pulse travels (Eq. 37)."""
    gamma_hop: float = 0.5
    """Factor by which a pulse is multiplied at each edge (Eq. 37)."""
    tau_pulse: float = 0.01
    """Smallest pulse that reaches the next trunk (Eq. 37)."""
    alpha_res: float = 0.15
    """Fraction of 1 - D that a pulse of strength 1 adds to D (Eq. 38)."""
    eta_Hebb: float = 0.05
    """Number that a breath adds to the weight of each edge between two active trunks (Eq. 39)."""
    gamma_decay: float = 0.99
    """Factor by which a breath multiplies the weight of each edge that does not join two active trunks (Eq. 40)."""
    hebb: HebbForm = "additive"
    """Update of W at a breath: `additive` is Equations 39 and 40, and `static` is the ablation without an update."""
    breath_protection: BreathProtection = "none"
    """Trunks protected at a breath: `none` in the paper, or `sink+recent` for trunks with a sink or a recent token."""
    observed_layer: int = 0
    """Index of the full-attention layer that S1 observes. 0 is the first layer, as in the paper, and -1 the last."""

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, getattr(self, field.name))
        if self.M_min > self.M_max:
            raise SpecError("M_min", self.M_min, f"must not exceed M_max = {self.M_max}")

    @staticmethod
    def _check(name: str, value: object) -> None:
        if name in _FORMS:
            if not isinstance(value, str) or value not in _FORMS[name]:
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

# Values of the author's essay. M_max = C has no effect: a mean of column sums over C queries is at most C.
ESSAY = replace(
    PAPER, C=128, k_cross=0, s=2.0, M_min=0.0, M_max=128.0, heads="mean", impact="unit", trunk_impact="unit",
    allocation="tiers", renewal=0.3, breath_protection="sink+recent",
)

# Small values for tests: a prompt of a few dozen tokens has several chunks, full trunks and too many protected tokens.
TINY = CrystalCacheParameters(C=8, k_intra=3, k_cross=2, T_max=5, N_sink=2, W_recent=3)


PRESETS = {"paper": PAPER, "essay": ESSAY}
"""Parameters that have a name."""


def preset(given: object) -> CrystalCacheParameters:
    """Return parameters, which are given as such or as a name: "paper" or "essay".

    Raises:
        SpecError: if the name is unknown, or if `given` is neither parameters nor a name.
    """
    if isinstance(given, CrystalCacheParameters):
        return given
    if not isinstance(given, str) or given not in PRESETS:
        raise SpecError("parameters", given, f"must be {' or '.join(map(repr, PRESETS))}, or CrystalCacheParameters")
    return PRESETS[given]
