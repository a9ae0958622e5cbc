"""Random keys for scores that look at keys alone."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

__all__ = ["keys", "seeds"]

seeds = st.integers(0, 2**32 - 1)


def keys(seed: int, H_kv: int, n: int, d: int = 4) -> Any:
    """float32 keys around a direction of their own, so that no memory is short."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((H_kv, n, d)) + rng.standard_normal((H_kv, 1, d))).astype(np.float32)
