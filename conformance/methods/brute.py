"""Policies by brute force, with the inputs of their tests and vectors, and shared functions for kept sets.

Each module of `methods` lists its policies in BRUTES. The common tests, the table of promises and the vectors take
their cases from BRUTES. The brute forces share no code with the reference. Only `Brute.policy` makes a policy of the
reference.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from conformance.methods import policies as oracle
from conformance.oracles.boxes import leaves
from conformance.oracles.choices import Answer, surely
from conformance.strategies.numbers import NESTED
from conformance.strategies.policy_inputs import TEMPLATE, Inputs, Kept, model_constants
from conformance.vectors.codec import floats
from conformance.vectors.files import Json
from reference.calibration import GATES, NETWORKS, Gates, Networks
from reference.policies.names import POLICIES
from spec.policy import LayerView, Policy, Repeat

W, KERNEL, C_CHUNK, SINK, FUTURE, LAG, BLOCK = 3, 3, 4, NESTED.N_sink, 5, 4, 4
REHEARSED: dict[str, Any] = {"template": TEMPLATE, "N_sink": SINK, "N_recent": W, "chunk": 5, "overlap": 2}
SAFEGUARD = Fraction(1, 5)
# Constants of VaSE, so that small kept sets contain wide values and a sample.
N_SINK, HALF, SEED = 1, Fraction(1, 2), 5

MANY = 128
"""Number of tokens from which single boxes are slow: the attention of 260 tokens takes seconds."""

Guaranteed = Callable[[int, int], set[int]]


@dataclass(frozen=True)
class Parts:
    """Scores of a policy and the text of the other parts, for the oracle of compositions (`methods.composed`).

    Attributes:
        text: parts as in the text of a policy. A value that is the name of a constant means the constant.
        layer: function that returns the scores of one layer, from the layer and the constants. Decode steps call it
            again with the cached keys. None if the scores need more than the keys, values and queries of one layer.
        rows: function that returns the scores of all kept sets, from the inputs, B and the constants.
        unscored: the parts `sink` and `recent` of the tokens without a score, if they differ from those in `text`.
        carried: True if a decode step adds the new query's attention to the scores of the step before.
        chunks: True if the scores choose whole chunks of c tokens.
        preference: function that returns the preference of a layer, for the rule `layers=preference`.
    """

    text: str = ""
    layer: Callable[..., list[oracle.Score]] | None = None
    rows: Callable[..., list[oracle.Score]] | None = None
    unscored: str | None = None
    carried: bool = False
    chunks: bool = False
    preference: Callable[..., Any] | None = None


SLOW = 1 << 13
"""Maximum number of tokens for a brute force whose time grows with the square of the number of tokens."""


@dataclass(frozen=True)
class Brute:
    """A policy of `reference.policies.names`, with its kept sets by brute force.

    Attributes:
        item: item of the specification that defines the policy.
        name: name of the policy.
        kept: function that returns the kept sets from inputs, B and the constants.
        small: constants of the common tests. A vector has separate constants among its inputs.
        floor: smallest B at the small constants. A smaller B is raised to the floor.
        guaranteed: function that returns the positions in every kept set of B tokens.
        published: default values of the constants, without the backend.
    """

    item: str
    name: str
    kept: Callable[..., Kept]
    small: Mapping[str, Any] = field(default_factory=dict)
    floor: int = 0
    guaranteed: Guaranteed = field(default=lambda n, B: set())
    published: Mapping[str, Any] = field(default_factory=dict)
    readings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments of `kept` besides the constants.

    The first value is kvspec's, and the others are those of published codes.
    """
    slips: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More arguments of `kept`: the right value first, then known errors that no published code has."""
    least: int = 1
    """Minimum number of tokens of an input. With fewer tokens, rounding decides."""
    decoded: bool = False
    """True if the kept sets after decode steps are compared, besides those of the methods in DECODED."""
    turns: bool = False
    """True if `kept` takes the queries of a later turn alone, although the method uses all queries of a prompt."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Numbers of tokens that parts add to the constants."""
    parts: Parts | None = None
    """Parts of the policy, if its scorer may be combined with different parts."""
    longest: int = 1 << 17
    """Maximum number of tokens of an input that the brute force evaluates in seconds."""
    scored: bool = True
    """True if the `scores` of a kept set are those of the item.

    False if the set is chosen by places or in two stages.
    """

    @property
    def make(self) -> Callable[..., Policy]:
        """Return the function that makes the policy, looked up now, because a test may have replaced it."""
        known = POLICIES[self.name].make
        result: Callable[..., Policy] = getattr(sys.modules[known.__module__], known.__name__)
        return result

    def policy(self, inputs: Inputs, constants: Mapping[str, Any] | None = None) -> Policy:
        """Return the policy of the reference."""
        row, chosen = replace(POLICIES[self.name], make=self.make), self.small if constants is None else constants
        return row.policy({**model_constants(self.name, inputs), **chosen})

    def expected(self, inputs: Inputs, B: int) -> Kept:
        """Return the kept sets at the small constants."""
        return self.kept(inputs, B, **self.small)


