"""Rotary positions of kept keys: positions of the text, or renumbered positions that end before the next query."""

from collections.abc import Sequence

import numpy as np

from reference.injection.rotation import TURNS
from spec.arrays import Cube, Float64, Int64, IntVector, Matrix, Vector
from spec.errors import SpecError

__all__ = ["base_of_stream", "check_kept", "kept_positions", "renumbered_positions", "turn_angles", "turn_keys"]

Sets = Sequence[Int64[IntVector, " _"]]


def check_kept(kept: Sets, seen: int) -> None:
    """Check that each kept set contains positions of the text, in ascending order.

    Raises:
        SpecError: if a set is not strictly increasing inside range(seen).
    """
    for one in kept:
        if len(one) and (one[0] < 0 or one[-1] >= seen or (np.diff(one) <= 0).any()):
            raise SpecError("kept", one.tolist(), f"must increase strictly inside range({seen})")


def kept_positions(kept: Sets, seen: int) -> tuple[list[Int64[IntVector, " _"]], int]:
    """Return the rotary positions of each kept set, and the position of the next query: the positions of the text.

    Implements: POS-KEPT

    Source: none. In most published code of eviction, a cached key is not rotated again.

    Raises:
        SpecError: if a set is not strictly increasing inside range(seen).
    """
    check_kept(kept, seen)
    return [one.copy() for one in kept], seen


def renumbered_positions(kept: Sets, seen: int, base: int) -> tuple[list[Int64[IntVector, " _"]], int]:
    """Return the renumbered positions of each kept set, and the position of the next query, which all sets share.

    Implements: POS-RENUMBERED

    Source: StreamingLLM, Section 3.2, for one set. Here the kept keys end directly before the next query.

    Args:
        kept: positions of the text that each kept set stores, ascending.
        seen: number of tokens seen.
        base: number that is subtracted from all positions, see POS-BASE.

    Raises:
        SpecError: if a set is not strictly increasing inside range(seen), or if the base is too large or negative.
    """
    check_kept(kept, seen)
    most = seen - max(map(len, kept), default=0)
    if not 0 <= base <= most:
        raise SpecError("base", base, f"must lie in [0, {most}]")
    following = seen - base
    return [np.arange(following - len(one), following) for one in kept], following


def base_of_stream(seen: int, base: int, longest: int, tokens: int, limit: int) -> int:
    """Return the base of the next forward pass of `tokens` tokens, so that all positions are below `limit`.

    Implements: POS-BASE

    Source: none. StreamingLLM's cache numbers the tokens from 0 again at every eviction.

    Args:
        seen: number of tokens seen.
        base: base of the last forward pass.
        longest: number of tokens of the largest kept set.
        tokens: number of new tokens.
        limit: number of positions for which the model was trained.

    Raises:
        SpecError: if the largest kept set and the new tokens have more than `limit` tokens.
    """
    if longest + tokens > limit:
        reason = f"must be at most {limit - longest}: the cache stores {longest} tokens, and the limit is {limit}"
        raise SpecError("tokens", tokens, reason)
    return base if seen - base + tokens <= limit else seen - longest


def turn_angles(
    computed: Int64[IntVector, " _"], assigned: Int64[IntVector, " _"],
    inverse_frequencies: Float64[Vector, " pairs"],
) -> Float64[Matrix, "k pairs"]:
    """Return the angles (radians) that turn keys, computed at some rotary positions, to the assigned positions."""
    return assigned[:, None] * inverse_frequencies - computed[:, None] * inverse_frequencies


def turn_keys(
    keys: Float64[Cube, "heads k d"], computed: Int64[IntVector, " _"], assigned: Int64[IntVector, " _"],
    inverse_frequencies: Float64[Vector, " pairs"], style: str,
) -> Float64[Cube, "heads k d"]:
    """Return the keys of a kept set, turned once from the computed to the assigned rotary positions.

    Implements: POS-TURN

    Source: StreamingLLM, Section 3.2, whose code stores keys before the rotation.

    Args:
        keys: keys as the model computed them.
        computed: rotary positions at which the model computed the keys.
        assigned: rotary positions from POS-RENUMBERED.
        inverse_frequencies: inverse frequencies of the model, without a factor of the scaling.
        style: "half_split" or "interleaved".
    """
    return TURNS[style](keys, turn_angles(computed, assigned, inverse_frequencies))
