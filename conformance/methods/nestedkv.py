"""Kept sets of NestedKV by brute force: plain lists, from the paper's text and Appendix A."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from conformance.methods.brute import SINK, SLOW, Brute, Parts, by_layer, shared, sinks
from conformance.methods.keydiff import keydiff
from conformance.methods.policies import Score, best, competition_shares, top
from conformance.oracles.box import Undecided
from conformance.oracles.boxes import leaves
from conformance.oracles.choices import Answer, surely
from conformance.oracles.nestedkv import Row, scores
from conformance.strategies.numbers import NESTED
from conformance.strategies.policy_inputs import Inputs, Kept
from spec.parameters import NESTEDKV, NestedKVParameters


def tokens(r: str, N: int) -> int:
    """Return the number of tokens that are kept if the decimal share r is evicted, counted up from zero."""
    kept = 0
    while Fraction(kept + 1) <= (1 - Fraction(r)) * N:
        kept += 1
    return kept


def kept(rows: Sequence[Row], B: int, p: Any) -> list[Answer]:
    """Return the kept sets of a layer.

    Sinks have the score infinity. Each head keeps a quota of its best tokens, then the layer keeps the best remaining
    pairs. In the last choice, rounding may exchange tokens only inside one head, because the shares of the heads must
    not change.
    """
    pinned = [[math.inf if i < p.N_sink else x for i, x in enumerate(row)] for row in rows]
    quotas = [surely(best(range(len(row)), row, int(p.alpha_s * B // 1))) for row in pinned]
    chosen = {(h, i) for h, tokens in enumerate(quotas) for i in tokens}
    pairs = [(h, i) for h, row in enumerate(pinned) for i in range(len(row)) if (h, i) not in chosen]
    more = best(range(len(pairs)), [pinned[h][i] for h, i in pairs], len(rows) * min(B, len(rows[0])) - len(chosen))
    chosen |= {pairs[at] for at in more}
    open_ = {pairs[at] for at in more.open}
    if len({h for h, _ in open_}) > 1:
        raise Undecided("a head's share")
    return [
        Answer([i for g, i in chosen - open_ if g == h], sorted(i for g, i in open_ if g == h),
               sum(g == h for g, _ in chosen & open_))
        for h in range(len(rows))
    ]


def sinks_apart(inputs: Inputs, B: int, parameters: NestedKVParameters) -> list[Score]:
    """Return the scores of all layers. Sinks have no score."""
    sink = parameters.N_sink
    rows = [scores(head, parameters) for view in inputs.layers for head in leaves(view.k)]
    return [[*[None] * sink, *row[sink:]][: len(row)] for row in rows]


def of_prompt(adaptive: bool) -> Callable[..., Kept]:
    def kept_sets(inputs: Inputs, B: int, parameters: NestedKVParameters) -> Kept:
        sets, sink = list[list[int]](), parameters.N_sink
        for view in inputs.layers:
            rows = [scores(head, parameters) for head in leaves(view.k)]
            if adaptive:
                sets += kept(rows, B, parameters)
            else:
                sets += [top([*[None] * sink, *row[sink:]][: len(row)], B) for row in rows]
        return sets

    return kept_sets


def without_continuum(inputs: Inputs, B: int, parameters: NestedKVParameters) -> Kept:
    return shared(keydiff, competition_shares)(inputs, B, parameters.alpha_s)


BRUTES = [
    Brute(
        "NK-NESTEDKV", "nestedkv", of_prompt(True), {"parameters": NESTED}, SINK, sinks,
        published={"parameters": NESTEDKV}, longest=SLOW,
        parts=Parts("sink=N_sink/heads=quota:safeguard=alpha_s", rows=sinks_apart),
    ),
    Brute(
        "NK-ABLATIONS", "nestedkv-without-continuum", without_continuum, {"parameters": NESTED},
        published={"parameters": NESTEDKV}, parts=Parts("heads=quota:safeguard=alpha_s", keydiff),
    ),
    Brute(
        "NK-ABLATIONS", "nestedkv-without-adaptive", of_prompt(False),
        {"parameters": NESTED}, SINK, sinks, published={"parameters": NESTEDKV},
        longest=SLOW, parts=Parts("sink=N_sink", rows=sinks_apart),
    ),
    Brute("NK-ABLATIONS", "nestedkv-without-both", by_layer(keydiff), parts=Parts("", keydiff)),
]
