"""Functions of the host at full size: scores, selection, shares, tables and caches of thousands of tokens."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from conformance.methods import policies as oracle
from conformance.methods import signatures as signed
from conformance.methods import triattention
from conformance.methods.lagkv import lagkv as brute_lagkv
from conformance.oracles import s6
from conformance.oracles.scale import decode, selectors, stages
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_attention import Shape, laddered
from conformance.strategies.scale_tables import lists, of_sizes, state_at
from conformance.suite.test_scale_decode import QUIET
from conformance.suite.test_scale_dissolution import SIZES as TRUNKS
from conformance.suite.test_scale_trunks import CASES, Case
from conformance.tolerances import scores_agree
from reference.crystalcache.breath import protected_trunks_of
from reference.crystalcache.compaction import compact
from reference.crystalcache.live import keep
from reference.crystalcache.protection import effective_budget, protected_trunks
from reference.diversity import Signature, signatures
from reference.policies.attention import accumulated_attention, average_pool, max_pool, observed_attention
from reference.policies.budgets import Adaptive, Competition, Pyramid, even, largest_remainder
from reference.policies.lagkv import lagkv_score
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import fill_units, recent_half, top_units
from reference.triattention import z_scores
from spec.arrays import Matrix, Vector
from spec.budget import parse_budget
from spec.parameters import PAPER
from spec.policy import LayerView, Scores, Selection

pytestmark = pytest.mark.usefixtures("reference_items")


SIZES = [17, 33, 65, 129, 257, 1_025, 5_000]


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize("shape", [
    Shape("three-of-nine", 9, 3, 64, 700), Shape("twenty", 20, 20, 64, 300),
    Shape("capped", 8, 1, 64, 400, softcap=30.0, sinks=True),
], ids=str)
def test_attention_of_hundreds_of_queries(shape: Shape) -> None:
    """Check all queries together, in windows of any length, and the later queries alone."""
    inputs = laddered(shape)
    q, k = inputs.q, inputs.k
    want = selectors.attended(q, k, inputs.scaling, inputs.softcap, inputs.sinks)
    view = LayerView(q, k, None, inputs.scaling, inputs.softcap, sinks=inputs.sinks)
    late = replace(view, q=np.ascontiguousarray(q[:, 10:]))
    for shown, first in ((view, 0), (late, 10)):
        sums = want[:, first:].sum(axis=1)
        assert all(map(scores_agree, accumulated_attention(shown), sums.tolist()))
    for W in (33, 65, 129, 257, shape.n):
        actual, last = observed_attention(view, W), want[:, -W:]
        assert actual.shape == last.shape
        assert scores_agree(actual.ravel(), last.ravel().tolist())


@pytest.mark.spec("PO-POOL")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kernel", [7, 17, 33, 65, 129])
def test_pools_of_long_rows(n: int, kernel: int) -> None:
    """Every entry differs from its neighbours, so that each matters. Two rows test that rows are not mixed."""
    x = 1 + Numbers(n).fractions(2 * n).reshape(2, n)
    for row, largest, average in zip(x.tolist(), max_pool(x, kernel), average_pool(x, kernel), strict=True):
        assert largest.tolist() == oracle.pool(row, kernel, "max")
        assert scores_agree(average, oracle.pool(row, kernel, "average"))


@pytest.mark.spec("PO-LAGKV")
@pytest.mark.parametrize(("n", "lag"), [(66_000, 128), (1_500, 300), (700, 2)])
def test_ranks_of_many_partitions(n: int, lag: int) -> None:
    """Check hundreds of partitions, and partitions of hundreds of tokens, with separate keys and values."""
    k, v = (Numbers(n + at).fractions(n * 3).reshape(1, n, 3) for at in (0, 1))
    (actual,) = lagkv_score(LayerView(k[:, :0], k, v, 1.0, None), 4, lag)
    (want,) = brute_lagkv({"k": k.tolist(), "v": v.tolist()}, 4, lag)
    tail = 4 + ((n - 4) // lag - 1) * lag
    assert actual[4:tail].tolist() == want[4:tail]
    assert (np.diff(actual[tail:]) == 1).all()
    assert actual[tail] == 1


@pytest.mark.spec("TA-RANKING")
@pytest.mark.parametrize("n", [*SIZES, 66_000])
def test_z_scores_over_thousands_of_candidates(n: int) -> None:
    """Check rising scores, so that no part has the moments of the whole. One token in ten is pinned."""
    numbers = Numbers(n)
    X = numbers.fractions(3 * n).reshape(3, n) + np.linspace(0, 3, n) ** 2
    pinned = numbers.integers(0, 10, n) == 0
    for row, got in zip(X.tolist(), z_scores(X, ~pinned), strict=True):
        assert scores_agree(got, triattention.z_score(row, pinned.tolist()))


@pytest.mark.spec("DV-SIGNATURE")
@pytest.mark.parametrize(("L", "H_kv"), [(2, 33), (9, 4), (36, 8), (80, 8), (126, 3)])
@pytest.mark.parametrize("mode", ["flat", "layer", "head"])
def test_signatures_of_many_layers_and_heads(mode: Signature, L: int, H_kv: int) -> None:
    """Compare bit for bit. Every part has different values."""
    values = Numbers(L * H_kv).fractions(L * H_kv * 3 * 5).reshape(L, H_kv, 3, 5) - 0.4
    actual = signatures(list(values), mode)
    assert actual.tolist() == signed.signatures(values.tolist(), mode)


# Kinds of distinct scores. Bins, float32 or a fixed number of bits map many of them to one value.
CLOSE = ("next-floats", "beside-one-far", "of-all-sizes")


def close(kind: str, n: int, seed: int) -> Vector:
    """Return n distinct numbers in (0, 1], at most 2^20, in random order."""
    rank = Numbers(seed).permutation(n)
    actual: Vector = {
        "next-floats": 0.5 + rank * 2.0**-53,
        "beside-one-far": np.where(rank == n - 1, 1.0, (1 + rank) * 2.0**-60),
        "of-all-sizes": np.ldexp(0.5 + rank / (2 * n), -(rank % 900)),
    }[kind]
    return actual


def rows(groups: int, n: int, values: int, pinned: int) -> Matrix:
    """Return scores with few different values, so that most tie. The first tokens are protected."""
    actual: Matrix = Numbers(groups * n).integers(0, values, groups * n).reshape(groups, n) / values
    actual[:, :pinned] = np.nan
    return actual


def sets(actual: Selection) -> list[list[int]]:
    """Return the kept positions of each group."""
    return [part.tolist() for part in np.split(actual.positions, actual.offsets[1:-1])]


def plain(values: Matrix) -> list[list[float | None]]:
    return [[None if np.isnan(x) else x for x in row.tolist()] for row in values]


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("m", SIZES)
def test_protected_tokens_hold_their_unit(m: int) -> None:
    """Check units of 1 to 4 tokens. One token is protected in the last unit and in one unit of forty."""
    numbers = Numbers(m)
    sizes, scores = numbers.integers(1, 5, m), numbers.integers(0, 9, m) / 9
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    shut = numbers.integers(0, 40, m) == 0
    shut[-1] = True
    protected = np.zeros(offsets[-1], dtype=np.bool_)
    protected[(offsets[:-1] + numbers.below(sizes))[shut]] = True
    B = int(offsets[-1]) // 2
    actual = top_units(Scores(scores[None], offsets), np.array([B]), protected)
    assert sets(actual) == [selectors.whole_units(scores, sizes, shut, B)]


@pytest.mark.spec("PO-TOP-UNITS", "PO-H2O", "PO-FILL-UNITS")
@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("n", [65, 300, 5_000])
def test_scores_that_lie_close(n: int, kind: str) -> None:
    """Check positive and negative scores. No two scores are equal, for any rounding."""
    v = np.stack([close(kind, n, 1), -close(kind, n, 2), close(kind, n, 3) - 0.5])
    B, nobody = n // 3, np.zeros(n, dtype=np.bool_)
    scores, budgets = Scores(v, np.arange(n + 1), members=v), np.full(3, B)
    want = [oracle.top(row, B) for row in plain(v)]
    assert sets(top_units(scores, budgets, nobody)) == want
    assert sets(fill_units(scores, budgets, nobody)) == want
    assert sets(recent_half(scores, budgets, nobody)) == [halved(row, B) for row in plain(v)]


def halved(row: list[float | None], B: int) -> list[int]:
    """Return the kept set of H2O."""
    return oracle.top([*row[: len(row) - B // 2], *[None] * (B // 2)], B)


@pytest.mark.spec("PO-STREAMINGLLM")
@pytest.mark.parametrize("sink", [0, 4, 65, 1_025, 70_000])
@pytest.mark.parametrize("recent", [0, 33, 257, 1_025, 66_000])
def test_sinks_and_windows_of_any_length(sink: int, recent: int) -> None:
    """Check the first and last of 150 000 tokens, and prompts that are shorter than sink and window."""
    for seen in (150_000, 900):
        want = [*range(min(sink, seen)), *range(max(min(sink, seen), seen - recent), seen)]
        assert np.flatnonzero(SinkAndRecent(sink, recent)(seen)).tolist() == want


@pytest.mark.spec("PO-PYRAMID-BUDGET")
@pytest.mark.parametrize(("L", "heads"), [(33, 2), (64, 1), (80, 8), (126, 1), (257, 3)])
@pytest.mark.parametrize(("n", "B"), [(900, 300), (70_000, 9_001), (2**24 + 5, 2**23 + 1)])
def test_pyramids_of_many_layers(L: int, heads: int, n: int, B: int) -> None:
    """Check the column of each head. Only the number of the scores matters."""
    scores = Scores(np.zeros((L * heads, 1)), np.array([0, n]), heads=heads)
    actual = Pyramid(32)(B * L * heads, scores).reshape(L, heads)
    assert actual.T.tolist() == [oracle.pyramid_shares(Fraction(B), 32, L, n, 20)] * heads


@pytest.mark.spec("PO-WHOLE-SHARES")
@pytest.mark.parametrize("groups", SIZES)
@pytest.mark.parametrize("total", [1_000, 2**24 + 1, 2**31 + 1, 2**32 + 3, 2**53 + 1])
def test_shares_of_any_total(groups: int, total: int) -> None:
    """Check even shares, and targets with many different remainders."""
    shares = even(total, Scores(np.zeros((groups, 1)), np.arange(2)))
    assert int(shares.sum()) == total
    assert shares.tolist() == [total // groups + (g < total % groups) for g in range(groups)]
    if groups <= 257:
        weight = (1 + Numbers(groups).integers(0, 99, groups)).tolist()
        targets = [Fraction(total * w, sum(weight)) for w in weight]
        assert largest_remainder(targets).tolist() == oracle.whole(targets)


@pytest.mark.spec("PO-ADAPTIVE-BUDGET", "PO-COMPETITION-BUDGET")
@pytest.mark.parametrize(("H", "n"), [(17, 300), (33, 129), (65, 65), (2, 5_000)])
def test_wins_of_many_heads(H: int, n: int) -> None:
    """Check ties, and scores that differ little."""
    for v in (rows(H, n, 9, 4), *(close(kind, H * n, H).reshape(H, n) for kind in CLOSE)):
        B = n // 3
        scores, fifth = Scores(v, np.arange(n + 1), heads=H), Fraction(1, 5)
        assert Adaptive(fifth)(H * B, scores).tolist() == oracle.adaptive_shares(plain(v), B, fifth)
        assert Competition(fifth)(H * B, scores).tolist() == oracle.competition_shares(plain(v), B, fifth)


@pytest.mark.spec("CC-BUDGET", "CC-BUDGET-FORMS")
@pytest.mark.parametrize("n", [25, 1_001, 2**24 + 1, 2**31 + 7, 2**32 + 1, 2**53 + 1, 10**18 + 1])
@pytest.mark.parametrize("share", ["0.28", "0.3", "0.07", "99%", "0.5", "1.0"])
def test_a_share_of_any_number(n: int, share: str) -> None:
    """Check the ceiling of the exact product, as an integer."""
    exact = Fraction(share) if share[-1] != "%" else Fraction(int(share[:-1]), 100)
    tokens = -(-exact.numerator * n // exact.denominator)
    assert parse_budget(share).tokens(n) == tokens
    assert effective_budget(parse_budget(share), n, 4, 128) == max(132, tokens)
    assert parse_budget(n).tokens(5) == n


@pytest.mark.spec("CC-PROTECTED")
@pytest.mark.parametrize("m", TRUNKS)
def test_sinks_and_windows_over_many_trunks(m: int) -> None:
    """Check trunks of up to three tokens. Sink and window begin at any token, and may contain all tokens."""
    offsets = of_sizes(Numbers(m).integers(1, 4, m)).offsets
    n = int(offsets[-1])
    for sink, recent in ((4, 128), (n // 3, n // 2), (n // 3 + 1, n // 2 + 1), (0, n), (n, 0)):
        p = replace(PAPER, N_sink=sink, W_recent=recent)
        assert protected_trunks(offsets, n, sink, recent).tolist() == stages.protected(offsets, n, p).tolist()


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize(("H", "n"), [(2, 41), (17, 257), (3, 1_025), (8, 9_000), (1, 140_000)])
def test_slots_of_long_caches(H: int, n: int) -> None:
    """Evict one token in five, including the first. Keys and values identify their token."""
    R = 1 + np.flatnonzero(Numbers(n).integers(0, 5, n - 1) > 0)
    K = np.arange(H * n * 2, dtype=np.float64).reshape(H, n, 2)
    keys, values = compact(K, -K[:, :, :1], R)
    assert keys.tolist() == [[[2.0 * (h * n + i), 2.0 * (h * n + i) + 1] for i in R.tolist()] for h in range(H)]
    assert values.tolist() == [[[-2.0 * (h * n + i)] for i in R.tolist()] for h in range(H)]


TABLES = [(60, 9), (300, 5), (1_500, 40), (66_000, 1)]


@pytest.mark.spec("CC-LIVE")
@pytest.mark.parametrize(("m", "largest"), TABLES)
@pytest.mark.parametrize("share", [2, 20])
def test_what_is_kept_of_large_tables(m: int, largest: int, share: int) -> None:
    """Evict one token in `share` and the whole first trunk, so that all slots and trunk indices change."""
    before = state_at(2**33, m, largest, 9, 400, QUIET)
    n = len(before.live.positions)
    stays = Numbers(share).integers(0, share, n) > 0
    stays[: before.live.offsets[1]] = False
    D = Numbers(m).fractions(m)
    after = keep(before, np.flatnonzero(stays), D)
    alive, offsets, rows = selectors.left(before.live.offsets, before.W, stays)
    for name in ("positions", "impact", "inverse_norms"):
        assert getattr(after.live, name).tolist() == getattr(before.live, name)[stays].tolist()
    assert after.live.offsets.tolist() == offsets
    assert after.live.trunk_impact.tolist() == before.live.trunk_impact[alive].tolist()
    assert after.D.tolist() == D[alive].tolist()
    assert decode.rows_of(after.W) == rows


@pytest.mark.spec("CC-LIVE-PROTECTED")
@pytest.mark.parametrize("seen", [70_001, 2**24 + 1_001, 2**31 + 99, 2**32 + 77, 2**53 + 401])
@pytest.mark.parametrize(("m", "largest"), [(300, 1), (300, 4), (20_000, 2)])
def test_windows_and_sinks_at_far_positions(seen: int, m: int, largest: int) -> None:
    """Check windows that begin at every token of a run, and sinks that end inside the table."""
    before = state_at(seen, m, largest, 9, 400, QUIET)
    positions = before.live.positions.tolist()
    members = [positions[a:b] for a, b in pairwise(before.live.offsets.tolist())]
    for step in range(8 if m < 1_000 else 2):
        sink, recent = positions[0] + 70 + step, m // 3 + step
        actual = protected_trunks_of(before.live, seen, sink, recent)
        assert actual.tolist() == s6.protected(members, seen, sink, recent)


@pytest.mark.spec("CC-EDGES")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_edges_at_full_size(case: Case) -> None:
    """Check order, orientation and absolute positions of up to 480 000 edges."""
    actual = lists(case.lists)
    for got, want in zip(actual.edges(), stages.edge_columns(actual), strict=True):
        assert np.array_equal(got, want)
