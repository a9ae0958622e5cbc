"""Parameters of CrystalCache: Table 14 of the paper, under the paper's symbols."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from spec.errors import SpecError

__all__ = ["PAPER", "TINY", "CrystalCacheParameters", "GraphForm", "ImpactForm"]

ImpactForm = Literal["mixture", "salience", "uniform"]
GraphForm = Literal["degree", "zero"]

_AT_LEAST_ONE = ("C", "T_max")
_AT_LEAST_ZERO = ("k_intra", "k_cross", "k_heads", "N_sink", "W_recent", "N_min")
# Sums of these with token counts stay inside int64 in every backend.
_LARGEST = 2**31 - 1
_NON_NEGATIVE = ("tau_intra", "tau_cross", "tau_merge", "tau_edge", "M_min", "alpha")
_POSITIVE = ("M_max", "s", "epsilon")
_FORMS = {"impact": ("mixture", "salience", "uniform"), "graph": ("degree", "zero")}


@dataclass(frozen=True)
class CrystalCacheParameters:
    """Every constant of S1 to S6. Defaults are the paper's (Table 14).

    Table 10's ablations are values of these parameters: `impact="uniform"` (M_i = 1), `impact="salience"` (no Von
    Restorff: M_i = clip(S_i)), `alpha=0` (D only), `graph="zero"` (M only: D = 0) and `T_max=1` (token level).

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
    """Which M_i: Eq. 22, its ablation without rarity, or M_i = 1."""
    graph: GraphForm = "degree"
    """Which D: Eq. 27, or the ablation D = 0."""

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
        elif name in _NON_NEGATIVE and value < 0:
            raise SpecError(name, value, "must not be negative")
        elif name in _POSITIVE and value <= 0:
            raise SpecError(name, value, "must be positive")


PAPER = CrystalCacheParameters()

# Small enough that a few dozen tokens cross chunks, fill trunks and overflow the protected set.
TINY = CrystalCacheParameters(C=8, k_intra=3, k_cross=2, T_max=5, N_sink=2, W_recent=3)
