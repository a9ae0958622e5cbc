"""S6: compaction of one layer's cache (Section 3.7)."""

from spec.arrays import Float, Int64, IntVector, RawCube

__all__ = ["compact"]


def compact(
    K: Float[RawCube, "H_kv n d"], V: Float[RawCube, "H_kv n d_v"], R: Int64[IntVector, " kept"],
) -> tuple[Float[RawCube, "H_kv kept d"], Float[RawCube, "H_kv kept d_v"]]:
    """Return the keys and values of the kept positions R (ascending). Keys keep the RoPE of their original positions.

    Implements: CC-COMPACT

    Source: Eq. 35. The position of the next query is the number of tokens seen, not the number of cached tokens.
    """
    return K[:, R], V[:, R]
