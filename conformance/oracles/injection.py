"""Injection by brute force: rotations as complex numbers, codecs and wrappers item by item."""

import cmath
from collections.abc import Mapping, Sequence
from fractions import Fraction

__all__ = [
    "code", "cuts", "fused", "moved", "quantised_region", "rebase_angles", "scale_of", "shift_angles", "turned",
    "wrapped",
]

Matrix = Sequence[Sequence[float]]


def shift_angles(n: int, start: int, theta: Sequence[float]) -> list[list[float]]:
    return [[start * value for value in theta] for _ in range(n)]


def rebase_angles(n: int, start: int, archived: Sequence[float], live: Sequence[float]) -> list[list[float]]:
    return [[(start + t) * new - t * old for old, new in zip(archived, live, strict=True)] for t in range(n)]


def turned(x: Sequence[float], angles: Sequence[float], interleaved: bool) -> list[float]:
    """One token of one head: each pair of channels is a complex number, times a number on the unit circle."""
    found = list(x)
    for i, angle in enumerate(angles):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, len(angles) + i)
        z = complex(x[a], x[b]) * cmath.exp(1j * angle)
        found[a], found[b] = z.real, z.imag
    return found


def moved(x: Sequence[Matrix], angles: Matrix, interleaved: bool) -> list[list[list[float]]]:
    return [[turned(token, turn, interleaved) for token, turn in zip(head, angles, strict=True)] for head in x]


def scale_of(values: Sequence[float], bits: int) -> float:
    """Before rounding to float32."""
    largest = max((abs(value) for value in values), default=0.0)
    return max(largest / int(2 ** (bits - 1) - 1), 2.0**-126)


def code(value: float, step: float, bits: int) -> int:
    """The integer nearest to the quotient, as float64 has it; ties to even by exact arithmetic."""
    highest = int(2 ** (bits - 1) - 1)
    return max(-highest, min(highest, round(Fraction(value / step))))


def quantised_region(half: str, first: int, last: int, layers: int, n: int) -> list[list[int]]:
    """Layers and tokens, counted one by one, as first and one past the last; an empty run starts where it would."""
    chosen = [layer for layer in range(layers) if half == "all" or (2 * layer + 1 < layers) == (half == "lower")]
    low = min(first, n)
    tokens = [token for token in range(n) if token >= first and token < n - last]
    return [[chosen[0], chosen[-1] + 1] if chosen else [0, 0], [tokens[0], tokens[-1] + 1] if tokens else [low, low]]


def wrapped(
    prefix: Sequence[tuple[bool, str]], chunk: Sequence[int], suffix: Sequence[tuple[bool, str]], hidden: int,
    vocabulary: Mapping[str, Sequence[int]],
) -> dict[str, object]:
    """Parts are (whether it is a marker, text)."""
    ids: list[int] = []
    markers = []
    skipped = start = 0
    for at, (marker, text) in enumerate(prefix):
        if marker:
            markers.append(len(ids))
        ids.extend(vocabulary[text])
        if at + 1 == hidden:
            skipped = len(ids)
    start = len(ids)
    ids.extend(chunk)
    for marker, text in suffix:
        if marker:
            markers.append(len(ids))
        ids.extend(vocabulary[text])
    return {"ids": ids, "hidden": skipped, "markers": markers, "start": start, "stop": start + len(chunk)}


def cuts(ids: Sequence[int], ends: Sequence[int], size: int) -> list[list[int]]:
    """Each chunk grows token by token; it ends at the last sentence end that it saw."""
    found: list[list[int]] = []
    start = 0
    while start < len(ids):
        stop, seen = start, None
        while stop < len(ids) and stop - start < size:
            stop += 1
            if ids[stop - 1] in ends:
                seen = stop
        if stop < len(ids) and seen is not None:
            stop = seen
        found.append([start, stop])
        start = stop
    return found


def fused(rankings: Sequence[Sequence[str]], k: int) -> list[tuple[str, float]]:
    rankings = [[name for at, name in enumerate(ranking) if name not in ranking[:at]] for ranking in rankings]
    names = sorted({name for ranking in rankings for name in ranking})
    scores = {}
    for name in names:
        total = 0.0
        for ranking in rankings:
            if name in ranking:
                total += 1 / (k + list(ranking).index(name) + 1)
        scores[name] = total
    order = []
    while names:
        best = max(round(scores[name], 12) for name in names)
        first = next(name for name in names if round(scores[name], 12) == best)
        names.remove(first)
        order.append((first, scores[first]))
    return order
