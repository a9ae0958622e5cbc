"""H2O by brute force: the attention that each key received from all queries, and the newest tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.methods.brute import SLOW, Brute, Parts, W, by_layer, newest, newest_half, plain
from conformance.methods.policies import (
    DECODE,
    Layer,
    Score,
    accumulated,
    decoded,
    groups,
    seen_by,
    top,
    window,
    with_heads,
)
from conformance.oracles.boxes import column_sums
from conformance.oracles.choices import Answer
from conformance.strategies.policy_inputs import Inputs, Kept


def unheld(sums: Mapping[int, Any], live: Sequence[int], B: int, kind: str, recent: str) -> Score:
    """Return the sums of live tokens. The newest half of B has no score."""
    total: Score = [sums[at] / (live[-1] + 1 - at) if kind == "mean" else sums[at] for at in live]
    held = min(len(live), B // 2) if recent == "half" else 0
    return [*total[: len(live) - held], *[None] * held]


def rows(inputs: Inputs, B: int) -> list[Score]:
    """Return the scores at the end of a prompt."""
    result = [row for view in inputs.layers for row in accumulated(plain(view))]
    return [unheld(dict(enumerate(row)), range(inputs.n), B, "all", "half") for row in result]


def as_is(row: Score, live: Sequence[int]) -> Score:
    return row


def of_head(
    layer: Layer, steps: int, B: int, sums: str, recent: str, decode: str,
    score_of: Callable[[Score, Sequence[int]], Score] = as_is,
) -> Answer:
    """Return the kept set of one KV head.

    The sums start with the prompt. Each decode step adds the attention of its queries to the live keys. `score_of`
    returns the scores of live tokens from their sums. The sums do not change.
    """
    prompt = len(layer["k"][0]) - steps
    there = {**layer, "k": [layer["k"][0][:prompt]], "q": [rows[:prompt] for rows in layer["q"]]}
    got: dict[int, Any] = dict(enumerate(accumulated(there)[0]))

    def score(at: int, live: list[int]) -> Score:
        given = column_sums(seen_by(layer, at, live))
        got.update({p: got[p] + x if p in got else x for p, x in zip(live, given, strict=True)})
        return score_of(unheld(got, live, B, sums, recent), live)

    first = top(score_of(unheld(got, range(prompt), B, sums, recent), range(prompt)), B)
    return decoded(first, range(prompt, prompt + steps), B, score, decode)


def h2o(inputs: Inputs, B: int, sums: str = "all", recent: str = "half", decode: str = DECODE[0]) -> Kept:
    return [
        of_head({**with_heads(layer, group), "k": [keys]}, inputs.steps, B, sums, recent, decode)
        for layer in map(plain, inputs.layers) for keys, group in zip(layer["k"], groups(layer), strict=True)
    ]


def described(layer: Layer, W: int) -> list[Score]:
    """Return the scores if a window is protected instead of the newest half."""
    past = window(layer, W)
    return [[*row[:past], *[None] * (len(row) - past)] for row in accumulated(layer)]


BRUTES = [
    Brute("PO-H2O", "h2o", h2o, guaranteed=newest_half,
          readings={"sums": ("all", "mean"), "recent": ("half", "none"), "decode": DECODE},
          parts=Parts("select=half/every=1", accumulated, carried=True), longest=SLOW),
    # The reading "mean" is kvpress's: the mean over the queries that see a key.
    Brute("PO-H2O-DESCRIBED", "h2o-described", by_layer(described), {"W": W}, W, newest, published={"W": 128},
          parts=Parts("recent=W", accumulated, unscored=""), longest=SLOW),
]
