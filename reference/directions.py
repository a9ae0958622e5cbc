"""Unit keys. NestedKV and KeyDiff compare only the directions of keys."""

import numpy as np

from spec.arrays import Cube, Float64
from spec.errors import SpecError

__all__ = ["unit_keys"]


def unit_keys(k: Float64[Cube, "H_kv n d"]) -> Float64[Cube, "H_kv n d"]:
    """Return each key divided by its L2 norm.

    Implements: NK-UNIT-KEYS

    Source: NestedKV, Section 2.1 (below Eq. 3); KeyDiff, Section 3. Each key is first scaled by a power of two, without
    rounding error. The largest absolute channel of a scaled key is in [0.5, 1), so no square overflows. The sum of
    squares does not depend on the memory layout of k.

    Raises:
        SpecError: if a key is zero, because a zero key has no direction.
    """
    scaled = np.ldexp(k, -np.frexp(np.abs(k).max(axis=2, keepdims=True))[1], order="C")
    norm = np.sqrt((scaled * scaled).sum(axis=2, keepdims=True))
    if (norm == 0).any():
        head, token, _ = (int(i) for i in np.argwhere(norm == 0)[0])
        raise SpecError("k", 0.0, f"a zero key has no direction: KV head {head}, token {token}")
    unit: Cube = scaled / norm
    return unit
