"""Expected Attention by brute force: what Gaussian queries at later positions attend to."""


from conformance.methods.brute import FUTURE, SINK, Brute, plain, sinks
from conformance.methods.policies import Layer, Row, Score, groups, normalise, sink_of, top
from conformance.oracles.boxes import cos, dot, fsum, leaves, sin, sqrt
from conformance.strategies.policy_inputs import Inputs, Kept


def rotate(x: Row, position: float, inv_freq: Row, factor: float) -> list[float]:
    half = len(inv_freq)
    out = [0.0] * (2 * half)
    for f, omega in enumerate(inv_freq):
        c, s = factor * cos(position * omega), factor * sin(position * omega)
        out[f] = x[f] * c - x[f + half] * s
        out[f + half] = x[f + half] * c + x[f] * s
    return out


def expected_attention(layer: Layer, inv_freq: Row, factor: float, N_sink: int, N_future: int) -> list[Score]:
    """E exp(z) of a Gaussian query under the mean rotation of the next N_future positions."""
    n, d = len(layer["k"][0]), len(layer["k"][0][0])
    if n <= N_sink:
        return [[None] * n for _ in layer["k"]]
    found: list[Score] = []
    ahead = range(n, n + N_future)
    basis = [[float(a == b) for b in range(d)] for a in range(d)]
    columns = [
        [fsum(x) / N_future for x in zip(*(rotate(e, p, inv_freq, factor) for p in ahead), strict=True)]
        for e in basis
    ]
    for g, group in enumerate(groups(layer)):
        keys = layer["k"][g][N_sink:]
        total = [0.0] * len(keys)
        for h in group:
            # Rotation back by the same angle, and both factors taken off.
            pre = [
                [x / factor**2 for x in rotate(q, -at, inv_freq, factor)] for at, q in enumerate(layer["q"][h])
            ][N_sink:]
            turned = [
                [fsum(q[a] * columns[a][b] for a in range(d)) for b in range(d)] for q in pre
            ]
            mean = [fsum(x) / len(turned) for x in zip(*turned, strict=True)]
            z = []
            for key in keys:
                projections = [dot([a - b for a, b in zip(q, mean, strict=True)], key) for q in turned]
                variance = fsum(x * x for x in projections) / len(projections)
                z.append(layer["scaling"] * dot(mean, key) + layer["scaling"] ** 2 * variance / 2)
            total = [a + b / len(group) for a, b in zip(total, normalise(z, sink_of(layer, [h])), strict=True)]
        norms = [sqrt(dot(v, v)) for v in layer["v"][g][N_sink:]]
        found.append([*[None] * N_sink, *[a * b for a, b in zip(total, norms, strict=True)]])
    return found


def kept(inputs: Inputs, B: int, N_sink: int, N_future: int) -> Kept:
    found = Kept()
    for view in inputs.layers:
        rows = expected_attention(plain(view), leaves(inputs.inv_freq), inputs.factor, N_sink, N_future)
        found += [top(row, B) for row in rows]
    return found


BRUTES = [
    Brute(
        "PO-EXPECTED-ATTENTION", "expected-attention", kept,
        {"N_sink": SINK, "N_future": FUTURE}, SINK, sinks,
        published={"factor": 1.0, "N_sink": 4, "N_future": 512}),
]
