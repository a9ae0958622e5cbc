"""Every published policy at small constants, with its brute-force answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.oracles import cake as cake_oracle
from conformance.assurance.oracles import kvzip as kvzip_oracle
from conformance.assurance.oracles import policies as oracle
from conformance.assurance.oracles import triattention as tri_oracle
from conformance.assurance.oracles import weighed
from conformance.assurance.oracles.blocks import best_blocks, crushed
from conformance.assurance.oracles.morphkv import morphkv
from conformance.assurance.oracles.nestedkv import kept as kept_of_a_layer
from conformance.assurance.oracles.signatures import signatures
from conformance.assurance.oracles.vase import vase
from conformance.oracles import diversity as alpha_oracle
from conformance.oracles import nestedkv
from conformance.strategies.keys import NESTED
from conformance.strategies.policy_inputs import TEMPLATE, Inputs, Kept, calibrated, identity, observation
from reference import policies
from reference.policies.budgets import Above
from reference.triattention import OFFSETS, Mode
from spec.policy import LayerView, Policy

__all__ = [
    "BLOCK", "CASES", "LAM", "REHEARSED", "Case", "alpha_kept", "plain", "plain_values", "rehearsed", "tri_rows",
    "triattention",
]

W, KERNEL, C_CHUNK, SINK, FUTURE, LAG, BLOCK = 3, 3, 4, NESTED.N_sink, 5, 4, 4
REHEARSED: dict[str, Any] = {"template": TEMPLATE, "N_sink": SINK, "N_recent": W, "chunk": 5, "overlap": 2}
LAM = 0.5
SAFEGUARD, TAU = Fraction(1, 5), 0.4
N_SINK, HALF, SEED = 1, Fraction(1, 2), 5  # of VaSE: small sets have wide values and a sample


@dataclass(frozen=True)
class Case:
    """A policy, and what it keeps of an input at B tokens, by brute force."""

    item: str
    policy: Callable[[Inputs], Policy]
    expected: Callable[[Inputs, int], Kept]
    floor: int = 0
    guaranteed: Callable[[int, int], set[int]] = field(default=lambda n, B: set())
    """Positions of n that every kept set of B tokens holds."""


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


CASES: dict[str, Case] = {
    "streamingllm": Case(
        "PO-STREAMINGLLM", lambda i: policies.streaming_llm(SINK),
        lambda i, B: [sorted({*range(min(SINK, i.n)), *range(max(0, i.n - (B - SINK)), i.n)})], SINK, sinks,
    ),
    "h2o": Case("PO-H2O", lambda i: policies.h2o(), h2o, 0, newest_half),
    "snapkv": Case(
        "PO-SNAPKV", lambda i: policies.snapkv(W, KERNEL), by_layer(oracle.snapkv, W, KERNEL), W, window
    ),
    "pyramidkv": Case(
        "PO-PYRAMIDKV", lambda i: policies.pyramidkv(W, KERNEL), pyramid(oracle.snapkv, W, KERNEL), W, window
    ),
    "chunkkv": Case("PO-CHUNKKV", lambda i: policies.chunkkv(C_CHUNK, W, 2), chunks(2), W, window),
    "tova": Case("PO-TOVA", lambda i: policies.tova(), by_layer(oracle.tova)),
    "keydiff": Case("PO-KEYDIFF", lambda i: policies.keydiff(), by_layer(oracle.keydiff)),
    "knorm": Case("PO-KNORM", lambda i: policies.knorm(), by_layer(oracle.knorm)),
    "expected-attention": Case(
        "PO-EXPECTED-ATTENTION", lambda i: policies.expected_attention(i.inv_freq, i.factor, SINK, FUTURE),
        expected_attention, SINK, sinks,
    ),
    "adakv": Case(
        "PO-ADAKV", lambda i: policies.adakv(W, KERNEL, SAFEGUARD),
        shared(oracle.adakv, oracle.adaptive_shares, SAFEGUARD, W, KERNEL), W, window,
    ),
    "lagkv": Case("PO-LAGKV", lambda i: policies.lagkv(SINK, LAG), by_layer(oracle.lagkv, SINK, LAG), SINK, sinks),
    "rkv": Case("PO-RKV", lambda i: policies.rkv(W, KERNEL), by_layer(oracle.rkv, W, KERNEL, 0.1), W, window),
    "caote": Case("PO-CAOTE", lambda i: policies.caote(), by_layer(oracle.caote)),
    "defensivekv": Case(
        "PO-DEFENSIVEKV", lambda i: policies.defensivekv(dict(enumerate(i.W_o)), W, KERNEL), defensivekv, W, window
    ),
    "epicache": Case(
        "PO-EPICACHE", lambda i: policies.epicache(),
        shared(oracle.epicache, oracle.competition_shares, Fraction(0)),
    ),
    "morphkv": Case("PO-MORPHKV", lambda i: policies.morphkv(W), by_layer(morphkv, W, "sum"), W, window),
    "vatp": Case(
        "PO-VATP", lambda i: policies.vatp(SINK), vatp, 2 * SINK, lambda n, B: sinks(n, B) | newest_half(n, B)
    ),
    "criticalkv": Case(
        "PO-CRITICALKV", lambda i: policies.criticalkv(dict(enumerate(i.W_o)), W, KERNEL),
        critical(oracle.snapkv, lambda rows, B: [B] * len(rows)), W, window,
    ),
    "critical-adakv": Case(
        "PO-CRITICALKV", lambda i: policies.critical_adakv(dict(enumerate(i.W_o)), W, KERNEL, SAFEGUARD),
        critical(oracle.adakv, lambda rows, B: oracle.adaptive_shares(rows, B, SAFEGUARD)), W, window,
    ),
    "vase": Case(
        "PO-VASE", lambda i: policies.vase(W, KERNEL, N_SINK, HALF, SEED), sampled, N_SINK + W,
        lambda n, B: window(n, B) | set(range(min(N_SINK, n))),
    ),
    "threshold": Case(
        "PO-THRESHOLD", lambda i: replace(policies.snapkv(W, KERNEL), budgets=Above(TAU)), lambda i, B: [
            oracle.top(row, min(B, sum(x is None or x > TAU for x in row)))
            for view in i.layers for row in oracle.snapkv(plain(view), W, KERNEL)
        ], W, window,
    ),
    "cake": Case("PO-CAKE", lambda i: policies.cake(W, KERNEL), cake, W, window),
    "blocks": Case(
        "PO-BLOCKS", lambda i: policies.in_blocks(policies.snapkv(W, KERNEL), BLOCK), lambda i, B: [
            best_blocks(row, BLOCK, B) for view in i.layers for row in oracle.snapkv(plain(view), W, KERNEL)
        ], BLOCK, window,
    ),
    "blocks-of-h2o": Case(
        "PO-BLOCKS", lambda i: policies.in_blocks(policies.h2o(), BLOCK),
        lambda i, B: [best_blocks(row, BLOCK, B) for row in h2o_rows(i, B)], BLOCK, newest_half,
    ),
    "kvcrush": Case(
        "PO-KVCRUSH", lambda i: policies.kvcrush(W, KERNEL, BLOCK, HALF), lambda i, B: [
            own for view in i.layers
            for own in crushed(oracle.snapkv(plain(view), W, KERNEL), BLOCK, B, HALF, "alternating")
        ], BLOCK, window,
    ),
    "kvzip": Case(
        "PO-KVZIP", lambda i: policies.kvzip(**REHEARSED), kvzip(False, kvzip_oracle.global_shares), SINK + W, both_ends
    ),
    "kvzip-uniform": Case(
        "PO-KVZIP", lambda i: policies.kvzip_uniform(**REHEARSED), kvzip(False, lambda rows, B: [B] * len(rows)),
        SINK + W, both_ends,
    ),
    "kvzip-plus": Case(
        "PO-KVZIP-PLUS", lambda i: policies.kvzip_plus(dict(enumerate(i.W_o)), **REHEARSED),
        kvzip(True, kvzip_oracle.global_shares), SINK + W, both_ends,
    ),
    "h2o-described": Case(
        "PO-H2O-DESCRIBED", lambda i: policies.h2o_described(W), by_layer(h2o_described), W, window
    ),
    "pyramidkv-described": Case(
        "PO-PYRAMIDKV-DESCRIBED", lambda i: policies.pyramidkv_described(W), pyramid(h2o_described), W, window
    ),
    "chunkkv-described": Case(
        "PO-CHUNKKV-DESCRIBED", lambda i: policies.chunkkv_described(C_CHUNK), chunks_described
    ),
    "triattention": Case("TA-POLICY", lambda i: triattention(i, "global"), tri_expected("global")),
    "triattention-by-head": Case("TA-POLICY", lambda i: triattention(i, "head"), tri_expected("head")),
    "triattention-by-layer-and-head": Case(
        "TA-POLICY", lambda i: triattention(i, "layer and head"), tri_expected("layer and head")
    ),
    "diversity": Case("DV-POLICY", lambda i: policies.diverse(triattention(i, "global"), LAM), diversity),
    "diversity-in-adakv": Case(
        "DV-POLICY",
        lambda i: policies.diverse(policies.with_adaptive_budgets(policies.snapkv(W, KERNEL), SAFEGUARD), LAM, "head"),
        diversity_heads, W, window,
    ),
    # NestedKV refuses a budget below its sinks; here each B is raised to them, so that any B can be drawn.
    "nestedkv": Case(
        "NK-NESTEDKV", lambda i: replace(policies.nestedkv(NESTED), floor=SINK), nested(True), SINK, sinks
    ),
    "nestedkv-without-continuum": Case(
        "NK-ABLATIONS", lambda i: policies.nestedkv_without_continuum(NESTED),
        shared(oracle.keydiff, oracle.competition_shares, NESTED.alpha_s),
    ),
    "nestedkv-without-adaptive": Case(
        "NK-ABLATIONS", lambda i: replace(policies.nestedkv_without_adaptive(NESTED), floor=SINK), nested(False),
        SINK, sinks,
    ),
    "nestedkv-without-both": Case(
        "NK-ABLATIONS", lambda i: policies.nestedkv_without_both(), by_layer(oracle.keydiff)
    ),
}
