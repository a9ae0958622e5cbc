"""What published policies keep, by brute force, at the small constants of `policy_cases`."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.oracles import cake as cake_oracle
from conformance.assurance.oracles import kvzip as kvzip_oracle
from conformance.assurance.oracles import policies as oracle
from conformance.assurance.oracles import triattention as tri_oracle
from conformance.assurance.oracles import weighed
from conformance.assurance.oracles.nestedkv import kept as kept_of_a_layer
from conformance.assurance.oracles.signatures import signatures
from conformance.assurance.oracles.vase import vase
from conformance.oracles import diversity as alpha_oracle
from conformance.oracles import nestedkv
from conformance.strategies.keys import NESTED
from conformance.strategies.policy_inputs import TEMPLATE, Inputs, Kept, calibrated, identity, observation
from reference import policies
from reference.triattention import OFFSETS, Mode
from spec.policy import LayerView, Policy

__all__ = [
    "BLOCK", "C_CHUNK", "FUTURE", "HALF", "KERNEL", "LAG", "LAM", "N_SINK", "REHEARSED", "SAFEGUARD", "SEED",
    "SINK", "TAU", "W", "alpha_kept", "both_ends", "by_layer", "cake", "chunks", "chunks_described", "critical",
    "defensivekv", "diversity", "diversity_heads", "expected_attention", "h2o", "h2o_described", "h2o_rows",
    "kvzip", "nested", "newest_half", "plain", "plain_values", "pyramid", "rehearsed", "sampled", "shared", "sinks",
    "streaming_heads", "tri_expected", "tri_rows", "triattention", "vatp", "window",
]

W, KERNEL, C_CHUNK, SINK, FUTURE, LAG, BLOCK = 3, 3, 4, NESTED.N_sink, 5, 4, 4
REHEARSED: dict[str, Any] = {"template": TEMPLATE, "N_sink": SINK, "N_recent": W, "chunk": 5, "overlap": 2}
LAM = 0.5
SAFEGUARD, TAU = Fraction(1, 5), 0.4
N_SINK, HALF, SEED = 1, Fraction(1, 2), 5  # of VaSE: small sets have wide values and a sample


def plain(view: LayerView) -> dict[str, Any]:
    """The layer as lists, for the oracles."""
    return {
        "q": view.q.tolist(), "k": view.k.tolist(), "v": None if view.v is None else view.v.tolist(),
        "scaling": view.scaling, "softcap": view.softcap,
    }


def rehearsed(view: LayerView) -> dict[str, Any]:
    """The same with what was asked while chunks were repeated."""
    each = [
        {"start": x.start, "stop": x.stop, "q": x.q.tolist(), "k": x.k.tolist(), "norms": x.norms.tolist()}
        for x in view.repeats or ()
    ]
    return {**plain(view), "repeats": each}


def by_layer(score: Callable[..., list[oracle.Score]], *constants: Any) -> Callable[[Inputs, int], Kept]:
    """The best B tokens of every row of every layer."""
    def expected(inputs: Inputs, B: int) -> Kept:
        return [oracle.top(row, B) for view in inputs.layers for row in score(plain(view), *constants)]

    return expected


def pyramid(score: Callable[..., list[oracle.Score]], *constants: Any) -> Callable[[Inputs, int], Kept]:
    def expected(inputs: Inputs, B: int) -> Kept:
        shares = oracle.pyramid_shares(Fraction(B), min(W, inputs.n), len(inputs.layers), inputs.n, 20)
        return [
            oracle.top(row, share) for view, share in zip(inputs.layers, shares, strict=True)
            for row in score(plain(view), *constants)
        ]

    return expected


def shared(
    score: Callable[..., list[oracle.Score]], shares: Callable[..., list[int]], safeguard: Fraction, *constants: Any,
) -> Callable[[Inputs, int], Kept]:
    """Heads of a layer share its budget."""
    def expected(inputs: Inputs, B: int) -> Kept:
        found = []
        for view in inputs.layers:
            rows = score(plain(view), *constants)
            found += [oracle.top(row, b) for row, b in zip(rows, shares(rows, B, safeguard), strict=True)]
        return found

    return expected


def h2o_rows(inputs: Inputs, B: int) -> list[oracle.Score]:
    rows = [row for view in inputs.layers for row in oracle.accumulated(plain(view))]
    return [[*row[: max(0, len(row) - B // 2)], *[None] * min(len(row), B // 2)] for row in rows]


def h2o(inputs: Inputs, B: int) -> Kept:
    return [oracle.top(row, B) for row in h2o_rows(inputs, B)]


def h2o_described(layer: oracle.Layer) -> list[oracle.Score]:
    past = oracle.window(layer, W)
    return [[*row[:past], *[None] * (len(row) - past)] for row in oracle.accumulated(layer)]


def chunks(N_reuse: int) -> Callable[[Inputs, int], Kept]:
    def expected(inputs: Inputs, B: int) -> Kept:
        found = []
        for at in range(len(inputs.layers)):
            layer = plain(inputs.layers[at - at % N_reuse])
            past, rows = oracle.window(layer, W), oracle.last_rows(layer, W)
            members: oracle.Score = [sum(q[i] for head in rows for q in head) for i in range(past)]
            found.append(oracle.chunk_selection([*members, *[None] * (inputs.n - past)], C_CHUNK, B))
        return found

    return expected


def chunks_described(inputs: Inputs, B: int) -> Kept:
    rows = [oracle.accumulated(plain(view)) for view in inputs.layers]
    members = [[sum(r for r in column if r is not None) for column in zip(*layer, strict=True)] for layer in rows]
    return [oracle.chunk_selection(layer, C_CHUNK, B) for layer in members]


def expected_attention(inputs: Inputs, B: int) -> Kept:
    found = []
    for view in inputs.layers:
        rows = oracle.expected_attention(plain(view), inputs.inv_freq.tolist(), inputs.factor, SINK, FUTURE)
        found += [oracle.top(row, B) for row in rows]
    return found


def defensivekv(inputs: Inputs, B: int) -> Kept:
    found = []
    for view, W_o in zip(inputs.layers, inputs.W_o, strict=True):
        rows = oracle.defensive(plain(view), W_o.tolist(), W, KERNEL, B)
        found += [oracle.top(r, b) for r, b in zip(rows, oracle.competition_shares(rows, B, Fraction(0)), strict=True)]
    return found


def critical(
    score: Callable[..., list[oracle.Score]], shares: Callable[[list[oracle.Score], int], Sequence[int]],
) -> Callable[[Inputs, int], Kept]:
    """In two stages inside each head's share."""
    def expected(inputs: Inputs, B: int) -> Kept:
        found = []
        for view, W_o in zip(inputs.layers, inputs.W_o, strict=True):
            rows = score(plain(view), W, KERNEL)
            found += weighed.critical(plain(view), W_o.tolist(), rows, shares(rows, B))
        return found

    return expected


