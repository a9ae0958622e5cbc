"""VATP and CriticalKV by brute force, with the functions of `methods.policies`.

No code is shared with the reference.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from conformance.methods.adakv import adakv
from conformance.methods.brute import KERNEL, SAFEGUARD, SINK, SLOW, Brute, Parts, W, newest, newest_half, plain, sinks
from conformance.methods.h2o import of_head
from conformance.methods.policies import (
    DECODE,
    Layer,
    Row,
    Score,
    accumulated,
    adaptive_shares,
    groups,
    top,
    with_heads,
)
from conformance.methods.snapkv import READINGS, SLIPS, snapkv
from conformance.oracles.boxes import columns, fsum, leaves, projected
from conformance.oracles.choices import surely
from conformance.strategies.policy_inputs import Inputs, Kept

Projection = Sequence[Sequence[Row]]


def vatp(layer: Layer) -> list[Score]:
    """Return the attention that a key received from all queries of its group, times the magnitudes of its value."""
    return [
        [(a or 0.0) * fsum(map(abs, value)) for a, value in zip(row, values, strict=True)]
        for row, values in zip(accumulated(layer), layer["v"], strict=True)
    ]


def output_sizes(layer: Layer, W_o: Projection) -> list[list[float]]:
    """Return, per KV head and token, the magnitudes of a query head's output, as a mean over the group."""
    return [
        [fsum(abs(x) for outputs in of_heads for x in outputs) / len(group) for of_heads in zip(*written, strict=True)]
        for g, group in enumerate(groups(layer))
        for written in [[projected(layer["v"][g], columns(W_o[h])) for h in group]]
    ]


def two_stages(first: Score, second: Sequence[float | None], B: int, share: Fraction) -> list[int]:
    """Return the protected tokens, a share of the other places by the first score, and the rest by the second score."""
    pinned = [i for i, x in enumerate(first) if x is None]
    early = surely(top(first, len(pinned) + max(0, B - len(pinned)) * share // 1))
    return top([None if i in early else x for i, x in enumerate(second)], B)


def critical(layer: Layer, W_o: Projection, rows: list[Score], shares: Sequence[int]) -> list[list[int]]:
    """Return kept sets: half of each head's share by its scores, the rest by score and output."""
    result = []
    for row, size, B in zip(rows, output_sizes(layer, W_o), shares, strict=True):
        second = [None if a is None else (a + 1e-4) * b for a, b in zip(row, size, strict=True)]
        result.append(two_stages(row, second, B, Fraction(1, 2)))
    return result


def of_vatp(inputs: Inputs, B: int, N_sink: int, decode: str = DECODE[0]) -> Kept:
    """Return the kept sets of VATP. The sinks and the newest half have no score.

    A decode step adds attention to the sums, and then multiplies the sums by the magnitudes of the values.
    """
    def of_values(values: Sequence[Row]) -> Callable[[Score, Sequence[int]], Score]:
        sizes = [fsum(map(abs, value)) for value in values]
        return lambda row, live: [
            None if x is None or at < N_sink else x * sizes[at] for at, x in zip(live, row, strict=True)
        ]

    return [
        of_head({**with_heads(layer, group), "k": [keys]}, inputs.steps, B, "all", "half", decode, of_values(values))
        for layer in map(plain, inputs.layers)
        for keys, values, group in zip(layer["k"], layer["v"], groups(layer), strict=True)
    ]


def of_criticalkv(
    score: Callable[..., list[Score]], shares: Callable[[list[Score], int, Fraction], Sequence[int]],
) -> Callable[..., Kept]:
    """Return a function that computes kept sets in two stages inside each head's share."""
    def kept(inputs: Inputs, B: int, safeguard: Fraction = Fraction(0), **constants: Any) -> Kept:
        result = Kept()
        for view, W_o in zip(inputs.layers, inputs.W_o, strict=True):
            rows = score(plain(view), **constants)
            result += critical(plain(view), leaves(W_o), rows, shares(rows, B, safeguard))
        return result

    return kept


BRUTES = [
    Brute(
        "PO-VATP", "vatp", of_vatp,
        {"N_sink": SINK}, 2 * SINK, lambda n, B: sinks(n, B) | newest_half(n, B), published={"N_sink": 4},
        readings={"decode": DECODE}, decoded=True,
        parts=Parts("select=half/every=1/values=N_sink/floor=2N_sink", accumulated, carried=True), longest=SLOW),
    Brute(
        "PO-CRITICALKV", "criticalkv", of_criticalkv(snapkv, lambda rows, B, safeguard: [B] * len(rows)),
        {"W": W, "kernel": KERNEL}, W, newest, published={"W": 32, "kernel": 7}, readings=READINGS, slips=SLIPS,
        scored=False, parts=Parts("recent=W/critical=0.5", snapkv)),
    Brute(
        "PO-CRITICALKV", "critical-adakv", of_criticalkv(adakv, adaptive_shares),
        {"W": W, "kernel": KERNEL, "safeguard": SAFEGUARD}, W, newest,
        published={"W": 32, "kernel": 7, "safeguard": Fraction(1, 5)}, scored=False,
        parts=Parts("recent=W/heads=adaptive:safeguard=safeguard/critical=0.5", adakv),
    ),
]
