"""One layer's queries, keys and values, before and after their rotation; no transformers, no kvpress."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from reference.policies.rotary import unrotated
from spec.policy import LayerView

__all__ = ["Inputs", "L", "drawn"]

L = 4
D = 8
RATIOS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.75", "0.8", "0.9")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Inputs:
    """A prompt of n tokens at a ratio (the part that is removed), in one of L layers."""

    seed: int
    ratio: str
    layer: int
    raw_q: Array
    """Queries before their rotation (H, n, d)."""
    k: Array
    v: Array
    inv_freq: Array

    @property
    def n(self) -> int:
        return int(self.k.shape[1])

    @property
    def kept(self) -> Fraction:
        """The part that is kept."""
        return 1 - Fraction(self.ratio)

    @property
    def view(self) -> LayerView:
        q = unrotated(self.raw_q, -np.arange(self.n), self.inv_freq, 1.0)
        return LayerView(q, self.k, self.v, D**-0.5, None)


def drawn(seed: int, most: int) -> Inputs:
    """Normal numbers; 6 to `most` tokens, 1 to 3 KV heads of 1 to 2 query heads."""
    rng = np.random.default_rng(seed)
    n, H_kv, G = int(rng.integers(6, most + 1)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    ratio = RATIOS[int(rng.integers(len(RATIOS)))]
    return Inputs(
        seed, ratio, int(rng.integers(L)), 2 * rng.standard_normal((H_kv * G, n, D)),
        rng.standard_normal((H_kv, n, D)), rng.standard_normal((H_kv, n, D)),
        100.0 ** (-np.arange(D // 2) / (D // 2)),
    )
