"""Sizes of the small random inputs, each with its reason, and random numbers of several kinds.

Small inputs show rules, ties, thresholds and orders, and shrink to a readable case. Oracles in plain Python are
quadratic or worse, and a property runs up to 20 000 times. Larger inputs belong to the scale tests.
`lab/mutants/sizes.toml` lists the sizes that the scale tests exceed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from spec.arrays import BoolVector, IntVector, Vector
from spec.parameters import CrystalCacheParameters, NestedKVParameters

# S1's oracle takes H n^2 d steps of plain Python: 0.1 s at 26 tokens of 16 heads. 26 tokens cross two to six chunks.
S1_TOKENS = 26
# Every head of every token draws separate keys: 80 permutations at 20 tokens of 4 heads.
HOT_TOKENS = 20
# A prompt runs the oracles of all stages. 24 tokens reach the sink, the window and the trunks between them.
PROMPT_TOKENS = 24
# S2 and S4 compare every edge with every pair of trunks. 16 tokens contain five sentences and three chunks.
TEXT_TOKENS = 16
# Two KV heads distinguish grouped from ungrouped heads. Only three or more, as in the scale tests, exclude modulo.
KV_HEADS = 2
# With these sizes a few dozen tokens cross chunks, fill lists and overflow trunks.
CHUNK, HEADS_SUMMED, INTRA, CROSS, TRUNK = 12, 4, 4, 3, 9
# Maximum distance of a token's drawn neighbours. S2 reads five tokens on either side.
NEAR = 6
# Ten trunks of up to nine tokens reach every corner of S6 in one of a hundred draws. The brute force is quadratic.
EVICTED_TRUNKS, EVICTED_SIZE = 10, 9
# Degrees of a few trunks are enough, because the moments are over all trunks.
DEGREES = 12
# A breath (decode-time eviction) runs every stage of decode in plain Python. A state machine runs hundreds of them.
LIVE_TRUNKS, LIVE_SIZE = 6, 4
# Number of ids: most ids repeat within a dozen tokens.
ALPHABET = 9


@st.composite
def small_parameters(draw: st.DrawFn) -> CrystalCacheParameters:
    """Draw parameters in which every constant varies and reaches its boundary values."""
    def pick(name: str, values: list[float]) -> float:
        return draw(st.sampled_from(values), label=name)

    def count(name: str, low: int, high: int) -> int:
        return draw(st.integers(low, high), label=name)

    return CrystalCacheParameters(
        C=count("C", 1, CHUNK), k_heads=count("k_heads", 0, HEADS_SUMMED), k_intra=count("k_intra", 0, INTRA),
        tau_intra=pick("tau_intra", [0.3, 0.0, 0.5, 0.7]), k_cross=count("k_cross", 0, CROSS),
        tau_cross=pick("tau_cross", [0.02, 0.0, 0.25]), M_min=pick("M_min", [0.1, 0.0, 1.0]),
        M_max=pick("M_max", [20.0, 2.0, 1.0]), tau_merge=pick("tau_merge", [0.3, 0.0, 0.5, 1.0]),
        T_max=count("T_max", 1, TRUNK), tau_edge=pick("tau_edge", [0.05, 0.0, 0.25]), s=pick("s", [5.0, 2.3, 40.0]),
        alpha=pick("alpha", [1.0, 0.0, 0.7, 2.0]), N_sink=count("N_sink", 0, 4), W_recent=count("W_recent", 0, 5),
        N_min=count("N_min", 0, 6),
    )


@st.composite
def ablations(draw: st.DrawFn) -> CrystalCacheParameters:
    """Draw small parameters with the forms of Table 10."""
    p = draw(small_parameters(), label="parameters")
    return replace(
        p,
        impact=draw(st.sampled_from(["mixture", "salience", "uniform"]), label="impact"),
        graph=draw(st.sampled_from(["degree", "zero"]), label="graph"),
    )


@st.composite
def forms(draw: st.DrawFn) -> CrystalCacheParameters:
    """Draw small parameters with any combination of the essay's forms and the extensions."""
    p = draw(small_parameters(), label="parameters")
    return replace(
        p,
        heads=draw(st.sampled_from(["mean", "sum"]), label="heads"),
        impact=draw(st.sampled_from(["unit", "mixture"]), label="impact"),
        rarity=draw(st.sampled_from(["logarithm", "reciprocal", "exponential"]), label="rarity"),
        trunk_impact=draw(st.sampled_from(["unit", "mean"]), label="trunk impact"),
        merge=draw(st.sampled_from(["median", "fixed"]), label="merge"),
        allocation=draw(st.sampled_from(["tiers", "cut"]), label="allocation"),
        coverage=draw(st.sampled_from([0.0, 0.1, 0.25, 0.29, 1.0]), label="coverage"),
    )


LEAST = 2.0**-1074

CLOSE: Mapping[str, Sequence[float]] = {
    "zeros": (-0.0, 0.0), "subnormal": (-0.0, 0.0, LEAST, 2 * LEAST, 2.0**-1022 - LEAST, 2.0**-1022),
    "ulp": (1 - 2.0**-53, 1.0, 1 + 2.0**-52), "trillionth": (1.0, 1 + 1e-12, 1 + 2e-12),
    "huge": (1e300, float(np.nextafter(1e300, 2e300)), 1.7e308), "tiny": (1e-50, 1.1e-50, 1e-300, 1.1e-300, 0.0),
    "signs": (-1 - 2.0**-52, -1.0, -LEAST, -0.0, 0.0, LEAST),
}
"""Kinds of nearly equal values. A draw contains all values of its kind, and most of the numbers tie."""


