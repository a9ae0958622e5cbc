"""S2 and S3 by size: trunks of long segments, counts of large vocabularies."""

import itertools
from dataclasses import replace

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import equal_trunks, given_by, random_rows, whole_line
from reference.crystalcache.impact import (
    impact,
    rarity,
    reciprocal_rarity,
    token_counts,
    trunk_impact,
    unit_impact,
    unit_trunk_impact,
)
from reference.crystalcache.sentences import sentence_offsets
from reference.crystalcache.trunks import (
    interface_weights,
    median_strength,
    merge_sentences,
    merges,
    split_sizes,
    trunk_offsets,
)
from reference.ordered import left_to_right_sum
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import Edges

__all__: list[str] = []

ByPair = dict[tuple[int, int], float]
NONE = given_by([(0, 1, 0.5)])


@beyond("16 sentences", sentence_offsets, "CC-SENTENCES", lambda: (whole_line(60, 3),))
def table_of_16_sentences(ends: Array) -> Array:
    """The table of sentences has 16 rows: the last holds what is left."""
    offsets = sentence_offsets(ends)
    return offsets if len(offsets) <= 17 else np.append(offsets[:16], offsets[-1])


@beyond("63 tokens", sentence_offsets, "CC-SENTENCES", lambda: (whole_line(128, 4),))
def an_end_on_a_block_of_64_is_lost(ends: Array) -> Array:
    """Ends are found block by block of 64 tokens, and an end on a block's last token is lost."""
    inner = ends.copy()
    inner[63:-1:64] = False
    return sentence_offsets(inner)


@beyond("positions up to 2^24", trunk_offsets, "CC-TRUNKS", lambda: (whole_line(9, 3), NONE, 2**24 + 1, PAPER))
def offsets_in_single_precision(ends: Array, edges: Edges, start: int, parameters: CrystalCacheParameters) -> Array:
    """Offsets are held as float32, in which 2^24 + 1 is 2^24."""
    return trunk_offsets(ends, edges, start, parameters).astype(np.float32).astype(np.int64)


def two_far_interfaces() -> tuple[Array, Edges, int, CrystalCacheParameters]:
    """A strong edge across one cut, and a weak one 65 536 tokens later: packed in 16 bits they are one."""
    edges = given_by([(9, 10, 0.9), (9 + 2**16, 10 + 2**16, 0.1)])
    return whole_line(2**16 + 20, 10) | (np.arange(2**16 + 20) == 2**16 + 9), edges, 0, PAPER


@beyond("65 536 tokens", trunk_offsets, "CC-TRUNKS", two_far_interfaces)
def pairs_packed_in_32_bits(ends: Array, edges: Edges, start: int, parameters: CrystalCacheParameters) -> Array:
    """Pairs of tokens are looked up by their low 16 bits: of two that agree in these the later counts."""
    first, second, weight = edges
    key = first % 2**16 * 2**16 + second % 2**16
    last = {int(one): at for at, one in enumerate(key.tolist())}
    own = np.array([last[int(one)] for one in key.tolist()], dtype=np.int64)
    return trunk_offsets(ends, Edges(first, second, weight[own] if len(own) else weight), start, parameters)


@beyond("64 sentences", merge_sentences, "CC-TRUNKS", lambda: (
    3 * np.arange(80), {(at - 1, at): 0.9 for at in range(3, 237, 3)}, PAPER,
))
def merging_stops_after_64_sentences(
    sentences: Array, edges: ByPair, parameters: CrystalCacheParameters,
) -> list[int]:
    """The pass over sentences ends after 64: later ones stay as they are."""
    if len(sentences) <= 65:
        return merge_sentences(sentences, edges, parameters)
    return [*merge_sentences(sentences[:65], edges, parameters), *np.diff(sentences[64:]).tolist()]


