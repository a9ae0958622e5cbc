"""Published policies by brute force: plain lists, from the papers' text. No code is shared with the reference.

A layer is a dict of q (H lists of rows), k and v (H_kv lists of rows), scaling, softcap and sinks. `sinks` has H
numbers, or is None. A score is a list per kept set, with None for a protected token. Kept sets are sorted lists.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf
from typing import Any

from conformance.oracles.box import Box, Undecided
from conformance.oracles.box_attention import softmax_rows
from conformance.oracles.box_rows import Row as BoxRow
from conformance.oracles.box_rows import Table
from conformance.oracles.boxes import (
    column_extremes,
    column_sums,
    dots,
    each,
    exp,
    extended,
    fsum,
    largest,
    minus,
    over,
    tanh,
    times,
)
from conformance.oracles.choices import Answer, places, surely

DECODE = ("every step", "never")
"""Times of decisions after the prompt: KVCache-Factory and kvpress decide only once."""
Row = Sequence[float]
Layer = dict[str, Any]
Score = list[float | None]


def normalise(logits: Row, beside: Row = ()) -> Row:
    """Return the softmax. The logits in `beside` count in the denominator, but not in the result."""
    top_logit = largest([largest(logits), *beside])
    powers = each(exp, minus(logits, top_logit))
    total = fsum([fsum(powers), *(exp(x - top_logit) for x in beside)])
    result: Row = over(powers, total)
    return result


def with_heads(layer: Layer, heads: Sequence[int]) -> Layer:
    """Return the layer with these query heads only."""
    sinks = layer.get("sinks")
    return {**layer, "q": [layer["q"][h] for h in heads], "sinks": sinks and [sinks[h] for h in heads]}


def sink_of(layer: Layer, heads: Sequence[int]) -> list[float]:
    """Return the largest sink of some query heads, or an empty list if the layer has no sinks."""
    return [largest(layer["sinks"][h] for h in heads)] if layer.get("sinks") else []


def logits_of(layer: Layer, query: Row, keys: Sequence[Row]) -> Row:
    """Return the logits of one query on some keys, scaled and capped."""
    cap, result = layer.get("softcap"), times(dots(query, keys), layer["scaling"])
    capped: Row = result if cap is None else times(each(tanh, over(result, cap)), cap)
    return capped


def keys_of(layer: Layer, head: int) -> Any:
    """Return the keys that a query head reads: the keys of its group's KV head."""
    return layer["k"][head // (len(layer["q"]) // len(layer["k"]))]


def weights(layer: Layer, head: int, query: Row, visible: int) -> Row:
    """Return the softmax of one query over the first `visible` keys of its group's KV head.

    The other keys have weight zero.
    """
    return weights_on(layer, head, query, keys_of(layer, head), visible)


def weights_on(layer: Layer, head: int, query: Row, keys: Sequence[Row], visible: int) -> Row:
    """Return `weights` for given keys."""
    result: Row = extended(normalise(logits_of(layer, query, keys[:visible]), sink_of(layer, [head])), len(keys))
    return result


AT_ONCE = 256  # queries whose attention is in memory at once
MASKS = ("causal", "none")
GROUPS = ("mean", "maximum", "first head")
"""Combinations of a group's query heads."""


def last_rows(layer: Layer, W: int, mask: str = MASKS[0]) -> list[list[Row]]:
    """Return, per query head, the weights of the last W queries on all keys."""
    n = len(layer["k"][0])
    W = min(W, n)
    visible = range(n - W + 1, n + 1) if mask == "causal" else [n] * W
    return [rows_of(layer, h, rows[-W:], visible) for h, rows in enumerate(layer["q"])]


def over_group(rows: Sequence[Any], group: str = GROUPS[0]) -> Any:
    """Return one row from the rows of a group's heads."""
    if group == "first head":
        return rows[0]
    return over(column_sums(rows), len(rows)) if group == "mean" else column_extremes(largest, rows)


def rows_of(layer: Layer, head: int, queries: Sequence[Row], visible: Sequence[int]) -> list[Row]:
    """Return `weights` for some queries of a head."""
    return rows_on(layer, head, queries, keys_of(layer, head), visible)


def rows_on(
    layer: Layer, head: int, queries: Sequence[Row], keys: Sequence[Row], visible: Sequence[int],
) -> list[Row]:
    """Return `weights` for some queries of a head on given keys."""
    if isinstance(queries, Table) and isinstance(keys, Table):
        beside = sink_of(layer, [head])
        result: list[Any] = softmax_rows(queries, keys, visible, layer["scaling"], layer.get("softcap"), beside)
        return result
    return [weights_on(layer, head, q, keys, m) for q, m in zip(queries, visible, strict=True)]


def groups(layer: Layer) -> list[list[int]]:
    G = len(layer["q"]) // len(layer["k"])
    return [list(range(g * G, (g + 1) * G)) for g in range(len(layer["k"]))]


def window(layer: Layer, W: int) -> int:
    """Return the number of tokens before the observation window."""
    return max(0, len(layer["k"][0]) - W)


POOLED = ("around the token", "around the next token", "around the previous token")
"""Positions of the tokens of a pool."""


def pool(row: Row, kernel: int, kind: str, pooled: str = POOLED[0]) -> Any:
    half, out = kernel // 2, []
    shift = (POOLED.index(pooled) + 1) % 3 - 1
    if isinstance(row, BoxRow):
        beside = [row.moved(by, -inf if kind == "max" else 0.0) for by in range(shift - half, shift + half + 1)]
        return column_extremes(largest, beside) if kind == "max" else over(column_sums(beside), kernel)
    for i in range(shift, len(row) + shift):
        near = [row[j] for j in range(i - half, i + half + 1) if 0 <= j < len(row)]
        out.append(largest(near) if kind == "max" else fsum(near) / kernel)
    return out


def padded(row: Row, n: int) -> Score:
    return [*row, *[None] * (n - len(row))]


def accumulated(layer: Layer) -> list[Score]:
    """Return the attention that each key received from all queries of its group, summed over AT_ONCE queries first."""
    n = len(layer["q"][0])
    return [
        list(column_sums([
            column_sums(rows_of(layer, h, layer["q"][h][at : at + AT_ONCE], range(at + 1, n + 1)[:AT_ONCE]))
            for h in group for at in range(0, n, AT_ONCE)
        ]))
        for group in groups(layer)
    ]


def epicache(layer: Layer) -> list[Score]:
    n = len(layer["k"][0])
    return [
        list(map(largest, zip(*(weights(layer, h, q, n) for h in group for q in layer["q"][h]), strict=True)))
        for group in groups(layer)
    ]


def best(tokens: Sequence[int], score: Sequence[Any], number: int, pinned: Sequence[int] = ()) -> Answer:
    """Return the pinned tokens, and the `number` other tokens with the highest scores. The lower index comes first."""
    values = [score[i] for i in tokens]
    if not any(isinstance(x, Box) for x in values):
        return Answer([*pinned, *sorted(tokens, key=lambda i: (-score[i], i))[:number]])
    before = list(zip(tokens, places(values), strict=True))
    sure = [i for i, (_, most) in before if most < number]
    open_ = [i for i, (fewest, most) in before if fewest < number <= most]
    return Answer([*pinned, *sure], open_, min(number, len(tokens)) - len(sure))


def top(score: Sequence[float | None], B: int) -> Answer:
    """Return the protected tokens, then the tokens with the highest scores. The lower position comes first."""
    pinned = [i for i, s in enumerate(score) if s is None]
    result = best([i for i, s in enumerate(score) if s is not None], score, max(0, B - len(pinned)), pinned)
    result.scores = score
    return result


def placed(kept: Answer, live: Sequence[int]) -> Answer:
    """Convert a kept set from indices of live positions to positions."""
    open_ = sorted(live[i] for i in kept.open)
    return Answer([live[i] for i in kept if i not in kept.open], open_, sum(i in kept.open for i in kept))


def decoded(
    kept: Answer, tokens: Sequence[int], B: int, score: Callable[[int, list[int]], Score], decode: str, every: int = 1,
) -> Answer:
    """Return a kept set after some tokens are decoded. A step decides if `every` divides the number of tokens seen.

    `score` is called with a token and the live positions, including that of the token.
    """
    for at in tokens:
        live = [*surely(kept), at]
        row = [] if (at + 1) % every else score(at, live)
        kept = placed(top(row, B), live) if row and decode == "every step" and len(live) > B else Answer(live)
    return kept


def at_places(rows: Any, live: Sequence[int]) -> Any:
    """Return the vectors with these indices."""
    return rows[list(live)] if isinstance(rows, Table | BoxRow) else [rows[i] for i in live]


def seen_by(layer: Layer, at: int, live: Sequence[int]) -> list[Row]:
    """Return, per query head, the weights of one query on the live keys of its KV head.

    The live keys are the same for all heads, or the layer has only the heads of one group.
    """
    part = {**layer, "k": [at_places(head, live) for head in layer["k"]]}
    return [weights(part, h, rows[at], len(live)) for h, rows in enumerate(layer["q"])]


def chunk_totals(members: Sequence[float | None], c: int, totals: str = "sum") -> list[float]:
    """Return the sums, or the means, of runs of c tokens before the window."""
    scored = [x for x in members if x is not None]
    sums = [fsum(scored[a : a + c]) for a in range(0, len(scored), c)]
    return sums if totals == "sum" else [x / min(c, len(scored) - at * c) for at, x in enumerate(sums)]


def chunk_selection(members: Sequence[float | None], c: int, B: int, sums: str = "sum") -> list[int]:
    """Return the window, complete chunks by their sums, and the best tokens of the first chunk that does not fit."""
    totals = chunk_totals(members, c, sums)
    kept = [i for i, x in enumerate(members) if x is None]
    past = len(members) - len(kept)
    for chunk in sorted(range(len(totals)), key=lambda u: (-totals[u], u)):
        inside = sorted(range(chunk * c, min((chunk + 1) * c, past)), key=lambda i: (-members[i], i))  # type: ignore[operator]
        kept += inside[: max(0, B - len(kept))]
    return sorted(kept)


def whole(targets: Sequence[Any], total: int | None = None) -> list[int]:
    """Round targets down, then add one to the targets with the largest remainders until the total is reached."""
    shares = [int(t // 1) for t in targets]
    left = {g: t % 1 for g, t in enumerate(targets)}
    for _ in range((total or int(sum(targets))) - sum(shares)):
        g = max(left, key=lambda g: (left[g], -g))
        shares[g] += 1
        del left[g]
    return shares


def pyramid_shares(B: Fraction, W: int, L: int, n: int, beta: int) -> list[int]:
    """Return the number of tokens of each layer, including the window, with a mean of B."""
    past = Fraction(n - W)
    base = min(B - W, past)
    if L == 1 or base == past:
        return whole([W + base] * L)
    first, last = 2 * base - base / beta, base / beta
    if first >= past:
        first, last = past, 2 * base - past
    return whole([W + (first * (L - 1 - layer) + last * layer) / (L - 1) for layer in range(L)])


def won(scores: Sequence[Sequence[float | None]], k: int, skip: Sequence[set[int]] | None = None) -> list[int]:
    """Return how many of the k best scores of a layer belong to each head, without the tokens to skip."""
    pool_ = [
        (h, s) for h, row in enumerate(scores) for i, s in enumerate(row)
        if s is not None and not (skip and i in skip[h])
    ]
    chosen = best(range(len(pool_)), [s for _, s in pool_], max(0, k))
    if len({pool_[at][0] for at in chosen.open}) > 1:
        raise Undecided("a head's share")
    heads = [pool_[at][0] for at in chosen]
    return [heads.count(h) for h in range(len(scores))]


def adaptive_parts(rows: Sequence[Score], total: int, safeguard: Fraction) -> list[int]:
    """Divide a layer's total among its heads by Ada-KV: wins blended with even shares, and largest remainders."""
    H, pinned = len(rows), sum(x is None for x in rows[0])
    open_ = min(total, H * len(rows[0])) - H * pinned
    targets = [w * (1 - safeguard) + Fraction(open_, H) * safeguard for w in won(rows, open_)]
    return [pinned + share for share in whole(targets)]


def competition_parts(rows: Sequence[Score], total: int, safeguard: Fraction) -> list[int]:
    """Divide a layer's total among its heads: first a quota for each head, then the best tokens of the layer."""
    H, n, pinned = len(rows), len(rows[0]), sum(x is None for x in rows[0])
    quota = min(max(int(safeguard * (total // H) // 1), pinned), n)
    first = [{i for i in surely(top(row, quota)) if row[i] is not None} for row in rows]
    held = [pinned + len(f) for f in first]
    more = won(rows, min(total, H * n) - sum(held), first)
    return [a + b for a, b in zip(held, more, strict=True)]


def adaptive_shares(rows: Sequence[Score], B: int, safeguard: Fraction) -> list[int]:
    return adaptive_parts(rows, len(rows) * B, safeguard)


def competition_shares(rows: Sequence[Score], B: int, safeguard: Fraction) -> list[int]:
    return competition_parts(rows, len(rows) * B, safeguard)


def best_blocks(score: Sequence[float | None], b: int, B: int) -> list[int]:
    """Return the tokens of the open block, of blocks with a protected token (None), and of the best blocks.

    Blocks are added in order of score until a block does not fit.
    """
    runs = [range(first, min(first + b, len(score))) for first in range(0, len(score), b)]
    kept = [run for run in runs if len(run) < b or any(score[i] is None for i in run)]
    left = [run for run in runs if run not in kept]
    while left:
        first = max(left, key=lambda run: (*worth(score[run.start : run.stop]), -run.start))
        if sum(map(len, kept)) + len(first) > B:
            break
        kept.append(first)
        left.remove(first)
    return sorted(i for run in kept for i in run)


def worth(scores: Sequence[float | None]) -> tuple[bool, float]:
    """Return the sum of scores, rounded after each token. A sum with NaN sorts below all others."""
    total = 0.0
    for x in scores:
        total = total + (x or 0.0)
    return (False, 0.0) if total != total else (True, total)


def two_stages(first: Score, second: Sequence[float | None], b: int, B: int, share: Fraction) -> list[int]:
    """Return CriticalKV's blocks: blocks for a share of the unprotected places, then blocks for all places."""
    pinned = [i for i, x in enumerate(first) if x is None]
    early = best_blocks(first, b, len(pinned) + (B - len(pinned)) * share // 1)
    return best_blocks([None if i in early else x for i, x in enumerate(second)], b, B)


def crushed(
    rows: Sequence[Score], b: int, B: int | Sequence[int], share: Fraction, anchor: str,
) -> list[list[int]]:
    """Return KVCrush's kept sets of a layer's heads. B is the share of each head, or of all heads.

    Each head keeps the best blocks. Of each run of the remaining blocks, it keeps the block nearest to the anchor.
    """
    n, open_ = len(rows[0]), len(rows[0]) % b
    runs = [range(first, first + b) for first in range(0, n - open_, b)]
    free = [run for run in runs if all(rows[0][i] is not None for i in run)]
    tokens = [i for run in free for i in run]
    good = [set(sorted(tokens, key=lambda i: (*(-x for x in worth(row[i : i + 1])), i))[: len(tokens) // 2])
            for row in rows]

    def anchored(g: int, at: int) -> bool:
        ones = sum(run[at] in good[g] for run in free)
        return {"alternating": at % 2 == 1, "mean": ones > len(free) - ones, "zeros": False, "ones": True}[anchor]

    far = {run: sum((i in above) is not anchored(g, at) for g, above in enumerate(good) for at, i in enumerate(run))
           for run in free}
    result = []
    for row, B_row in zip(rows, [B] * len(rows) if isinstance(B, int) else B, strict=True):
        places = max(0, (B_row - open_) // b - (len(runs) - len(free)))
        few = places * share // 1
        kept = set(best_blocks(row, b, B_row - few * b))
        left = sorted((run for run in free if run[0] not in kept), key=lambda run: (far[run], run[0]))
        r = min(few, len(left))
        result.append(sorted(kept.union(*(left[at * len(left) // r] for at in range(r)))))
    return result


DIGITS = frozenset("0123456789")


def asked(text: str, seen: int) -> int | None:
    """Return the number of tokens that a budget text asks for (CC-BUDGET-FORMS), or None if the text is invalid."""
    body = text.strip(" ")
    number = body.removesuffix("%")
    whole, point, part = number.partition(".")
    if len(text) > 64 or not whole + part or not DIGITS.issuperset(whole + part):
        return None
    if not point and number == body:
        return int(whole) if 0 < int(whole) < 2**63 else None
    hundredths = 100 if number != body else 1
    share = Fraction(int(whole + part), 10 ** len(part) * hundredths)
    return -(-share.numerator * seen // share.denominator) if 0 < share <= 1 else None


def best_units(values: Sequence[float], bounds: Sequence[int], pinned: Sequence[bool], B: int) -> list[int]:
    """Return the tokens of pinned units, and of the best other units until one does not fit (PO-TOP-UNITS).

    NaN is the worst.
    """
    units = list(range(len(values)))
    sizes = [bounds[u + 1] - bounds[u] for u in units]
    kept = {u for u in units if pinned[u]}
    left = [u for u in units if not pinned[u]]
    while left:
        best = max(left, key=lambda u: (values[u] == values[u], values[u] if values[u] == values[u] else 0.0, -u))
        if sum(sizes[u] for u in kept) + sizes[best] > B:
            break
        kept.add(best)
        left.remove(best)
    return [i for u in sorted(kept) for i in range(bounds[u], bounds[u + 1])]
