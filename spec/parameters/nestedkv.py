"""Parameters of NestedKV, from Appendix A of the paper. The parameters are named after the paper's symbols."""

import math
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Real

from spec.errors import SpecError

__all__ = ["NESTEDKV", "NestedKVParameters"]


@dataclass(frozen=True)
class NestedKVParameters:
    """All constants of NestedKV. The defaults are the values that the paper uses for all models and compression ratios.

    Raises:
        SpecError: if a value has the wrong type or is out of range.
    """

    w0: tuple[float, float, float] = (0.4, 0.4, 0.2)
    """Positive prior weights of the stable, the episodic and the current memory (Eq. 11)."""
    blocks: int = 32
    """Number of blocks into which a prompt is divided, unless a block would then violate b_min or b_max (Eq. 6)."""
    b_min: int = 128
    """Smallest number of tokens in a block (Eq. 6)."""
    b_max: int = 256
    """Largest number of tokens in a block (Eq. 6)."""
    W: int = 64
    """Number of tokens in the window of the current memory (Eq. 8)."""
    p: Fraction = Fraction(1, 10)
    """Fraction of the tokens, in (0, 1], that Delta averages at the top and at the bottom of a ranking (Eq. 10)."""
    beta: float = 3.0
    """Inverse temperature of the softmax that gives the blend weights (Eq. 11)."""
    tau: float = 0.6
    """Surprise of a token at which the gate has the value 1/2 (Eq. 15)."""
    kappa: float = 10.0
    """Steepness of the gate as a function of the surprise (Eq. 15)."""
    N_sink: int = 4
    """Number of tokens at the start of the prompt that are always kept (Section 2.3)."""
    alpha_s: Fraction = Fraction(1, 5)
    """Smallest budget of a head, as a fraction in [0, 1] of an equal share of the budget (Appendix A)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("blocks", "b_min", "b_max", "W"):
                _check_count(field.name, value, 1)
            elif field.name == "N_sink":
                _check_count(field.name, value, 0)
            elif field.name in ("beta", "tau", "kappa") and not (_is_number(value) and value >= 0):
                raise SpecError(field.name, value, "must be finite and not negative")
            elif field.name in ("p", "alpha_s") and not _is_number(value):
                raise SpecError(field.name, value, "must be a finite int, float or Fraction")
        if not isinstance(self.w0, tuple) or len(self.w0) != 3 or not all(_is_number(w) and w > 0 for w in self.w0):
            raise SpecError("w0", self.w0, "must be a tuple of three positive numbers")
        if self.b_max < self.b_min:
            raise SpecError("b_max", self.b_max, f"must be at least b_min, {self.b_min}")
        if not 0 < self.p <= 1:
            raise SpecError("p", self.p, "must lie in (0, 1]")
        if not 0 <= self.alpha_s <= 1:
            raise SpecError("alpha_s", self.alpha_s, "must lie in [0, 1]")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(name, value, f"must be an int of at least {least}")


NESTEDKV = NestedKVParameters()
