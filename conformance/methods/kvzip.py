"""KVzip by brute force, with the functions of `methods.policies`. No code is shared with the reference.

The `repeats` of a layer are dicts of start, stop, q (H lists of rows), k (H_kv lists of rows) and norms.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from conformance.methods.brute import REHEARSED, SINK, Brute, Parts, W, both_ends, rehearsed
from conformance.methods.policies import Layer, Row, Score, rows_on, top, won
from conformance.oracles.boxes import (
    column_extremes,
    columns,
    dot,
    fsum,
    joined,
    largest,
    leaves,
    projected,
    row,
    scaled,
    sqrt,
)
from conformance.strategies.policy_inputs import Inputs, Kept, repeats
from spec.policy import Rehearsal


def scores(layer: Layer, N_sink: int, W_o: Sequence[Sequence[Row]] | None = None) -> list[Score]:
    """Return each key's largest attention weight from the queries of its chunk's repetition, for each KV head.

    With W_o, the weights are those of KVzip+.
    """
    result: list[Score] = [[None] * len(keys) for keys in layer["k"]]
    for part in layer["repeats"]:
        G, chunk = len(part["q"]) // len(layer["k"]), slice(part["start"], part["stop"])
        for g, cached in enumerate(layer["k"]):
            keys = joined(cached[:N_sink], cached[chunk], part["k"][g])
            first, given = N_sink + part["stop"] - part["start"], list[Any]()
            for h in range(g * G, (g + 1) * G):
                rows = rows_on(layer, h, part["q"][h], keys, range(first + 1, len(keys) + 1))
                weights = [each[N_sink:first] for each in rows]
                given += weights if W_o is None else weighed(weights, layer["v"][g][chunk], W_o[h], part["norms"])
            result[g][chunk] = column_extremes(largest, given)
    return result


def weighed(weights: Any, values: Sequence[Row], W_o: Sequence[Row], norms: Sequence[Score]) -> Any:
    """Return the weights of KVzip+.

    A weight is multiplied by the norm of the head's output, and divided by the norm of the query's hidden state.
    """
    return scaled(weights, output_norms(values, columns(W_o)), norms)


def output_norms(values: Sequence[Row], outputs: Sequence[Row]) -> Any:
    """Return the norm of each value after the head's output projection."""
    return row([sqrt(dot(output, output)) for output in projected(values, outputs)])


def global_shares(rows: Sequence[Score], B: int) -> list[int]:
    """Return the number of tokens of each row: its protected tokens, and its part of the best scores of all rows."""
    pinned = sum(x is None for x in rows[0])
    return [pinned + wins for wins in won(rows, (B - pinned) * len(rows))]


def chunks(
    ids: Sequence[int], template: Sequence[Sequence[int]], N_sink: int, N_recent: int, chunk: int, overlap: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return start and stop of each chunk, and the tokens that are read for the chunk."""
    spans, read = list[list[int]](), list[list[int]]()
    for at in range(N_sink, len(ids) - N_recent):
        if (at - N_sink) % chunk == 0:
            tail = [] if not read else [ids[i] for i in range(at - 1, at - 1 - min(overlap, chunk), -1)][::-1]
            spans.append([at, at])
            read.append([*(template[1] if len(read) else template[0]), *tail, *template[2]])
        spans[-1][1] = at + 1
        read[-1].append(ids[at])
    return spans, read


def head_means(contexts: Sequence[Sequence[Score]]) -> list[float]:
    """Return each row's largest score in a context, averaged over the contexts. A row belongs to a head."""
    best = [[max(x for x in row if x is not None) for row in rows] for rows in contexts]
    return [fsum(column) / len(column) for column in zip(*best, strict=True)]


def full_heads(scores: Sequence[float], n: int, B: int, window: int) -> list[int]:
    """Return the number of tokens of each head.

    Each head keeps its window. Then one head after the other keeps all tokens, while the budget allows. The rest is
    divided among the remaining heads in turns.
    """
    w, G = min(window, n), len(scores)
    shares, left = [w] * G, G * (min(B, n) - w)
    for g in sorted(range(G), key=lambda g: (-scores[g], g)):
        if left < n - w:
            break
        shares[g], left = n, left - (n - w)
    open_ = [g for g, share in enumerate(shares) if share < n]
    while left:
        for g in open_[:left]:
            shares[g] += 1
        left -= min(left, len(open_))
    return shares


def all_rows(plus: bool = False) -> Callable[..., list[Score]]:
    """Return a function that returns the scores of all layers."""
    def of_inputs(inputs: Inputs, B: int, N_sink: int, **rehearsal: Any) -> list[Score]:
        rows, asked = list[Score](), Rehearsal(N_sink=N_sink, **rehearsal)
        for view, W_o in zip(inputs.layers, inputs.W_o, strict=True):
            layer = rehearsed(replace(view, repeats=repeats(inputs, view, asked)))
            rows += scores(layer, N_sink, leaves(W_o) if plus else None)
        return rows

    return of_inputs


def kept(shares: Callable[[list[Score], int], Sequence[int]], plus: bool = False) -> Callable[..., Kept]:
    """Return a function that computes the kept sets. `shares` divides the budget of all layers together."""
    def of_prompt(inputs: Inputs, B: int, N_sink: int, **rehearsal: Any) -> Kept:
        rows = all_rows(plus)(inputs, B, N_sink, **rehearsal)
        return [top(row, share) for row, share in zip(rows, shares(rows, B), strict=True)]

    return of_prompt


def streaming_heads(inputs: Inputs, B: int, N_sink: int, N_recent: int) -> Kept:
    """Return the kept sets. The share of a head consists of the sinks and the newest tokens."""
    largest = [max(abs(x) for key in head for x in key) for view in inputs.layers for head in view.k.tolist()]
    return sinks_and_newest(largest, inputs.n, B, N_sink, N_recent)


def sinks_and_newest(head_scores: Sequence[float], n: int, B: int, N_sink: int, N_recent: int) -> Kept:
    return [
        sorted({*range(min(N_sink, share)), *range(max(0, n - share + N_sink), n)})
        for share in full_heads(head_scores, n, B, N_sink + N_recent)
    ]


PUBLISHED = {"template": None, "N_sink": 4, "N_recent": 0, "chunk": 2000, "overlap": 8}
BRUTES = [
    Brute("PO-KVZIP", "kvzip", kept(global_shares), REHEARSED, SINK + W, both_ends, published=PUBLISHED,
          longest=1_100, parts=Parts("sink=N_sink/recent=N_recent/layers=global", rows=all_rows())),
    Brute(
        "PO-KVZIP", "kvzip-uniform", kept(lambda rows, B: [B] * len(rows)), REHEARSED, SINK + W, both_ends,
        published=PUBLISHED, longest=1_100, parts=Parts("sink=N_sink/recent=N_recent", rows=all_rows()),
    ),
    Brute(
        "PO-KVZIP-PLUS", "kvzip-plus", kept(global_shares, plus=True), REHEARSED, SINK + W, both_ends,
        published=PUBLISHED, longest=1_100,
        parts=Parts("sink=N_sink/recent=N_recent/layers=global", rows=all_rows(plus=True)),
    ),
    Brute(
        "PO-KVZIP-HEADS", "kvzip-heads", streaming_heads, {"N_sink": SINK, "N_recent": W}, SINK + W, both_ends,
        published={"N_sink": 64, "N_recent": 256},
    ),
]
