"""Oracles of rotary positions by brute force: tokens are counted one by one, and rotations are complex numbers."""

import cmath
from collections.abc import Sequence


def kept_positions(kept: Sequence[Sequence[int]], seen: int) -> tuple[list[list[int]], int]:
    """Return the positions at which a text of `seen` tokens has the kept tokens, and the position after the text."""
    return [[token for token in range(seen) if token in one] for one in kept], len(range(seen))


def renumbered_positions(kept: Sequence[Sequence[int]], seen: int, base: int) -> tuple[list[list[int]], int]:
    """Return positions that are counted down, from the position before the next query."""
    following, positions_of_sets = seen, list[list[int]]()
    for _ in range(base):
        following -= 1
    for one in kept:
        numbers, at = list[int](), following
        for _ in one:
            at -= 1
            numbers.insert(0, at)
        positions_of_sets.append(numbers)
    return positions_of_sets, following


def base_of_stream(seen: int, base: int, longest: int, tokens: int, limit: int) -> int:
    """Return the base. Each new token is tried at its position."""
    if all(seen + at - base < limit for at in range(tokens)):
        return base
    # The first key of the largest set is then at position 0.
    return next(candidate for candidate in range(seen + 1) if seen - candidate - longest == 0)


def turn_keys(
    keys: Sequence[Sequence[Sequence[float]]], computed: Sequence[int], assigned: Sequence[int],
    inverse_frequencies: Sequence[float], style: str,
) -> list[list[list[float]]]:
    """Return keys whose pairs of channels are multiplied by a number on the unit circle. Others are unchanged."""
    turned = [[list(token) for token in head] for head in keys]
    for head in turned:
        for token, before, after in zip(head, computed, assigned, strict=True):
            for i, theta in enumerate(inverse_frequencies):
                a, b = (2 * i, 2 * i + 1) if style == "interleaved" else (i, len(inverse_frequencies) + i)
                if before != after:
                    z = complex(token[a], token[b]) * cmath.exp(1j * (after * theta - before * theta))
                    token[a], token[b] = z.real, z.imag
    return turned
