"""Random keys for scores that look at keys alone, and NestedKV's parameters at a small size."""

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from spec.parameters import NestedKVParameters

__all__ = ["NESTED", "keys", "seeds"]

NESTED = NestedKVParameters(blocks=4, b_min=3, b_max=6, W=4, N_sink=2, alpha_s=Fraction(4, 5))
seeds = st.integers(0, 2**32 - 1)


def keys(seed: int, H_kv: int, n: int, d: int = 4) -> Any:
    """float32 keys around a direction of their own, so that no memory is short."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((H_kv, n, d)) + rng.standard_normal((H_kv, 1, d))).astype(np.float32)
