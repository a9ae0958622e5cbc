"""Every published policy at small constants, with its brute-force answer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction

from conformance.assurance.oracles import kvzip as kvzip_oracle
from conformance.assurance.oracles import policies as oracle
from conformance.assurance.oracles.blocks import best_blocks, crushed
from conformance.assurance.oracles.morphkv import morphkv
from conformance.assurance.strategies.policy_expected import (
    BLOCK,
    C_CHUNK,
    FUTURE,
    HALF,
    KERNEL,
    LAG,
    LAM,
    N_SINK,
    REHEARSED,
    SAFEGUARD,
    SEED,
    SINK,
    TAU,
    W,
    both_ends,
    by_layer,
    cake,
    chunks,
    chunks_described,
    critical,
    defensivekv,
    diversity,
    diversity_heads,
    expected_attention,
    h2o,
    h2o_described,
    h2o_rows,
    kvzip,
    nested,
    newest_half,
    plain,
    pyramid,
    sampled,
    shared,
    sinks,
    streaming_heads,
    tri_expected,
    triattention,
    vatp,
    window,
)
from conformance.strategies.keys import NESTED
from conformance.strategies.policy_inputs import Inputs, Kept, calibrated, identity
from reference import policies
from reference.policies.budgets import Above
from spec.policy import Policy

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A policy, and what it keeps of an input at B tokens, by brute force."""

    item: str
    policy: Callable[[Inputs], Policy]
    expected: Callable[[Inputs, int], Kept]
    floor: int = 0
    guaranteed: Callable[[int, int], set[int]] = field(default=lambda n, B: set())
    """Positions of n that every kept set of B tokens holds."""


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
    "kvzip-heads": Case(
        "PO-KVZIP-HEADS", lambda i: policies.kvzip_heads(calibrated(i), identity(i), SINK, W), streaming_heads,
        SINK + W, both_ends,
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
