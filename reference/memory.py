"""Memory of a KV cache."""

__all__ = ["kv_bytes"]


def kv_bytes(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """Return the bytes of the keys and values of L layers, H_kv KV heads of d channels, n tokens, b bytes per element.

    Implements: CC-MEMORY

    Source: CrystalCache, Eq. 4. Eq. 1 is the case batch = 1.
    """
    return 2 * L * H_kv * d * n * batch * b
