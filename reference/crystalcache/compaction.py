"""S6: what compaction does to one layer's cache (Section 3.7)."""

from spec.arrays import Float, Int64, IntVector, RawCube

__all__ = ["compact"]


def compact(
    K: Float[RawCube, "H_kv n d"], V: Float[RawCube, "H_kv n d_v"], R: Int64[IntVector, " kept"],
) -> tuple[Float[RawCube, "H_kv kept d"], Float[RawCube, "H_kv kept d_v"]]:
    """Keys and values of the kept positions, in ascending order; each key keeps the rotation of its position.

    Implements: CC-COMPACT

    Source: Eq. 35. The next query stands at the number of tokens seen, not at the number of slots.
    """
    return K[:, R], V[:, R]
