"""Kept sets as both halves write them: found again among the keys of a prompt, packed to text, and compared."""

import base64
import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Array", "digest", "marked", "overlap", "packed", "positions_of", "unpacked"]

Array = np.ndarray[Any, Any]


def positions_of(some: Array, keys: Array) -> Array:
    """Where each of some keys (heads, m, d) stands among all (heads, n, d), by its bytes: positions (heads, m).

    Raises:
        ValueError: for a key that is not there, or stands at two positions of its head.
    """
    found = np.empty(some.shape[:2], dtype=np.int64)
    for head, (wanted, every) in enumerate(zip(some, keys, strict=True)):
        places = {key.tobytes(): at for at, key in enumerate(every)}
        if len(places) < len(every):
            raise ValueError(f"head {head}: {len(every) - len(places)} of {len(every)} keys are equal to another")
        try:
            found[head] = [places[key.tobytes()] for key in wanted]
        except KeyError:
            raise ValueError(f"head {head}: a key is none of the prompt's") from None
    return found


def marked(positions: Iterable[ArrayLike], n: int) -> Array:
    """Positions of each group as booleans (groups, n)."""
    rows = [np.isin(np.arange(n), np.asarray(row)) for row in positions]
    return np.array(rows)


def packed(kept: Array) -> str:
    """Which tokens (groups, n) are kept, as text."""
    return base64.b64encode(zlib.compress(np.packbits(kept, axis=1).tobytes(), 9)).decode()


def unpacked(text: str, n: int) -> Array:
    """The same as booleans (groups, n)."""
    rows = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8).reshape(-1, -(-n // 8))
    return np.unpackbits(rows, axis=1, count=n).astype(np.bool_)


def overlap(some: Array, others: Array) -> Array:
    """Jaccard: of the tokens (groups, n) that either keeps, the share that both keep, for each group."""
    share: Array = (some & others).sum(axis=1) / (some | others).sum(axis=1)
    return share


def digest(keys: Array) -> str:
    """SHA-256 of a layer's keys, the first 16 digits: whether two prefills agree to the last bit."""
    return hashlib.sha256(np.ascontiguousarray(keys).tobytes()).hexdigest()[:16]
