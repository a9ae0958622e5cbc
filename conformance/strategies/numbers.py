"""How large the drawn inputs of the small lane are, each with its reason; what stands beyond is the scale lane's.

Small inputs show rules, ties, thresholds and orders, and shrink to a case that can be read. Oracles in plain Python are
quadratic or worse, and a property runs up to 20 000 times. `conformance/assurance/mutants/sizes.toml` lists sizes that
the scale lane goes beyond.
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

# S1's oracle takes H n^2 d steps of plain Python: 0.1 s at 26 tokens of 16 heads; 26 cross two to six chunks.
S1_TOKENS = 26
# Every head of every token draws its keys by itself: 80 permutations at 20 tokens of 4 heads.
HOT_TOKENS = 20
# A prompt runs S1's oracle and all stages' behind it; 24 tokens reach the sink, the window and trunks between them.
PROMPT_TOKENS = 24
# S2 and S4 compare every edge with every pair of trunks; 16 tokens hold five sentences and three chunks.
TEXT_TOKENS = 16
# Two KV heads tell grouped from not grouped; three or more, which tell it from modulo, are the scale lane's.
KV_HEADS = 2
# Small enough that a few dozen tokens cross chunks, fill lists and overflow trunks.
CHUNK, HEADS_SUMMED, INTRA, CROSS, TRUNK = 12, 4, 4, 3, 9
# How far from a token its drawn neighbours lie: S2 looks at five tokens on either side.
NEAR = 6
# Ten trunks of up to nine tokens reach every corner of S6 in one of a hundred draws; the brute force is quadratic.
EVICTED_TRUNKS, EVICTED_SIZE = 10, 9
# Degrees of a few trunks: moments are of all of them, however many.
DEGREES = 12
# A breath runs every stage of decode in plain Python, and a machine of states hundreds of them.
LIVE_TRUNKS, LIVE_SIZE = 6, 4
# So few ids that most of them repeat within a dozen tokens.
ALPHABET = 9


@st.composite
def small_parameters(draw: st.DrawFn) -> CrystalCacheParameters:
    """Every constant varies, its boundary values included."""
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
    """Table 10's forms on small parameters."""
    p = draw(small_parameters(), label="parameters")
    return replace(
        p,
        impact=draw(st.sampled_from(["mixture", "salience", "uniform"]), label="impact"),
        graph=draw(st.sampled_from(["degree", "zero"]), label="graph"),
    )


@st.composite
def forms(draw: st.DrawFn) -> CrystalCacheParameters:
    """The essay's forms and the extensions in any combination, on small parameters."""
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
"""Kinds, each with its few values: all are met, and most of them tie."""


def close(kind: str, seed: int, shape: int | tuple[int, ...]) -> Any:
    """An array of values of one kind."""
    return np.random.default_rng(seed).choice(CLOSE[kind], shape)


SPECIAL: Mapping[str, Sequence[float]] = {
    "no number or least": (math.nan, -math.inf), "no number": (math.nan,), "least": (-math.inf, -1.7e308, -1e30),
    "all kinds": (math.nan, -math.inf, math.inf, -1.7e308, -1.0, -0.0, 0.0, 1.7e308),
}
"""Kinds of scores that order among themselves alone: as numbers they are lost in any sum, or stand for something."""


def special(kind: str, seed: int, shape: int | tuple[int, ...]) -> Any:
    """An array of values of one of these kinds."""
    return np.random.default_rng(seed).choice(SPECIAL[kind], shape)


TYPES: Mapping[str, tuple[type, float]] = {
    "float16": (np.float16, 1.0), "large float16": (np.float16, 2.0**13), "small float16": (np.float16, 2.0**-12),
    "float32": (np.float32, 1.0), "large float32": (np.float32, 2.0**60), "small float32": (np.float32, 2.0**-60),
    "float64": (np.float64, 1.0), "longdouble": (np.longdouble, 1.0),
}
"""Types of arrays, and what a number of the size of 1 is multiplied by: sums and squares of large ones overflow."""

