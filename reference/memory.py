"""What a cache costs."""

__all__ = ["kv_bytes"]


def kv_bytes(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """Bytes of keys and values: L layers, H_kv KV heads of d channels, n tokens, b bytes an element.

    Implements: CC-MEMORY

    Source: Eq. 4; Eq. 1 is batch = 1.
    """
    return 2 * L * H_kv * d * n * batch * b
