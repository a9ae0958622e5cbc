"""Memory of a KV cache."""

__all__ = ["kv_bytes"]


def kv_bytes(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """Return the bytes of all keys and values: L layers, H_kv KV heads, d channels, n tokens, b bytes per element.

    Implements: CC-MEMORY

    Source: CrystalCache, Eq. 4. Eq. 1 is Eq. 4 with batch = 1.
    """
    return 2 * L * H_kv * d * n * batch * b
