"""LagKV by brute force: tokens that differ most from the next partition are kept."""

from collections.abc import Sequence
from typing import Any

from conformance.methods.brute import LAG, SINK, SLOW, Brute, Parts, by_layer, sinks
from conformance.methods.policies import Layer, Row, Score, at_places, normalise
from conformance.oracles.box import Box
from conformance.oracles.boxes import columns, extended, fsum, largest, least, minus, over, row, sqrt, squares
from conformance.oracles.choices import places


def lagkv_information(rows: Sequence[Row], reference: Sequence[Row]) -> Row:
    """Return the information of one partition relative to the next.

    Keys are scaled by the minimum and maximum of each channel in the next partition. The softmax over tokens of the
    deviations over channels follows.
    """
    low, high = ([f(column) for column in columns(reference)] for f in (least, largest))
    wide = [c for c, (a, b) in enumerate(zip(low, high, strict=True)) if a != b]
    start, width = row([low[c] for c in wide]), row([high[c] - low[c] for c in wide])
    spreads = []
    for values in rows:
        scaled = extended(over(minus(row(at_places(values, wide)), start), width), len(values))
        mean = fsum(scaled) / len(scaled)
        spreads.append(sqrt(fsum(squares(minus(scaled, mean))) / (len(scaled) - 1)))
    return normalise(spreads)


def lagkv(layer: Layer, N_sink: int, lag: int) -> list[Score]:
    """Return minus the rank of each token inside its partition, so that the best token has the highest score.

    Tokens after the last ranked partition have higher scores, and the newest token has the highest. Sinks have no
    score.
    """
    n, result = len(layer["k"][0]), []
    starts = list(range(N_sink, n - 2 * lag + 1, lag))
    unranked = starts[-1] + lag if starts else N_sink
    for keys, values in zip(layer["k"], layer["v"], strict=True):
        score: list[Any] = [None if at < N_sink else 1.0 + at - unranked for at in range(n)]
        for start in starts:
            here, after = slice(start, start + lag), slice(start + lag, start + 2 * lag)
            by_key, by_value = (lagkv_information(x[here], x[after]) for x in (keys, values))
            worth = [a + b for a, b in zip(by_key, by_value, strict=True)]
            for at, (fewest, most) in enumerate(places(worth)):
                score[start + at] = -float(most) if fewest == most else Box(-float(most), -float(fewest), (start, at))
        result.append(score)
    return result


BRUTES = [
    Brute("PO-LAGKV", "lagkv", by_layer(lagkv), {"N_sink": SINK, "lag": LAG}, SINK, sinks,
          published={"N_sink": 4, "lag": 128}, scored=False, longest=SLOW, parts=Parts("sink=N_sink", lagkv)),
]