GIVEN = (
    "q", "k", "v", "n", "scaling", "softcap", "sinks", "W_o", "inv_freq", "B", "chunks", "repeat_q", "repeat_k",
    "norms", "steps", "hidden", *NETWORKS, *GATES,
)
"""Inputs of a vector that are not constants of its policy."""


def repeats_of(i: Json, at: int) -> tuple[Repeat, ...] | None:
    """Return the repetitions of a layer's chunks, or None if the vector has none."""
    if "chunks" not in i:
        return None
    result = []
    for part, (start, stop) in enumerate(i["chunks"]):
        q, k = (floats(i[name][part][at]) for name in ("repeat_q", "repeat_k"))
        result.append(Repeat(start, stop, q, k, floats(i["norms"][part][at]) if "norms" in i else np.ones(q.shape[1])))
    return tuple(result)


def layers_of(i: Json) -> Inputs:
    """Return the layers of a vector. A vector may have only keys, or only a number of tokens."""
    keys = [floats(k) for k in i["k"]] if "k" in i else [np.zeros((1, i["n"], 1))]
    views = [
        LayerView(
            floats(i["q"][at]) if "q" in i else k, k, floats(i["v"][at]) if "v" in i else None, i.get("scaling", 1.0),
            i.get("softcap"), None, repeats_of(i, at), floats(i["sinks"][at]) if "sinks" in i else None,
            floats(i["hidden"][at]) if "hidden" in i else None,
        ) for at, k in enumerate(keys)
    ]
    W_o = [floats(i["W_o"])] if "W_o" in i else []
    ids = np.zeros(keys[0].shape[1], np.int64)
    networks, gates = ({name: floats(i[name]) for name in part if name in i} for part in (NETWORKS, GATES))
    return Inputs(
        views, floats(i.get("inv_freq", [])), W_o, ids, steps=i.get("steps", 0),
        networks=Networks(**networks) if networks else None, gates=Gates(**gates) if gates else None,
    )


def from_vector(i: Json) -> tuple[Inputs, int, dict[str, Any]]:
    """Return inputs, B and constants of a vector. A fraction is text in the vector, and the size of a block is `b`."""
    constants = {
        {"b": "block"}.get(name, name): Fraction(x) if isinstance(x, str) and x[0].isdigit() else x
        for name, x in i.items() if name not in GIVEN
    }
    return layers_of(i), i["B"], constants


def plain(view: LayerView) -> dict[str, Any]:
    """Return the layer as lists, for the oracles. Many tokens become rows, unless their keys can tie exactly."""
    large = view.k.shape[1] >= MANY and not bool((view.k == np.rint(view.k)).all())
    q, k, v = (None if x is None else leaves(x, large) for x in (view.q, view.k, view.v))
    return {
        "q": q, "k": k, "v": v, "scaling": view.scaling, "softcap": view.softcap,
        "sinks": None if view.sinks is None else leaves(view.sinks),
    }


