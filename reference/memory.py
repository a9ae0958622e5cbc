"""Memory of a KV cache, in bytes."""

__all__ = ["kv_bytes"]


def kv_bytes(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """Return the number of bytes of all keys and values in a KV cache.

    There are L layers, H_kv KV heads, d channels, `batch` sequences of n tokens, and b bytes per element.

    Implements: CC-MEMORY

    Source: CrystalCache, Eq. 4. Eq. 1 is Eq. 4 with batch = 1.
    """
    return 2 * L * H_kv * d * n * batch * b