TYPE_PAIRS = [
    *[(kind, kind) for kind, (_, size) in TYPES.items() if size == 1.0], ("large float16", "small float16"),
    ("small float16", "large float16"), ("large float32", "small float32"), ("small float32", "large float32"),
    ("float16", "float32"), ("float32", "float16"), ("longdouble", "float32"),
]
"""Of queries and keys, whose products are of the size of 1."""


def of_type(kind: str, seed: int, shape: tuple[int, ...]) -> tuple[Any, float]:
    """Positive numbers up to 2, times the type's size, and that size; the type has them exactly.

    Float16 has eighths, wider types 4096ths: float16 rounds the latter.
    """
    dtype, size = TYPES[kind]
    steps = 8 if dtype is np.float16 else 4_096
    return (size * np.random.default_rng(seed).integers(1, 2 * steps + 1, shape) / steps).astype(dtype), size


NESTED = NestedKVParameters(blocks=4, b_min=3, b_max=6, W=4, N_sink=2, alpha_s=Fraction(4, 5))
seeds = st.integers(0, 2**32 - 1)


def keys(seed: int, H_kv: int, n: int, d: int = 4) -> Any:
    """float32 keys around a direction of their own, so that no memory is short."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((H_kv, n, d)) + rng.standard_normal((H_kv, 1, d))).astype(np.float32)


def token_ids(n: int) -> st.SearchStrategy[IntVector]:
    """n ids out of few, so that most of them repeat; now and then an id is far away."""
    ids = st.lists(st.one_of(st.integers(0, ALPHABET - 1), st.just(128_000)), min_size=n, max_size=n)
    return ids.map(lambda found: np.array(found, dtype=np.int64))


def sentence_ends() -> st.SearchStrategy[frozenset[int]]:
    """Ids of the alphabet, and an id that never occurs."""
    return st.frozensets(st.integers(0, ALPHABET), min_size=1, max_size=3)


def end_masks(n: int) -> st.SearchStrategy[BoolVector]:
    """Any tokens end a sentence: none, all, runs of ends, the last one or not."""
    masks = st.one_of(
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.lists(st.sampled_from([False, False, False, True]), min_size=n, max_size=n),
        st.just([False] * n), st.just([True] * n),
    )
    return masks.map(lambda found: np.array(found, dtype=np.bool_))


Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(seed: Words, t: IntVector) -> Words:
    """The t-th word of a seed, one by one; t counts from 1."""
    z = seed + t.astype(np.uint64) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    found: Words = z ^ (z >> np.uint64(31))
    return found


class Numbers:
    """The stream of one seed; each call goes on where the last one stopped."""

    def __init__(self, seed: int) -> None:
        self.seed, self.used = np.uint64(seed), 0

    def words(self, size: int) -> Words:
        """The next numbers, 64 bits each."""
        t = np.arange(self.used + 1, self.used + size + 1)
        self.used += size
        return mixed(np.full(size, self.seed), t)

    def integers(self, low: int, high: int, size: int) -> IntVector:
        """`low` plus a number modulo `high - low`."""
        return (self.words(size) % np.uint64(high - low)).astype(np.int64) + low

    def fractions(self, size: int, bits: int = 53) -> Vector:
        """Multiples of 2^-bits in [0, 1): the number's highest bits."""
        return (self.words(size) >> np.uint64(64 - bits)).astype(np.float64) / 2.0**bits

    def below(self, high: IntVector) -> IntVector:
        """One number modulo each bound."""
        return (self.words(len(high)) % high.astype(np.uint64)).astype(np.int64)

    def permutation(self, n: int) -> IntVector:
        """0 to n - 1 in the order of n numbers, equal ones by place."""
        return np.argsort(self.words(n), kind="stable").astype(np.int64)
