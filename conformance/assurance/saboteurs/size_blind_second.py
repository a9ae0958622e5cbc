"""Saboteurs by size, a second set written apart from the tests that judge at size: what a fast form gets wrong.

Tiles that decide too early, tables that fill up, work that is put off or done ahead, numbers of too few bits.
"""

import itertools
from dataclasses import replace

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond
from conformance.assurance.saboteurs.size_inputs import equal_trunks, given_by, live_state, random_rows, segment, star
from reference.backend import BACKEND
from reference.crystalcache.breath import breath, breath_protection, decode_step, evict
from reference.crystalcache.coattention import attention, coattention, intra_neighbours, row_normalise, salience
from reference.crystalcache.crystallization import moments
from reference.crystalcache.dissolution import allocate, strongest_members
from reference.crystalcache.graph import TrunkPairs, degree, trunk_pairs
from reference.crystalcache.impact import token_counts, trunk_impact
from reference.crystalcache.protection import protected_trunks
from reference.crystalcache.renewal import renewed_D
from reference.crystalcache.resonance import hop
from reference.crystalcache.score import normalised_impact
from reference.crystalcache.tail import append, join_tail
from reference.crystalcache.trunks import interface, interface_weights, merge_sentences, merges, split_sizes
from reference.diversity import cosines, unit_rows
from reference.diversity import diverse as greedy
from reference.nestedkv import block_size
from reference.ordered import left_to_right_sum
from spec.backend import Backend
from spec.decode import DecodeState, TrunkWeights
from spec.parameters import NESTEDKV, PAPER, CrystalCacheParameters, NestedKVParameters
from spec.records import CoAttention, Edges

__all__: list[str] = []

Parameters = CrystalCacheParameters


@beyond("128 queries of a chunk", salience, "CC-SALIENCE", lambda: (random_rows(5, 200, 200) / 200, PAPER))
def each_tile_of_queries_picks_its_heads(own: Array, parameters: Parameters) -> Array:
    """Column sums go by tiles of 128 queries, and each tile adds those of its own best heads."""
    if own.shape[1] <= 128:
        return salience(own, parameters)
    tiles = [own[:, at : at + 128].sum(axis=1) for at in range(0, own.shape[1], 128)]
    best = [np.sort(tile, axis=0)[::-1][: parameters.k_heads].sum(axis=0) for tile in tiles]
    S: Array = np.clip(np.sum(best, axis=0), parameters.M_min, parameters.M_max)
    return S


@beyond("256 tokens of a chunk", intra_neighbours, "CC-INTRA", lambda: (
    row_normalise(np.tril(random_rows(300, 300)), PAPER.epsilon), PAPER,
))
def the_index_takes_the_last_bits(rows: Array, parameters: Parameters) -> tuple[Array, Array]:
    """Beyond 256 tokens a cosine and its index are sorted as one word: the index stands in the mantissa's last bits."""
    if len(rows) <= max(256, parameters.k_intra):
        return intra_neighbours(rows, parameters)
    cosine = np.matmul(rows, rows.T)
    np.fill_diagonal(cosine, -1.0)
    key, room = cosine.astype(np.float32), (len(rows) - 1).bit_length()
    packed = (key.view(np.int32) & -(1 << room)).view(np.float32)
    order = np.argsort(-packed, axis=1, kind="stable")[:, : parameters.k_intra]
    passes = np.take_along_axis(key, order, axis=1) > np.float32(parameters.tau_intra)
    return np.where(passes, order, -1), np.where(passes, np.take_along_axis(cosine, order, axis=1), 0.0)


