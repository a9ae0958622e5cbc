"""Attention inputs of S1: q and k with grouped heads, random, peaked, with copied rows, or such that S1 is exact."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from conformance.strategies.numbers import (
    HOT_TOKENS,
    KV_HEADS,
    PROMPT_TOKENS,
    S1_TOKENS,
    ablations,
    sentence_ends,
    small_parameters,
    token_ids,
)
from spec.arrays import IntVector
from spec.backend import CrystalStages
from spec.parameters import TINY, CrystalCacheParameters
from spec.records import CoAttention

GROUPS = (1, 2, 4, 7, 8)
HOT = 2048.0  # exp(-HOT) is 0 in every floating type


@dataclass(frozen=True)
class AttentionInputs:
    """Arguments of S1. The arrays are read-only."""

    q: np.ndarray[Any, Any]
    k: np.ndarray[Any, Any]
    positions: IntVector
    parameters: CrystalCacheParameters
    scaling: float
    softcap: float | None
    sinks: Any = None

    def run(self, stages: CrystalStages, lse: Any = None) -> CoAttention:
        """Return the co-attention that a backend's S1 computes. `lse` contains the denominators, if given."""
        return stages.coattention(
            self.q, self.k, self.positions, self.parameters, self.scaling, self.softcap, lse, self.sinks
        )


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def sinks(H: int) -> st.SearchStrategy[Any]:
    """Draw None, or a logit for each head that is far below, near or above the logits of keys."""
    return st.none() | st.lists(
        st.sampled_from([-30.0, -1.5, 0.0, 1.0, 3.0]), min_size=H, max_size=H
    ).map(lambda logits: frozen(np.array(logits, np.float32)))


@st.composite
def attention_inputs(
    draw: st.DrawFn, p: st.SearchStrategy[CrystalCacheParameters] | None = None, max_n: int = S1_TOKENS,
) -> AttentionInputs:
    """Draw one segment from position 0.

    Values are float32. The entropy is drawn as one seed, but the structure is drawn by Hypothesis.
    """
    parameters = draw(st.one_of(st.just(TINY), small_parameters()) if p is None else p, label="parameters")
    n = draw(st.integers(2, max_n), label="n")
    H_kv = draw(st.integers(1, KV_HEADS), label="H_kv")
    group = draw(st.sampled_from(GROUPS), label="queries per KV head")
    d = draw(st.sampled_from([4, 2, 6]), label="d")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    q = rng.standard_normal((H_kv * group, n, d)) * draw(st.sampled_from([1.0, 0.1, 4.0]), label="peakedness")
    k = rng.standard_normal((H_kv, n, d))
    for target in draw(st.lists(st.integers(1, n - 1), max_size=3), label="copied rows"):
        source = draw(st.integers(0, target - 1), label="from")
        q[:, target], k[:, target] = q[:, source], k[:, source]
    return AttentionInputs(
        frozen(q.astype(np.float32)), frozen(k.astype(np.float32)), frozen(np.arange(n)), parameters,
        scaling=draw(st.sampled_from([d**-0.5, 1.0, 0.25]), label="scaling"),
        softcap=draw(st.sampled_from([None, 30.0, 2.0]), label="softcap"), sinks=draw(sinks(len(q)), label="sinks"),
    )


@st.composite
def later_segments(draw: st.DrawFn) -> AttentionInputs:
    """Draw a segment after live keys of an earlier segment.

    Positions have gaps, and reach the limits of float32, int32, uint32 and float64.
    """
    whole = draw(attention_inputs(), label="inputs")
    n = whole.k.shape[1]
    before = draw(st.integers(0, n - 2), label="live keys before the segment")
    gaps = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n), label="gaps")
    first = draw(st.sampled_from([0, 2**24 - 5, 2**31 - 5, 2**32 - 5, 2**53 - 5]), label="first position")
    positions = first + np.cumsum([1 if at > before else gap for at, gap in enumerate(gaps)]) - 1
    return AttentionInputs(
        frozen(whole.q[:, before:].copy()), whole.k, frozen(positions.astype(np.int64)), whole.parameters,
        whole.scaling, whole.softcap, whole.sinks,
    )