def rehearsed(view: LayerView) -> dict[str, Any]:
    """Return the layer as lists, with the repetitions of its chunks."""
    each = [
        {"start": x.start, "stop": x.stop, "q": leaves(x.q), "k": leaves(x.k), "norms": leaves(x.norms)}
        for x in view.repeats or ()
    ]
    return {**plain(view), "repeats": each}


def by_layer(score: Callable[..., list[oracle.Score]]) -> Callable[..., Kept]:
    """Return a function that keeps the best B tokens of every row of every layer."""
    def kept(inputs: Inputs, B: int, **constants: Any) -> Kept:
        return [oracle.top(row, B) for view in inputs.layers for row in score(plain(view), **constants)]

    return kept


def stepwise(score: Callable[..., list[oracle.Score]], every: int = 1) -> Callable[..., Kept]:
    """Return a function that keeps the best B tokens of each KV head by a score of the cached tokens.

    The function decides at the end of the prompt, and in decode steps if the tokens seen are a multiple of `every`.
    """
    def kept(inputs: Inputs, B: int, decode: str = oracle.DECODE[0], **constants: Any) -> Kept:
        result, prompt = Kept(), inputs.n - inputs.steps
        for layer in map(plain, inputs.layers):
            for g in range(inputs.H_kv):
                of_head = partial(_score_of_head, score, layer, g, constants)
                first = oracle.top(of_head(prompt - 1, range(prompt)), B)
                result.append(oracle.decoded(first, range(prompt, inputs.n), B, of_head, decode, every))
        return result

    return kept


def after_steps(
    decide: Callable[[Sequence[Sequence[int]], int], list[Answer]], sets: int, inputs: Inputs, B: int, every: int = 1,
    excess: int = 1,
) -> Kept:
    """Return the kept sets after the prompt and the decode steps. All sets are decided together.

    `decide` returns the kept indices of live tokens, from the live positions of each set and the number of tokens
    seen. A step decides if `every` divides the tokens seen, and a set has at least `excess` tokens more than B.
    """
    prompt = inputs.n - inputs.steps
    kept = decide([range(prompt)] * sets, prompt)
    for at in range(prompt, inputs.n):
        live = [[*surely(positions), at] for positions in kept]
        due = (at + 1) % every == 0 and len(live[0]) - B >= excess
        kept = list(map(oracle.placed, decide(live, at + 1), live)) if due else list(map(Answer, live))
    return list(kept)


def _score_of_head(
    score: Callable[..., list[oracle.Score]], layer: oracle.Layer, g: int, constants: Mapping[str, Any], at: int,
    live: Sequence[int],
) -> oracle.Score:
    """Return the score of the live tokens of KV head g, after the token `at`."""
    group_layer = oracle.with_heads(layer, oracle.groups(layer)[g])
    cached = {name: [oracle.at_places(layer[name][g], live)] for name in ("k", "v") if layer[name] is not None}
    return score({**group_layer, "q": [rows[: at + 1] for rows in group_layer["q"]], **cached}, **constants)[0]


def shared(score: Callable[..., list[oracle.Score]], shares: Callable[..., list[int]]) -> Callable[..., Kept]:
    """Return a function that divides the budget of a layer among its heads, by `shares` and a safeguard."""
    def kept(inputs: Inputs, B: int, safeguard: Fraction = Fraction(0), **constants: Any) -> Kept:
        result = Kept()
        for view in inputs.layers:
            rows = score(plain(view), **constants)
            result += [oracle.top(row, b) for row, b in zip(rows, shares(rows, B, safeguard), strict=True)]
        return result

    return kept


def newest(n: int, B: int) -> set[int]:
    return set(range(max(0, n - W), n))


def sinks(n: int, B: int) -> set[int]:
    return set(range(min(SINK, n)))


def both_ends(n: int, B: int) -> set[int]:
    return sinks(n, B) | newest(n, B)


def newest_half(n: int, B: int) -> set[int]:
    return set(range(max(0, n - B // 2), n))
