"""Oracles of injection by brute force: rotations as complex numbers, codecs and wrappers item by item."""

import cmath
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

Matrix = Sequence[Sequence[float]]


def shift_angles(n: int, start: int, inverse_frequencies: Sequence[float]) -> list[list[float]]:
    return [[start * value for value in inverse_frequencies] for _ in range(n)]


def rebase_angles(n: int, start: int, archived: Sequence[float], live: Sequence[float]) -> list[list[float]]:
    return [[(start + t) * new - t * old for old, new in zip(archived, live, strict=True)] for t in range(n)]


def turned(x: Sequence[float], angles: Sequence[float], interleaved: bool) -> list[float]:
    """Return one token of one head after rotation.

    Each pair of channels is a complex number, which is multiplied by a number on the unit circle.
    """
    result = list(x)
    for i, angle in enumerate(angles):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, len(angles) + i)
        z = complex(x[a], x[b]) * cmath.exp(1j * angle)
        result[a], result[b] = z.real, z.imag
    return result


def moved(x: Sequence[Matrix], angles: Matrix, interleaved: bool) -> list[list[list[float]]]:
    return [[turned(token, turn, interleaved) for token, turn in zip(head, angles, strict=True)] for head in x]


def scale_of(values: Sequence[float], bits: int) -> float:
    """Return the scale before it is rounded to float32."""
    largest = max((abs(value) for value in values), default=0.0)
    return max(largest / int(2 ** (bits - 1) - 1), 2.0**-126)


def code(value: float, step: float, bits: int) -> int:
    """Return the integer nearest to the float64 quotient. Ties go to the even integer, by exact arithmetic."""
    highest = int(2 ** (bits - 1) - 1)
    return max(-highest, min(highest, round(Fraction(value / step))))


def quantised_region(half: str, first: int, last: int, layers: int, n: int) -> list[list[int]]:
    """Return the layers and tokens, counted one by one, as the first and one past the last.

    An empty range of tokens begins at the first token of the longer range.
    """
    chosen = [layer for layer in range(layers) if half == "all" or (2 * layer + 1 < layers) == (half == "lower")]
    low = min(first, n)
    tokens = [token for token in range(n) if token >= first and token < n - last]
    return [[chosen[0], chosen[-1] + 1] if chosen else [0, 0], [tokens[0], tokens[-1] + 1] if tokens else [low, low]]


def wrapped(
    prefix: Sequence[tuple[bool, str]], chunk: Sequence[int], suffix: Sequence[tuple[bool, str]], hidden: int,
    vocabulary: Mapping[str, Sequence[int]],
) -> dict[str, object]:
    """Return the wrapped chunk. The parts of prefix and suffix are pairs (True for a marker, text)."""
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
    """Return the chunks. Each chunk grows token by token, and ends at its last sentence end."""
    result: list[list[int]] = []
    start = 0
    while start < len(ids):
        stop, seen = start, None
        while stop < len(ids) and stop - start < size:
            stop += 1
            if ids[stop - 1] in ends:
                seen = stop
        if stop < len(ids) and seen is not None:
            stop = seen
        result.append([start, stop])
        start = stop
    return result


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


def placed(n: int, hidden: int, start: int, kept: Sequence[int]) -> tuple[list[int], int]:
    """Return the positions of the stored tokens, and the next position.

    Each visible token of the chunk occupies a position, even if the token is not stored.
    """
    result, at = [], start
    for token in range(n):
        if token >= hidden:
            if token in kept:
                result.append(at)
            at += 1
    return result, at


def held(
    arm: str, session: Sequence[int], prefix: Sequence[int], raw: Sequence[Sequence[int]],
    wrapped: Sequence[Sequence[int]],
) -> dict[str, object]:
    """Return the tokens of an arm by the paper's description, computed token by token."""
    ids = [token for at, token in enumerate(session) if arm != "global_sink" or at < 4]
    if arm == "prefix":
        ids.extend(prefix)
    live, rotations = len(ids), list(range(len(ids)))
    for chunk in wrapped if arm in ("inject", "no_shift", "full_recompute", "text_wrapped") else raw:
        for place, token in enumerate(chunk):
            rotations.append(place if arm == "no_shift" else len(ids))
            ids.append(token)
            if arm in ("text", "text_wrapped", "full_recompute"):
                live += 1
    return {"ids": ids, "live": live, "rotations": rotations}


def first_tokens(start: int, lengths: Sequence[int], k: int) -> list[int]:
    result, at = [], start
    for length in lengths:
        for place in range(length):
            if place < k:
                result.append(at)
            at += 1
    return result


def most_deviating(spliced: Sequence[Matrix], fresh: Sequence[Matrix], start: int, r: float) -> list[int]:
    """Return the tokens with the largest deviations, chosen one by one."""
    n = len(spliced[0])
    left = {}
    for token in range(n):
        differences = [
            (x - y) ** 2 for one, other in zip(spliced, fresh, strict=True)
            for x, y in zip(one[token], other[token], strict=True)
        ]
        left[token] = math.fsum(differences)
    taken: list[int] = []
    while (len(taken) + 1) <= Decimal(str(r)) * n:
        worst = max(left.values())
        token = min(token for token, value in left.items() if value == worst)
        taken.append(token)
        del left[token]
    return sorted(start + token for token in taken)


def entropy(weights: Sequence[float]) -> float:
    """Return the entropy of one query of one head."""
    return math.fsum(-a * math.log(a) for a in weights if a > 0)


def sink_mass(weights: Sequence[float], positions: Sequence[int], sinks: int) -> float:
    total = 0.0
    for a, position in zip(weights, positions, strict=True):
        if position < sinks:
            total += a
    return total


def cosines(
    a: Sequence[float], b: Sequence[float], at: tuple[int, int], theta: Sequence[float], interleaved: bool,
) -> tuple[float, float]:
    """Return the cosines of one token of one head: of the given keys, and of both keys rotated back to position 0."""
    back = [turned(x, [-p * value for value in theta], interleaved) for x, p in zip((a, b), at, strict=True)]
    return _cosine(a, b), _cosine(back[0], back[1])


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def bands(depth: int) -> dict[str, list[int]]:
    """Return the bands of layers, scaled layer by layer from the paper's 40 layers."""
    result = {}
    for name, (low, high) in {"early": (0, 6), "mid": (10, 16), "upper": (20, 33), "all": (0, 40)}.items():
        first = math.floor(Fraction(low * depth, 40))
        result[name] = [first, max(first + 1, math.floor(Fraction(high * depth, 40)))]
    return result