@st.composite
def hot_sets(
    draw: st.DrawFn, widths: tuple[int, ...] = (1, 2, 4), heads: tuple[int, ...] = (1, 2, 4), max_n: int = HOT_TOKENS,
) -> AttentionInputs:
    """Draw inputs in which each query of each head attends equally to 1, 2 or 4 keys.

    Attention, salience and head means are then dyadic numbers. The bounds of the clip are dyadic too, because other
    bounds would change in float32. With one key and one head, cosines are 0 or 1.
    """
    p = draw(st.one_of(st.just(TINY), small_parameters()), label="parameters")
    p = replace(p, M_min=draw(st.sampled_from([0.125, 0.0, 1.0]), label="M_min"))
    n = draw(st.integers(2, max_n), label="n")
    H = draw(st.sampled_from(heads), label="H")
    q = np.zeros((H, n, n), dtype=np.float32)
    for h in range(H):
        for row in range(n):
            width = draw(st.sampled_from([w for w in widths if w <= row + 1]), label="width")
            keys = draw(st.permutations(range(row + 1)), label="keys")[:width]
            q[h, row, keys] = HOT
    k = np.eye(n, dtype=np.float32)[None]
    return AttentionInputs(frozen(q), frozen(k), frozen(np.arange(n)), p, 1.0, None)


@dataclass(frozen=True)
class Prompt:
    """Arguments of `prefill`."""

    inputs: AttentionInputs
    token_ids: IntVector
    sentence_ends: frozenset[int]
    budget: str

    @property
    def share(self) -> Fraction:
        return Fraction(self.budget)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `prefill`."""
        inputs = self.inputs
        return {
            "q": inputs.q, "k": inputs.k, "token_ids": self.token_ids, "sentence_ends": self.sentence_ends,
            "budget": self.budget, "parameters": inputs.parameters, "scaling": inputs.scaling,
            "softcap": inputs.softcap, "sinks": inputs.sinks,
        }


def budget_fractions() -> st.SearchStrategy[str]:
    """Draw decimals in (0, 1], including decimals that binary floating point cannot represent."""
    awkward = st.sampled_from(["0.3", "0.5", "0.28", "0.07", "0.14", "0.55", "0.1", "1.0"])
    return st.one_of(awkward, st.integers(1, 100).map(lambda percent: f"{percent / 100:.2f}"))


@st.composite
def prompts(draw: st.DrawFn, max_n: int = PROMPT_TOKENS) -> Prompt:
    """Draw a prompt with small parameters, or TINY, and any fraction as its budget."""
    inputs = draw(attention_inputs(st.one_of(st.just(TINY), ablations()), max_n), label="inputs")
    n = len(inputs.positions)
    return Prompt(
        inputs, draw(token_ids(n), label="ids"), draw(sentence_ends(), label="ends"),
        draw(budget_fractions(), label="budget"),
    )


def random_prompt(rng: np.random.Generator, p: CrystalCacheParameters, n: int) -> Prompt:
    """Return a float32 prompt of n tokens from a seed. Topics repeat, so that trunks are linked."""
    H, H_kv, d = 4, 2, 8
    topic = rng.standard_normal((5, d))[rng.integers(0, 5, n)]
    q = (topic + rng.standard_normal((H, n, d))).astype(np.float32)
    k = (topic + rng.standard_normal((H_kv, n, d))).astype(np.float32)
    inputs = AttentionInputs(q, k, np.arange(n), p, d**-0.5, None)
    ids = rng.zipf(1.5, n).clip(0, 50).astype(np.int64)
    return Prompt(inputs, ids, frozenset({2, 7}), ["0.3", "0.5"][int(rng.integers(0, 2))])
