"""Expected Attention by brute force: the attention of Gaussian queries at later positions."""


from conformance.methods.brute import FUTURE, SINK, SLOW, Brute, Parts, plain, sinks
from conformance.methods.policies import Layer, Row, Score, groups, normalise, sink_of, top
from conformance.oracles.box_rows import Table
from conformance.oracles.boxes import (
    behind,
    column_sums,
    cos,
    dot,
    dots,
    each,
    leaves,
    minus,
    over,
    plus,
    row,
    sin,
    sqrt,
    squares,
    stacked,
    times,
)
from conformance.strategies.policy_inputs import Inputs, Kept


def waves(position: float, inv_freq: Row, factor: float) -> list[Row]:
    """Return the cosine and the sine of each frequency at a position, times the factor."""
    return [times(each(of, times(inv_freq, position)), factor) for of in (cos, sin)]


def rotate(x: Row, c: Row, s: Row) -> Row:
    """Rotate both halves of the channels by the angles with these cosines and sines."""
    half, x = len(x) // 2, row(x)
    a, b = x[:half], x[half:]
    result: Row = behind(minus(times(a, c), times(b, s)), plus(times(b, c), times(a, s)))
    return result


def expected_attention(
    layer: Layer, seen: int, inv_freq: Row, factor: float, N_sink: int, N_future: int,
) -> list[Score]:
    """Return E exp(z) of a Gaussian query under the mean rotation of the next N_future positions, as a score.

    The queries are those of the last tokens before position `seen`. In a later turn, the number of queries differs from
    the number of keys.
    """
    n = len(layer["k"][0])
    if n <= N_sink:
        return [[None] * n for _ in layer["k"]]
    result, inv_freq = list[Score](), row(inv_freq)
    ahead = range(seen, seen + N_future)
    future = [waves(p, inv_freq, factor) for p in ahead]
    c, s = (over(column_sums([pair[at] for pair in future]), N_future) for at in (0, 1))
    asked = range(max(seen - len(layer["q"][0]), N_sink), seen)
    past = [waves(-at, inv_freq, factor) for at in asked]
    for g, group in enumerate(groups(layer)):
        keys = layer["k"][g][N_sink:]
        keys = keys if isinstance(keys, Table) else stacked([row(key) for key in keys])
        total = [0.0] * len(keys)
        for h in group:
            # Rotate back by the same angle, and divide by both factors.
            queries = layer["q"][h][len(layer["q"][h]) - len(asked) :]
            pre = [over(rotate(q, *back), factor**2) for q, back in zip(queries, past, strict=True)]
            turned = [rotate(q, c, s) for q in pre]
            mean = over(column_sums(turned), len(turned))
            squared = column_sums([squares(dots(minus(q, mean), keys)) for q in turned])
            spread = over(times(over(squared, len(turned)), layer["scaling"] ** 2), 2)
            z = plus(times(dots(mean, keys), layer["scaling"]), spread)
            weights = over(normalise(z, sink_of(layer, [h])), len(group))
            total = [a + b for a, b in zip(total, weights, strict=True)]
        norms = [sqrt(dot(v, v)) for v in layer["v"][g][N_sink:]]
        result.append([*[None] * N_sink, *[a * b for a, b in zip(total, norms, strict=True)]])
    return result


def scores(inputs: Inputs, B: int, N_sink: int, N_future: int) -> list[Score]:
    return [
        row for view in inputs.layers
        for row in expected_attention(
            plain(view), inputs.places[-1] + 1, leaves(inputs.inv_freq), inputs.factor, N_sink, N_future)
    ]


def kept(inputs: Inputs, B: int, N_sink: int, N_future: int) -> Kept:
    return [top(row, B) for row in scores(inputs, B, N_sink, N_future)]


BRUTES = [
    Brute(
        "PO-EXPECTED-ATTENTION", "expected-attention", kept,
        {"N_sink": SINK, "N_future": FUTURE}, SINK, sinks,
        published={"factor": 1.0, "N_sink": 4, "N_future": 512}, turns=True, longest=SLOW,
        parts=Parts("sink=N_sink", rows=scores)),
]