SPECIAL: Mapping[str, Sequence[float]] = {
    "no number or least": (math.nan, -math.inf), "no number": (math.nan,), "least": (-math.inf, -1.7e308, -1e30),
    "all kinds": (math.nan, -math.inf, math.inf, -1.7e308, -1.0, -0.0, 0.0, 1.7e308),
}
"""Kinds of scores that can be ordered but not summed: NaN, infinities and very large numbers."""


def close(kind: str, seed: int, shape: int | tuple[int, ...]) -> Any:
    """Return an array of values of one kind in `CLOSE` or `SPECIAL`."""
    return np.random.default_rng(seed).choice({**CLOSE, **SPECIAL}[kind], shape)


TYPES: Mapping[str, tuple[type, float]] = {
    "float16": (np.float16, 1.0), "large float16": (np.float16, 2.0**13), "small float16": (np.float16, 2.0**-12),
    "float32": (np.float32, 1.0), "large float32": (np.float32, 2.0**60), "small float32": (np.float32, 2.0**-60),
    "float64": (np.float64, 1.0), "longdouble": (np.longdouble, 1.0),
}
"""Dtypes, each with a factor for numbers of size 1. Sums and squares of the large numbers overflow."""

TYPE_PAIRS = [
    *[(kind, kind) for kind, (_, size) in TYPES.items() if size == 1.0], ("large float16", "small float16"),
    ("small float16", "large float16"), ("large float32", "small float32"), ("small float32", "large float32"),
    ("float16", "float32"), ("float32", "float16"), ("longdouble", "float32"),
]
"""Kinds of queries and keys whose products have size 1."""


def of_type(kind: str, seed: int, shape: tuple[int, ...]) -> tuple[Any, float]:
    """Return positive numbers up to 2 times the type's factor, and the factor.

    The dtype represents the numbers exactly. Float16 numbers are multiples of 1/8. Wider dtypes have multiples of
    1/4096, which float16 would round.
    """
    dtype, size = TYPES[kind]
    steps = 8 if dtype is np.float16 else 4_096
    return (size * np.random.default_rng(seed).integers(1, 2 * steps + 1, shape) / steps).astype(dtype), size


NESTED = NestedKVParameters(blocks=4, b_min=3, b_max=6, W=4, N_sink=2, alpha_s=Fraction(4, 5))
seeds = st.integers(0, 2**32 - 1)


def keys(seed: int, H_kv: int, n: int, d: int = 4) -> Any:
    """Return float32 keys around one random direction per head, so that no memory of NestedKV is short."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((H_kv, n, d)) + rng.standard_normal((H_kv, 1, d))).astype(np.float32)


def token_ids(n: int) -> st.SearchStrategy[IntVector]:
    """Draw n ids out of few, so that most ids repeat. Occasionally an id is very large."""
    ids = st.lists(st.one_of(st.integers(0, ALPHABET - 1), st.just(128_000)), min_size=n, max_size=n)
    return ids.map(lambda result: np.array(result, dtype=np.int64))


def sentence_ends() -> st.SearchStrategy[frozenset[int]]:
    """Draw ids of the alphabet, and one id that never occurs."""
    return st.frozensets(st.integers(0, ALPHABET), min_size=1, max_size=3)


def end_masks(n: int) -> st.SearchStrategy[BoolVector]:
    """Draw masks of the tokens that end a sentence: none, all, runs, with and without the last token."""
    masks = st.one_of(
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.lists(st.sampled_from([False, False, False, True]), min_size=n, max_size=n),
        st.just([False] * n), st.just([True] * n),
    )
    return masks.map(lambda result: np.array(result, dtype=np.bool_))


Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(seed: Words, t: IntVector) -> Words:
    """Return the t-th word of each seed. t counts from 1."""
    z = seed + t.astype(np.uint64) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    result: Words = z ^ (z >> np.uint64(31))
    return result


class Numbers:
    """Stream of random numbers of one seed. Each call continues the stream."""

    def __init__(self, seed: int) -> None:
        self.seed, self.used = np.uint64(seed), 0

    def words(self, size: int) -> Words:
        """Return the next numbers of 64 bits each."""
        t = np.arange(self.used + 1, self.used + size + 1)
        self.used += size
        return mixed(np.full(size, self.seed), t)

    def integers(self, low: int, high: int, size: int) -> IntVector:
        """Return `low` plus a number modulo `high - low`."""
        return (self.words(size) % np.uint64(high - low)).astype(np.int64) + low

    def fractions(self, size: int, bits: int = 53) -> Vector:
        """Return multiples of 2^-bits in [0, 1): the highest bits of each number."""
        return (self.words(size) >> np.uint64(64 - bits)).astype(np.float64) / 2.0**bits

    def below(self, high: IntVector) -> IntVector:
        """Return one number modulo each bound."""
        return (self.words(len(high)) % high.astype(np.uint64)).astype(np.int64)

    def permutation(self, n: int) -> IntVector:
        """Return 0 to n - 1, sorted by n numbers. Equal numbers keep the order of their places."""
        return np.argsort(self.words(n), kind="stable").astype(np.int64)
