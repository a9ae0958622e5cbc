"""One layer's queries, keys and values, before and after their rotation; no transformers, no kvpress."""

from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from reference.policies.rotary import unrotated
from spec.policy import LayerView

__all__ = ["SMALL", "Constants", "Inputs", "drawn"]

D = 8
RATIOS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.75", "0.8", "0.9")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Constants:
    """Of the presses and of our policies alike."""

    window: int
    kernel: int
    """Of the pool."""
    chunk: int
    sinks: int
    future: int
    """Positions that Expected Attention averages over."""
    layers: int
    lag: int
    """Tokens of a partition of LagKV."""


SMALL = Constants(window=3, kernel=5, chunk=4, sinks=4, future=16, layers=4, lag=4)
"""Of inputs that are drawn."""


@dataclass(frozen=True)
class Inputs:
    """A prompt of n tokens at a ratio (the part that is removed), in one of the layers."""

    seed: int
    ratio: str
    layer: int
    raw_q: Array
    """Queries before their rotation (H, n, d)."""
    k: Array
    v: Array
    inv_freq: Array
    constants: Constants = SMALL

    @property
    def n(self) -> int:
        return int(self.k.shape[1])

    @cached_property
    def W_o(self) -> Array:
        """An output projection (H, d, hidden), drawn beside them."""
        return np.random.default_rng(self.seed + 1).standard_normal((len(self.raw_q), D, 6))

    def at(self, ratio: str) -> "Inputs":
        """The same tensors at another ratio."""
        other = copy(self)
        object.__setattr__(other, "ratio", ratio)
        return other

    @property
    def kept(self) -> Fraction:
        """The part that is kept."""
        return 1 - Fraction(self.ratio)

    @cached_property
    def view(self) -> LayerView:
        q = unrotated(self.raw_q, -np.arange(self.n), self.inv_freq, 1.0)
        return LayerView(q, self.k, self.v, self.k.shape[2] ** -0.5, None)


def drawn(seed: int, most: int) -> Inputs:
    """Normal numbers; 6 to `most` tokens, 1 to 3 KV heads of 1 to 2 query heads."""
    rng = np.random.default_rng(seed)
    n, H_kv, G = int(rng.integers(6, most + 1)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    ratio = RATIOS[int(rng.integers(len(RATIOS)))]
    return Inputs(
        seed, ratio, int(rng.integers(SMALL.layers)), 2 * rng.standard_normal((H_kv * G, n, D)),
        rng.standard_normal((H_kv, n, D)), rng.standard_normal((H_kv, n, D)),
        100.0 ** (-np.arange(D // 2) / (D // 2)),
    )