def cake(inputs: Inputs, B: int) -> Kept:
    preferences = [cake_oracle.preference(plain(view), W, 1.0, 1.0) for view in inputs.layers]
    shares = cake_oracle.preferred_shares(preferences, B, W, inputs.n)
    return [
        oracle.top(row, share) for view, share in zip(inputs.layers, shares, strict=True)
        for row in cake_oracle.scores(plain(view), W, KERNEL, 200.0)
    ]


def kvzip(plus: bool, shares: Callable[[list[oracle.Score], int], Sequence[int]]) -> Callable[[Inputs, int], Kept]:
    """The shares are of all layers together."""
    def expected(inputs: Inputs, B: int) -> Kept:
        seen = observation(policies.kvzip(**REHEARSED), inputs).layers
        rows = []
        for at, view in seen.items():
            layer = {**rehearsed(view), "v": np.asarray(inputs.layers[at].v).tolist()}
            rows += kvzip_oracle.scores(layer, SINK, inputs.W_o[at].tolist() if plus else None)
        return [oracle.top(row, share) for row, share in zip(rows, shares(rows, B), strict=True)]

    return expected


def streaming_heads(inputs: Inputs, B: int) -> Kept:
    """A head's share is of the sinks and the newest tokens."""
    scores = [max(abs(x) for key in head for x in key) for view in inputs.layers for head in view.k.tolist()]
    return [
        sorted({*range(min(SINK, share)), *range(max(0, inputs.n - share + SINK), inputs.n)})
        for share in kvzip_oracle.full_heads(scores, inputs.n, B, SINK + W)
    ]


