"""Positions of archived tokens that are spliced into a session, and the session contents of each baseline (arm)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from spec.arrays import Cube, Float64, Int64, IntVector
from spec.errors import SpecError

__all__ = ["ARMS", "SINKS", "Held", "first_tokens", "held", "most_deviating", "placed"]

SINKS = 4


def placed(n: int, hidden: int, start: int, kept: Int64[IntVector, " k"]) -> tuple[Int64[IntVector, " v"], int]:
    """Return the session positions of the stored tokens that are spliced in, and the position of the next token.

    Implements: IN-PLACES

    Source: Sections 3.5 and 3.7 for a whole chunk. The paper has no chunks with evicted tokens.

    Raises:
        SpecError: if `hidden` is outside [0, n), or if `kept` is not strictly increasing inside range(n).
    """
    if not 0 <= hidden < n:
        raise SpecError("hidden", hidden, f"must lie in [0, {n})")
    if len(kept) and (kept[0] < 0 or kept[-1] >= n or (np.diff(kept) <= 0).any()):
        raise SpecError("kept", kept.tolist(), f"must increase strictly inside range({n})")
    return start - hidden + kept[kept >= hidden], start + n - hidden


@dataclass(frozen=True)
class Held:
    """Contents of a session: token ids, number of first tokens that the session computes, RoPE position of each key."""

    ids: tuple[int, ...]
    live: int
    rotations: tuple[int, ...]


# For each arm: session contents before the chunks, form of the chunks, and source of the chunks' keys. These keys are
# archived and moved to new positions (moved), archived and unchanged (still), or computed by the session (read).
ARMS: Mapping[str, tuple[str, str, str]] = {
    "inject": ("session", "wrapped", "moved"),
    "inject_raw": ("session", "raw", "moved"),
    "no_shift": ("session", "wrapped", "still"),
    "prefix": ("session and prefix", "raw", "moved"),
    "global_sink": ("sinks", "raw", "moved"),
    "full_recompute": ("session", "wrapped", "read"),
    "text": ("session", "raw", "read"),
    "text_wrapped": ("session", "wrapped", "read"),
}
"""Baselines (arms). LegoLink and CacheBlend are `inject` with some tokens recomputed (IN-LEGOLINK, IN-CACHEBLEND)."""


def held(
    arm: str, session: Sequence[int], prefix: Sequence[int], raw: Sequence[Sequence[int]],
    wrapped: Sequence[Sequence[int]],
) -> Held:
    """Return the session contents of a baseline (arm) before the session computes the query.

    Implements: IN-BASELINES

    Source: Sections 3.4, 3.5 and 3.12. Full recomputation is CacheBlend (arXiv 2405.16444) with r = 1.

    Raises:
        SpecError: if the arm is unknown.
    """
    if arm not in ARMS:
        raise SpecError("arm", arm, f"must be one of {', '.join(ARMS)}")
    before, form, keys = ARMS[arm]
    earlier = {"session": [*session], "session and prefix": [*session, *prefix], "sinks": [*session[:SINKS]]}[before]
    chunks = {"raw": raw, "wrapped": wrapped}[form]
    ids = [*earlier, *(token for chunk in chunks for token in chunk)]
    rotations = [*range(len(ids))]
    if keys == "still":
        rotations = [*range(len(earlier)), *(at for chunk in chunks for at in range(len(chunk)))]
    return Held(tuple(ids), len(ids) if keys == "read" else len(earlier), tuple(rotations))


def first_tokens(start: int, lengths: Sequence[int], k: int) -> list[int]:
    """Return the positions that LegoLink recomputes: the first k tokens of each chunk. `lengths` has the chunk lengths.

    Implements: IN-LEGOLINK

    Source: EPIC (arXiv 2410.15332). The paper on injection does not describe this choice.

    Raises:
        SpecError: if k is negative.
    """
    if k < 0:
        raise SpecError("k", k, "must be at least 0")
    starts = start + np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return [
        int(first) + at for first, length in zip(starts[:-1], lengths, strict=True) for at in range(min(k, length))
    ]


def most_deviating(
    spliced: Float64[Cube, "heads n d"], fresh: Float64[Cube, "heads n d"], start: int, r: float,
) -> list[int]:
    """Return the positions that CacheBlend recomputes, ascending.

    Of n tokens, CacheBlend recomputes the floor(r n) tokens whose spliced keys differ most from the fresh keys.

    Implements: IN-CACHEBLEND

    Source: CacheBlend (arXiv 2405.16444), Section 4. The paper on injection does not describe this choice.

    Raises:
        SpecError: if r is outside [0, 1].
    """
    if not 0 <= r <= 1:
        raise SpecError("r", r, "must lie in [0, 1]")
    deviation = ((spliced - fresh) ** 2).sum(axis=(0, 2))
    taken = floor(Fraction(str(r)) * len(deviation))
    order = np.argsort(-deviation, kind="stable")[:taken]
    return [start + int(at) for at in np.sort(order)]
