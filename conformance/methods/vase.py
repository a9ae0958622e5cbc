"""VaSE by brute force, with the functions of `methods.policies`. No code is shared with the reference or with NumPy."""

import math
from collections.abc import Sequence
from fractions import Fraction

from conformance.methods.brute import HALF, KERNEL, N_SINK, SEED, Brute, W, after_steps, newest, plain
from conformance.methods.policies import Layer, Score, at_places, groups, padded, pool, rows_of, top, window
from conformance.oracles.boxes import column_sums, fsum, largest, least, log, over
from conformance.oracles.choices import Answer, surely
from conformance.strategies.policy_inputs import Inputs, Kept

WORD = 2**64


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return four words of Philox4x64-10 for a counter of four words and a key of two words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [b // WORD ^ c[1] ^ k[0], b % WORD, a // WORD ^ c[3] ^ k[1], a % WORD]
        k = [(k[0] + 0x9E3779B97F4A7C15) % WORD, (k[1] + 0xBB67AE8584CAA73B) % WORD]
    return c


def uniforms(seed: int, group: int, seen: int, n: int) -> list[float]:
    words = [word for block in range(n // 4 + 1) for word in philox([block + 1, group, seen, 0], [seed, 0])]
    return [float((Fraction(word // 2**12) + Fraction(1, 2)) / 2**52) for word in words[:n]]


def ranges(layer: Layer, W: int) -> list[Score]:
    n, past = len(layer["k"][0]), window(layer, W)
    return [padded([largest(value) - least(value) for value in head[:past]], n) for head in layer["v"]]


def attention(layer: Layer, W: int, kernel: int) -> list[list[float]]:
    """Return the attention of each KV head.

    Each query has a softmax over the keys before the window. The queries are averaged and pooled, then the heads are
    averaged.
    """
    past, n, result = window(layer, W), len(layer["k"][0]), []
    if past == 0:
        return [[] for _ in layer["k"]]
    before = {**layer, "k": [head[:past] for head in layer["k"]]}
    for group in groups(layer):
        heads = []
        for h in group:
            rows = rows_of(before, h, layer["q"][h][past - n :], [past] * (n - past))
            heads.append(pool(over(column_sums(rows), len(rows)), kernel, "mean"))
        result.append([fsum(column) / len(group) for column in zip(*heads, strict=True)])
    return result


def kept(wide: Score, A: Sequence[float], u: Sequence[float], B: int, N_sink: int, share: Fraction) -> Answer:
    """Return the tokens with wide values, and the winners of a race.

    Each other token arrives after an exponential time, with its attention as the rate.
    """
    n = len(wide)
    held = [None if at < N_sink else x for at, x in enumerate(wide)]
    pinned = sum(x is None for x in held)
    early = surely(top(held, min(max(B, pinned), max(pinned, pinned + math.floor(share * B) - N_sink))))
    race: Score = [None if at in early else A[at] / -log(u[at]) for at in range(n)]
    return top(race, B)


def vase(
    layer: Layer, first: int, seen: int, positions: Sequence[Sequence[int]], B: int, W: int, kernel: int, N_sink: int,
    share: Fraction, seed: int,
) -> list[Answer]:
    """Return the slots that each KV head keeps of its stored tokens.

    `first` is the group of the first head, and `seen` is the number of tokens seen.
    """
    rows = zip(ranges(layer, W), attention(layer, W, kernel), strict=True)
    u = [uniforms(seed, first + g, seen, seen) for g in range(len(positions))]
    return [
        kept(wide, A, [u[g][at] for at in positions[g]], B, N_sink, share) for g, (wide, A) in enumerate(rows)
    ]


def stored(layer: Layer, live: Sequence[Sequence[int]], seen: int) -> Layer:
    """Return the layer with the queries so far, and the live keys and values of each KV head."""
    cached = {name: [at_places(*one) for one in zip(layer[name], live, strict=True)] for name in ("k", "v")}
    return {**layer, "q": [rows[:seen] for rows in layer["q"]], **cached}


def of_steps(
    inputs: Inputs, B: int, W: int, kernel: int, N_sink: int, share: Fraction, seed: int,
) -> Kept:
    layers, H_kv = [plain(view) for view in inputs.layers], inputs.H_kv

    def decide(live: Sequence[Sequence[int]], seen: int) -> list[Answer]:
        result = list[Answer]()
        for first, layer in zip(range(0, len(live), H_kv), layers, strict=True):
            head_sets = live[first : first + H_kv]
            result += vase(stored(layer, head_sets, seen), first, seen, head_sets, B, W, kernel, N_sink, share, seed)
        return result

    return after_steps(decide, len(layers) * H_kv, inputs, B, every=W)


BRUTES = [
    Brute(
        "PO-VASE", "vase", of_steps,
        {"W": W, "kernel": KERNEL, "N_sink": N_SINK, "share": HALF, "seed": SEED}, N_SINK + W,
        lambda n, B: newest(n, B) | set(range(min(N_SINK, n))),
        published={"W": 64, "kernel": 5, "N_sink": 4, "share": Fraction(1, 4), "seed": 0}, longest=1_100,
        scored=False, decoded=True),
]
