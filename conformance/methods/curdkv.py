"""CurDKV by brute force: tokens with a large share of the squared norms of their window are kept."""

from conformance.methods.brute import BLOCK, SINK, Brute, Parts, by_layer, sinks
from conformance.methods.policies import Layer, Row, Score
from conformance.oracles.boxes import dot, fsum


def leverage_shares(rows: list[Row], window: int) -> list[float]:
    result: list[float] = []
    for start in range(0, len(rows), window):
        squares = [dot(row, row) for row in rows[start : start + window]]
        total = fsum(squares)
        result += [square / total if total else 0.0 for square in squares]
    return result


def products(layer: Layer, window: int, shares: str = "window") -> list[Score]:
    """Return the share of a token's key times the share of its value."""
    result: list[Score] = []
    for keys, values in zip(layer["k"], layer["v"], strict=True):
        length = len(keys) if shares == "row" else window
        both = zip(leverage_shares(keys, length), leverage_shares(values, length), strict=True)
        result.append([a * b for a, b in both])
    return result


def curdkv(layer: Layer, N_sink: int, window: int, shares: str = "window") -> list[Score]:
    """Return the products. The first tokens have no score."""
    return [[None if at < N_sink else x for at, x in enumerate(row)] for row in products(layer, window, shares)]


BRUTES = [
    Brute("PO-CURDKV", "curdkv", by_layer(curdkv), {"N_sink": SINK, "window": BLOCK}, SINK, sinks,
          published={"N_sink": 4, "window": 16}, readings={"shares": ("window", "row")},
          parts=Parts("sink=N_sink", products, unscored="")),
]