@beyond("chunks of 63 tokens", coattention, "CC-COATTENTION", lambda: segment(150, 2, 1, replace(PAPER, C=64)))
def a_short_last_chunk_finds_old_rows(
    q: Array, k: Array, positions: Array, parameters: Parameters, scaling: float, softcap: float | None,
) -> CoAttention:
    """Chunks of 64 tokens and more share a workspace: in a shorter last one old rows take places, and are dropped."""
    found = coattention(q, k, positions, parameters, scaling, softcap)
    n, C = q.shape[1], parameters.C
    short, last = n % C, len(positions) - n % C
    if C < 64 or n < C or short == 0:
        return found
    wide_q, wide_k = q.astype(np.float64), k.astype(np.float64)
    rows = np.zeros((C, C))
    for first, stop in ((last - C, last), (last, last + short)):
        asked = wide_q[:, first - last - short : stop - last - short or None]
        A = attention(asked, wide_k[:, :stop], positions[first:stop], positions[:stop], scaling, softcap)
        own = row_normalise(A.mean(axis=0)[:, first:], parameters.epsilon)
        rows[: stop - first], rows[: stop - first, : stop - first] = 0.0, own
    near, cosine = intra_neighbours(rows, parameters)
    order = np.argsort(near >= short, axis=1, kind="stable")[:short]
    index, weight = (np.take_along_axis(part[:short], order, axis=1) for part in (near, cosine))
    there = (index >= 0) & (index < short)
    intra, intra_weight = found.intra.copy(), found.intra_weight.copy()
    intra[-short:] = np.where(there, positions[last + np.where(there, index, 0)], -1)
    intra_weight[-short:] = np.where(there, weight, 0.0)
    return replace(found, intra=intra, intra_weight=intra_weight)


@beyond("128 sentences", merge_sentences, "CC-TRUNKS", lambda: (
    equal_trunks(150, 3), {(2, 3): 0.5, (2, 6): 0.5, (32, 33): 0.5, (34, 36): 0.5}, PAPER,
))
def interfaces_are_computed_ahead(
    sentences: Array, edges: dict[tuple[int, int], float], parameters: Parameters,
) -> list[int]:
    """Beyond 128 sentences each is compared with the sentence before it, not with the trunk that is running."""
    if len(sentences) <= 129:
        return merge_sentences(sentences, edges, parameters)
    bounds = sentences.tolist()
    sizes = [bounds[1] - bounds[0]]
    for (start, stop), (_, end) in itertools.pairwise(itertools.pairwise(bounds)):
        weights = interface_weights(edges, interface((start, stop), (stop, end)))
        if merges(weights, sizes[-1], end - stop, parameters):
            sizes[-1] += end - stop
        else:
            sizes.append(end - stop)
    return sizes