def vatp(inputs: Inputs, B: int) -> Kept:
    held = sinks(inputs.n, B) | newest_half(inputs.n, B)
    rows = [row for view in inputs.layers for row in weighed.vatp(plain(view))]
    return [oracle.top([None if at in held else x for at, x in enumerate(row)], B) for row in rows]


def sampled(inputs: Inputs, B: int) -> Kept:
    everything = [range(inputs.n)] * inputs.H_kv
    return [
        kept for at, view in enumerate(inputs.layers) for kept in vase(
            plain(view), at * inputs.H_kv, inputs.n, everything, B, W, KERNEL, N_SINK, HALF, SEED
        )
    ]


def triattention(inputs: Inputs, mode: Mode, pin_prompt: int = 0, slack: int = 128) -> Policy:
    return policies.triattention(calibrated(inputs), identity(inputs), mode, pin_prompt, slack)


def tri_rows(
    inputs: Inputs, mode: str, live: Callable[[int], Sequence[int]], t: int, pinned: int,
) -> list[oracle.Score]:
    """A row per kept set over its live positions; `live` by layer and KV head."""
    H_kv, Z = inputs.H_kv, []
    for at, view in enumerate(inputs.layers):
        q, k, G = view.q.tolist(), view.k.tolist(), len(view.q) // H_kv
        means = [tri_oracle.statistics(head) for head in q]
        Z.append([[
            tri_oracle.z_score(
                [tri_oracle.score(k[g][p], p, t, *means[g * G + h], inputs.inv_freq.tolist(), inputs.factor, OFFSETS)
                 for p in live(at * H_kv + g)],
                [p < pinned for p in live(at * H_kv + g)],
            ) for h in range(G)
        ] for g in range(H_kv)])
    return tri_oracle.joined(Z, mode)


def tri_expected(mode: str) -> Callable[[Inputs, int], Kept]:
    return lambda i, B: [oracle.top(row, B) for row in tri_rows(i, mode, lambda g: range(i.n), i.n, 0)]


def plain_values(inputs: Inputs) -> Any:
    return [np.asarray(view.v).tolist() for view in inputs.layers]


def alpha_kept(row: oracle.Score, V: Any, B: int, lam: float) -> list[int]:
    """The tokens without a score are kept already."""
    retained = [i for i, x in enumerate(row) if x is None]
    return alpha_oracle.alpha([0.0 if x is None else x for x in row], V, retained, min(B, len(row)), lam)


def diversity(inputs: Inputs, B: int) -> Kept:
    (row,) = tri_rows(inputs, "global", lambda g: range(inputs.n), inputs.n, 0)
    (V,) = signatures(plain_values(inputs), "flat")
    return [alpha_kept(row, V, B, LAM)]


def diversity_heads(inputs: Inputs, B: int) -> Kept:
    V, found = signatures(plain_values(inputs), "head"), list[list[int]]()
    for view in inputs.layers:
        rows = oracle.snapkv(plain(view), W, KERNEL)
        for row, b in zip(rows, oracle.adaptive_shares(rows, B, SAFEGUARD), strict=True):
            found.append(alpha_kept(row, V[len(found)], b, LAM))
    return found


def nested(adaptive: bool) -> Callable[[Inputs, int], Kept]:
    def expected(inputs: Inputs, B: int) -> Kept:
        found = []
        for view in inputs.layers:
            rows = [nestedkv.scores(head, NESTED) for head in view.k.tolist()]
            if adaptive:
                found += kept_of_a_layer(rows, B, NESTED)
            else:
                found += [oracle.top([*[None] * SINK, *row[SINK:]][: len(row)], B) for row in rows]
        return found

    return expected


def window(n: int, B: int) -> set[int]:
    return set(range(max(0, n - W), n))


def sinks(n: int, B: int) -> set[int]:
    return set(range(min(SINK, n)))


def both_ends(n: int, B: int) -> set[int]:
    return sinks(n, B) | window(n, B)


def newest_half(n: int, B: int) -> set[int]:
    return set(range(max(0, n - B // 2), n))