@beyond("32 pieces", split_sizes, "CC-SPLIT", lambda: (34 * 5, 5))
def at_most_32_pieces(size: int, T_max: int) -> list[int]:
    """A trunk is cut into at most 32 pieces."""
    return split_sizes(size, max(T_max, -(-size // 32)))


@beyond("trunks of 2^24 tokens", split_sizes, "CC-SPLIT", lambda: (2**24 + 1, 2**24))
def pieces_counted_in_single_precision(size: int, T_max: int) -> list[int]:
    """The number of pieces is the ceiling of a float32 quotient."""
    pieces = int(np.ceil(np.float32(size) / np.float32(T_max)))
    small, larger = divmod(size, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


@beyond("trunks of 32 767 tokens", merges, "CC-MERGE", lambda: (np.ones(1), 20_000, 20_000, replace(PAPER, T_max=999)))
def sizes_in_16_bits(weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters) -> bool:
    """The size of two sentences together is held in 16 bits, and turns negative."""
    together = (size + next_size + 2**15) % 2**16 - 2**15
    return merges(weights, together, 0, parameters)


def sixteen_and_one() -> tuple[Array, int, int, CrystalCacheParameters]:
    """1 and crumbs that vanish beside it one by one: in order the sum is tau k, in pairs it is above."""
    return np.array([1.0, *[2.0**-54] * 19]), 5, 5, replace(PAPER, tau_merge=0.05)


@beyond("16 edges of an interface", merges, "CC-MERGE", sixteen_and_one)
def long_interfaces_summed_in_pairs(
    weights: Array, size: int, next_size: int, parameters: CrystalCacheParameters,
) -> bool:
    """More than 16 weights are summed in two halves."""
    if len(weights) <= 16:
        return merges(weights, size, next_size, parameters)
    halves = np.array([left_to_right_sum(weights[::2]), left_to_right_sum(weights[1::2])])
    fits = size + next_size <= parameters.T_max
    return fits and left_to_right_sum(halves) - parameters.tau_merge * len(weights) > 0


@beyond("16 edges of an interface", interface_weights, "CC-INTERFACE-EDGES", lambda: (
    dict.fromkeys(itertools.product(range(5), range(5, 10)), 0.5), (range(5), range(5, 10)),
))
def sixteen_edges_of_an_interface(edges: ByPair, P: tuple[range, range]) -> Array:
    """The list of an interface's weights has 16 places."""
    return interface_weights(edges, P)[:16]


@beyond("64 interfaces", median_strength, "CC-ADAPTIVE-MERGE", lambda: (
    3 * np.arange(90), {(at - 1, at): at / 300 for at in range(3, 267, 3)}, 0.3,
))
def median_of_the_first_64(sentences: Array, edges: ByPair, tau_merge: float) -> float:
    """The median is taken over the first 64 interfaces."""
    return median_strength(sentences[:66], edges, tau_merge)


@beyond("ids below 2^16", token_counts, "CC-COUNT", lambda: (np.array([1, 2**16 + 1, 9, 9]),))
def ids_in_16_bits(token_ids: Array) -> Array:
    """Ids are held in 16 bits: 1 and 65 537 are one."""
    return token_counts(token_ids % 2**16)


@beyond("ids below 2^31", token_counts, "CC-COUNT", lambda: (np.array([1, 2**32 + 1, 9, 9]),))
def ids_in_32_bits(token_ids: Array) -> Array:
    """Ids are held in 32 bits: 1 and 2^32 + 1 are one."""
    return token_counts(token_ids.astype(np.int32).astype(np.int64))


@beyond("counts of 255", token_counts, "CC-COUNT", lambda: (np.zeros(300, dtype=np.int64),))
def counts_saturate_at_255(token_ids: Array) -> Array:
    """A count is a byte that stays at 255."""
    return np.minimum(token_counts(token_ids), 255)


@beyond("counts of 40", rarity, "CC-RARITY", lambda: (np.array([40, 41, 400]),))
def rarities_of_40_counts(c: Array) -> Array:
    """Rarities are a table up to a count of 40; more frequent tokens have its last."""
    return rarity(np.minimum(c, 40))


@beyond("counts of 2 048", rarity, "CC-RARITY", lambda: (np.array([2049, 5001]),))
def counts_in_half_precision(c: Array) -> Array:
    """Counts are held as float16, exact up to 2 048."""
    return rarity(np.minimum(c, 65_000).astype(np.float16).astype(np.int64))


@beyond("counts of 2^24", reciprocal_rarity, "CC-RARITY-FORMS", lambda: (np.array([2**26 + 3]),))
def reciprocals_in_single_precision(c: Array) -> Array:
    """Counts are held as float32, exact up to 2^24."""
    return reciprocal_rarity(c.astype(np.float32).astype(np.int64))


@beyond("65 535 tokens", impact, "CC-IMPACT", lambda: (np.full(2**16, 5.0), np.ones(2**16), PAPER))
def a_grid_of_65_535_tokens(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """A launch covers 65 535 tokens; later ones stay at M_min."""
    M = impact(S, U, parameters)
    M[2**16 - 1 :] = parameters.M_min
    return M


@beyond("16 tokens of a trunk", trunk_impact, "CC-TRUNK-IMPACT", lambda: (1 + np.arange(20.0), equal_trunks(1, 20)))
def best_of_16_members(M: Array, offsets: Array) -> Array:
    """The three best members are sought among a trunk's first 16."""
    M_bar = trunk_impact(M, offsets)
    for g, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
        M_bar[g] = trunk_impact(M[a:b][:16], np.array([0, min(16, b - a)]))[0]
    return M_bar


@beyond("1 024 trunks", trunk_impact, "CC-TRUNK-IMPACT", lambda: (1 + random_rows(1030), equal_trunks(1030, 1)))
def trunks_of_one_block(M: Array, offsets: Array) -> Array:
    """A block has 1 024 threads: later trunks have the impact of the trunk 1 024 before."""
    M_bar = trunk_impact(M, offsets)
    return M_bar[np.arange(len(M_bar)) % 1024]


@beyond("1 024 tokens", unit_impact, "CC-UNIT-IMPACT", lambda: (np.arange(1100.0), np.ones(1100), PAPER))
def peak_of_1024_tokens(S: Array, U: Array, parameters: CrystalCacheParameters) -> Array:
    """The largest salience is sought among the first 1 024 tokens."""
    peak = float(S[:1024].max())
    share = S / peak if peak > 0 else np.zeros_like(S)
    M: Array = 0.5 * share + 0.5 * U
    return M


@beyond("64 trunks", unit_trunk_impact, "CC-UNIT-TRUNK-IMPACT", lambda: (np.arange(80.0), PAPER.epsilon))
def bounds_of_64_trunks(M_bar: Array, epsilon: float) -> Array:
    """The least and the greatest are sought among the first 64 trunks."""
    low, high = float(M_bar[:64].min()), float(M_bar[:64].max())
    M: Array = (M_bar - low) / (high - low + epsilon)
    return M