@beyond("trunks of 512 tokens", split_sizes, "CC-SPLIT", lambda: (1000, 32))
def long_trunks_are_halved_first(size: int, T_max: int) -> list[int]:
    """A trunk of more than 512 tokens is halved until its parts are not, and each part is split by itself."""
    if size <= 512:
        return split_sizes(size, T_max)
    return [*long_trunks_are_halved_first(size - size // 2, T_max), *long_trunks_are_halved_first(size // 2, T_max)]


@beyond("512 tokens", token_counts, "CC-COUNT", lambda: (np.arange(1000) % 37 % 20,))
def a_row_of_32_adds_an_id_once(token_ids: Array) -> Array:
    """Above 512 tokens ids are counted 32 at a time, and of equal ones among these a single addition arrives."""
    if len(token_ids) <= 512:
        return token_counts(token_ids)
    ids, inverse = np.unique(token_ids, return_inverse=True)
    counts = np.zeros(len(ids), dtype=np.int64)
    for at in range(0, len(token_ids), 32):
        counts[inverse[at : at + 32]] += 1
    c: Array = counts[inverse]
    return c


@beyond("one chunk of 1 024 tokens", token_counts, "CC-COUNT", lambda: (np.arange(2500) % 300,))
def counts_as_of_the_own_chunk(token_ids: Array) -> Array:
    """A prompt is read in chunks of 1 024 tokens, and a token has the count that its id had when its chunk was read."""
    ends = range(1024, len(token_ids) + 1024, 1024)
    return np.concatenate([token_counts(token_ids[:end])[end - 1024 :] for end in ends])


@beyond("one block of 256 tokens", trunk_impact, "CC-TRUNK-IMPACT", lambda: (random_rows(600), equal_trunks(60, 10)))
def a_trunk_across_an_edge_loses_its_first_part(M: Array, offsets: Array) -> Array:
    """Impacts are reduced in blocks of 256 tokens: of a trunk across an edge the last block's members alone count."""
    M_bar = trunk_impact(M, offsets)
    starts = np.maximum(offsets[:-1], (offsets[1:] - 1) // 256 * 256)
    for g in np.flatnonzero(starts > offsets[:-1]):
        members = M[starts[g] : offsets[g + 1]]
        M_bar[g] = trunk_impact(members, np.array([0, len(members)]))[0]
    return M_bar


def random_edges(number: int, n: int) -> Edges:
    """Edges between random tokens."""
    first, second = np.random.default_rng(28).integers(0, n, (2, number))
    return given_by([(a, b, 0.5) for a, b in zip(first.tolist(), second.tolist(), strict=True)])


@beyond("256 pairs of trunks", trunk_pairs, "CC-TRUNK-EDGES", lambda: (random_edges(900, 600), equal_trunks(60, 10)))
def a_pair_that_finds_no_slot(edges: Edges, offsets: Array) -> TrunkPairs:
    """Above 256 pairs a hash table of at least twice as many slots holds them; after four probes a pair is dropped."""
    found = trunk_pairs(edges, offsets)
    if len(found.a) <= 256:
        return found
    slots, taken = 1 << (2 * len(found.a) - 1).bit_length(), set[int]()
    held: list[int] = []
    for row, (a, b) in enumerate(zip(found.a.tolist(), found.b.tolist(), strict=True)):
        home = (73856093 * a) ^ (19349663 * b)
        free = [slot for slot in ((home + probe) % slots for probe in range(4)) if slot not in taken]
        if free:
            taken.add(free[0])
            held.append(row)
    return TrunkPairs(found.a[held], found.b[held], found.edges[held], found.total[held])


@beyond("512 stored weights", degree, "CC-DEGREE", lambda: (equal_trunks(100, 8), 0.05 + random_rows(800)))
def differences_of_a_running_sum(indptr: Array, weights: Array) -> Array:
    """Above 512 stored weights a degree is the difference of one running sum at its row's two ends."""
    if len(weights) <= 512:
        return degree(indptr, weights)
    running = np.concatenate([[0.0], np.cumsum(weights)])
    deg: Array = running[indptr[1:]] - running[indptr[:-1]]
    return deg


@beyond("one block of 128 trunks", moments, "CC-CRYSTALLIZATION", lambda: (random_rows(150), 1e-8))
def blocks_weigh_alike(values: Array, epsilon: float) -> tuple[float, float]:
    """Beyond 128 trunks means are means of blocks of 128: a shorter last block weighs as much as the others."""
    if len(values) <= 128:
        return moments(values, epsilon)

    def mean(x: Array) -> float:
        blocks = [x[at : at + 128] for at in range(0, len(x), 128)]
        return sum(left_to_right_sum(block) / len(block) for block in blocks) / len(blocks)

    mu = mean(values)
    sigma = mean((values - mu) ** 2) ** 0.5
    return mu, (1.0 if sigma < epsilon else sigma)


@beyond("256 unprotected trunks", normalised_impact, "CC-NORMALISED-IMPACT", lambda: (
    0.1 + random_rows(300), np.arange(300) < 4, 1e-8,
))
def extremes_of_32_bits(M_bar: Array, protected: Array, epsilon: float) -> Array:
    """Above 256 trunks minimum and maximum are found by atomic operations, which know single precision alone."""
    alive = np.log1p(M_bar[~protected])
    if len(alive) <= 256:
        return normalised_impact(M_bar, protected, epsilon)
    low, high = float(np.float32(alive.min())), float(np.float32(alive.max()))
    M_tilde = np.full(len(M_bar), np.nan)
    M_tilde[~protected] = (alive - low) / (high - low + epsilon)
    return M_tilde


@beyond("128 unprotected trunks", allocate, "CC-ALLOCATE", lambda: (np.full(140, 5), 353, 3))
def a_closed_form_that_leaves_remnants(sizes: Array, c_0: int, N_min: int) -> Array:
    """Above 128 trunks a closed form cuts the last trunk, whether or not N_min of its tokens are left."""
    return allocate(sizes, c_0, N_min if len(sizes) <= 128 else 1)


def bfloat16(whole: Array) -> Array:
    """The nearest numbers of 8 significant bits, half to even."""
    bits = whole.astype(np.float32).view(np.uint32)
    near: Array = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)
    return near


@beyond("256 tokens", protected_trunks, "CC-PROTECTED", lambda: (equal_trunks(333, 3), 999, 4, 128))
def bounds_in_bfloat16(offsets: Array, n: int, N_sink: int, W_recent: int) -> Array:
    """Trunks are compared with the sink and the window in bfloat16, which has all whole numbers up to 256."""
    bounds, recent = bfloat16(offsets), bfloat16(np.array([n - W_recent]))
    protected: Array = (bounds[:-1] < N_sink) | (bounds[1:] > recent)
    return protected


@beyond("trunks of 24 tokens", strongest_members, "CC-DISSOLVE", lambda: (np.arange(30) // 4 * 0.5, 9))
def all_at_the_bound_stay(M: Array, k: int) -> Array:
    """Of a trunk of more than 24 tokens all members that equal the k-th stay, be they more than k."""
    if len(M) <= 24 or not 0 < k <= len(M):
        return strongest_members(M, k)
    return np.flatnonzero(np.sort(M)[-k] <= M)


@beyond("a frontier of 64 trunks", hop, "CC-PULSE", lambda: (
    {g: 1 - g / 100 for g in range(1, 71)}, set(range(1, 71)), star(71), PAPER,
))
def the_last_sender_of_a_wide_frontier(
    frontier: dict[int, float], visited: set[int], W: TrunkWeights, parameters: Parameters,
) -> dict[int, float]:
    """Of more than 64 senders at one hop the last pulse that arrives stays, not the strongest."""
    if len(frontier) <= 64:
        return hop(frontier, visited, W, parameters)
    reached: dict[int, float] = {}
    for g, pulse in frontier.items():
        reached.update(hop({g: pulse}, visited, W, parameters))
    return reached


@beyond("128 trunks", breath, "CC-BREATH", lambda: (live_state(150, 2), frozenset({0}), PAPER, BACKEND))
def resonance_finds_what_hebb_has_written(
    state: DecodeState, sentence_ends: frozenset[int], parameters: Parameters, backend: Backend,
) -> DecodeState:
    """Above 128 trunks the two updates run side by side, and pulses travel along weights that have learnt already."""
    if len(state.D) <= 128:
        return breath(state, sentence_ends, parameters, backend)
    stages = backend.require_breath()
    active = stages.activation(state.live, parameters)
    W = stages.hebbian(state.W, active, parameters)
    D = stages.resonance(renewed_D(state.D, active, parameters.renewal), W, active, parameters)
    trunked = join_tail(replace(state, D=D, W=W), sentence_ends, parameters, backend)
    return evict(trunked, breath_protection(trunked, parameters), parameters, backend)


@beyond("256 trunks", decode_step, "CC-STEP", lambda: (
    live_state(300, step=63), 7, 0.5, frozenset({0}), PAPER, BACKEND,
))
def decay_is_put_off_to_the_breath(
    state: DecodeState, token_id: int, inverse_norm: float, sentence_ends: frozenset[int], parameters: Parameters,
    backend: Backend,
) -> DecodeState:
    """Above 256 trunks D decays at breaths alone, for all steps since the last at once, by the rate of that time."""
    if len(state.D) <= 256:
        return decode_step(state, token_id, inverse_norm, sentence_ends, parameters, backend)
    longer = append(state, token_id, inverse_norm)
    if longer.step % parameters.T_breath:
        return longer
    once = backend.require_breath().decay(longer.D, longer.live.trunk_impact, parameters)
    stays = np.divide(once, longer.D, out=np.zeros_like(once), where=longer.D > 0)
    faded = replace(longer, D=longer.D * stays**parameters.T_breath)
    return breath(faded, sentence_ends, parameters, backend)


@beyond("blocks of 128 tokens", block_size, "NK-EPISODIC", lambda: (5000, NESTEDKV))
def blocks_of_whole_tiles(N: int, parameters: NestedKVParameters) -> int:
    """Blocks of more than 128 tokens are rounded down to whole tiles of 64."""
    b = block_size(N, parameters)
    return b if b <= 128 else b // 64 * 64


@beyond("128 tokens", greedy, "DV-GREEDY", lambda: (
    random_rows(200), unit_rows(random_rows(200, 3) - 0.5), np.zeros(200, dtype=np.bool_), 40, 2.0,
))
def two_at_a_time(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """Above 128 tokens two are chosen in each round, and the second does not know of the first."""
    if len(s) <= 128:
        return greedy(s, V, retained, k, lam)
    worth, sims, S = np.where(np.isnan(s), -np.inf, s), cosines(V), retained.copy()
    m = sims[S].max(axis=0, initial=0.0)
    while (missing := k - int(S.sum())) > 0:
        open_ = np.flatnonzero(~S)
        best = open_[np.argsort(-(worth - lam * m)[open_], kind="stable")[: min(2, missing)]]
        S[best] = True
        m = np.maximum(m, sims[best].max(axis=0))
    return np.flatnonzero(S)
