"""Policies on the host at full size: selection, protection, shares and budgets over thousands of tokens and groups."""

from fractions import Fraction

import numpy as np
import pytest

from conformance.assurance.oracles import policies as oracle
from conformance.oracles.scale import selectors
from conformance.strategies.numbers import Numbers
from reference.crystalcache.protection import effective_budget
from reference.memory import kv_bytes
from reference.policies.budgets import Adaptive, Competition, Pyramid, even, largest_remainder
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import fill_units, recent_half, top_units
from spec.arrays import Matrix, Vector
from spec.budget import parse_budget
from spec.policy import Scores, Selection

pytestmark = pytest.mark.usefixtures("reference_items")

SIZES = [17, 33, 65, 129, 257, 1_025, 5_000]
# Kinds of distinct scores of which bins, float32 or a fixed number of bits take many for one.
CLOSE = ("next-floats", "beside-one-far", "of-all-sizes")


def close(kind: str, n: int, seed: int) -> Vector:
    """n distinct numbers in (0, 1], at most 2^20, in a drawn order."""
    rank = Numbers(seed).permutation(n)
    found: Vector = {
        "next-floats": 0.5 + rank * 2.0**-53,
        "beside-one-far": np.where(rank == n - 1, 1.0, (1 + rank) * 2.0**-60),
        "of-all-sizes": np.ldexp(0.5 + rank / (2 * n), -(rank % 900)),
    }[kind]
    return found


def rows(groups: int, n: int, values: int, pinned: int) -> Matrix:
    """Scores of few values, so that most tie; the first tokens are protected."""
    found: Matrix = Numbers(groups * n).integers(0, values, groups * n).reshape(groups, n) / values
    found[:, :pinned] = np.nan
    return found


def sets(found: Selection) -> list[list[int]]:
    """The kept positions of each group."""
    return [part.tolist() for part in np.split(found.positions, found.offsets[1:-1])]


def plain(values: Matrix) -> list[list[float | None]]:
    return [[None if np.isnan(x) else x for x in row.tolist()] for row in values]


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("n", [*SIZES, 66_000])
@pytest.mark.parametrize("values", [1, 7])
def test_the_best_tokens_of_many(n: int, values: int) -> None:
    v = rows(2, n, values, 5)
    found = top_units(Scores(v, np.arange(n + 1)), np.array([n // 2, n // 3]), np.arange(n) < 5)
    assert sets(found) == [oracle.top(row, B) for row, B in zip(plain(v), (n // 2, n // 3), strict=True)]


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("m", SIZES)
def test_protected_tokens_hold_their_unit(m: int) -> None:
    """Units of 1 to 4 tokens; one token of the last is protected, and of one in forty."""
    numbers = Numbers(m)
    sizes, scores = numbers.integers(1, 5, m), numbers.integers(0, 9, m) / 9
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    shut = numbers.integers(0, 40, m) == 0
    shut[-1] = True
    protected = np.zeros(offsets[-1], dtype=np.bool_)
    protected[(offsets[:-1] + numbers.below(sizes))[shut]] = True
    B = int(offsets[-1]) // 2
    found = top_units(Scores(scores[None], offsets), np.array([B]), protected)
    assert sets(found) == [selectors.whole_units(scores, sizes, shut, B)]


@pytest.mark.spec("PO-TOP-UNITS", "PO-H2O", "PO-FILL-UNITS")
@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("n", [65, 300, 5_000])
def test_scores_that_lie_close(n: int, kind: str) -> None:
    """Of both signs: none is another's equal, however coarse the machine."""
    v = np.stack([close(kind, n, 1), -close(kind, n, 2), close(kind, n, 3) - 0.5])
    B, nobody = n // 3, np.zeros(n, dtype=np.bool_)
    scores, budgets = Scores(v, np.arange(n + 1), members=v), np.full(3, B)
    want = [oracle.top(row, B) for row in plain(v)]
    assert sets(top_units(scores, budgets, nobody)) == want
    assert sets(fill_units(scores, budgets, nobody)) == want
    assert sets(recent_half(scores, budgets, nobody)) == [halved(row, B) for row in plain(v)]


def halved(row: list[float | None], B: int) -> list[int]:
    """H2O's kept set."""
    return oracle.top([*row[: len(row) - B // 2], *[None] * (B // 2)], B)


@pytest.mark.spec("PO-H2O")
@pytest.mark.parametrize("n", [*SIZES, 66_000])
def test_half_of_a_large_budget(n: int) -> None:
    """Budgets of a third, of nine tenths and of all tokens; the best scores are the oldest."""
    v = np.tile(np.arange(n, 0, -1) // 3 / n, (3, 1))
    budgets = [n // 3, 9 * n // 10, n]
    found = recent_half(Scores(v, np.arange(n + 1)), np.array(budgets), np.zeros(n, dtype=np.bool_))
    assert sets(found) == [halved(row, B) for row, B in zip(plain(v), budgets, strict=True)]


@pytest.mark.spec("PO-FILL-UNITS")
@pytest.mark.parametrize(("chunk", "chunks"), [
    (1, 5_000), (3, 1_100), (10, 300), (17, 140), (33, 70), (65, 40), (129, 40), (257, 40),
])
def test_whole_chunks_of_any_length(chunk: int, chunks: int) -> None:
    """Chunks of one length; totals and members of dyadics tie; the last tokens are protected."""
    n = chunks * chunk
    members = Numbers(chunk).integers(0, 4, n) / 4
    totals = np.add.reduceat(members, np.arange(0, n, chunk))
    window = np.arange(n + 70) >= n
    scores = Scores(
        np.append(totals, np.nan)[None], np.append(np.arange(0, n + 1, chunk), n + 70),
        np.where(window, np.nan, np.pad(members, (0, 70)))[None],
    )
    B = n // 3 + chunk // 2 + 70
    found = fill_units(scores, np.array([B]), window)
    assert sets(found) == [oracle.chunk_selection([*members.tolist(), *[None] * 70], chunk, B)]


@pytest.mark.spec("PO-STREAMINGLLM")
@pytest.mark.parametrize("sink", [0, 4, 65, 1_025, 70_000])
@pytest.mark.parametrize("recent", [0, 33, 257, 1_025, 66_000])
def test_sinks_and_windows_of_any_length(sink: int, recent: int) -> None:
    """The first and the last of 150 000 tokens, and of fewer than either."""
    for seen in (150_000, 900):
        want = [*range(min(sink, seen)), *range(max(min(sink, seen), seen - recent), seen)]
        assert np.flatnonzero(SinkAndRecent(sink, recent)(seen)).tolist() == want


@pytest.mark.spec("PO-PYRAMID-BUDGET")
@pytest.mark.parametrize(("L", "heads"), [(33, 2), (64, 1), (80, 8), (126, 1), (257, 3)])
@pytest.mark.parametrize(("n", "B"), [(900, 300), (70_000, 9_001), (2**24 + 5, 2**23 + 1)])
def test_pyramids_of_many_layers(L: int, heads: int, n: int, B: int) -> None:
    """Each head's column; scores are looked at for their number alone."""
    scores = Scores(np.zeros((L * heads, 1)), np.array([0, n]), heads=heads)
    found = Pyramid(32)(B * L * heads, scores).reshape(L, heads)
    assert found.T.tolist() == [oracle.pyramid_shares(Fraction(B), 32, L, n, 20)] * heads


@pytest.mark.spec("PO-WHOLE-SHARES")
@pytest.mark.parametrize("groups", SIZES)
@pytest.mark.parametrize("total", [1_000, 2**24 + 1, 2**31 + 1, 2**32 + 3, 2**53 + 1])
def test_shares_of_any_total(groups: int, total: int) -> None:
    """Even shares, and targets with many different remainders."""
    shares = even(total, Scores(np.zeros((groups, 1)), np.arange(2)))
    assert int(shares.sum()) == total
    assert shares.tolist() == [total // groups + (g < total % groups) for g in range(groups)]
    if groups <= 257:
        weight = (1 + Numbers(groups).integers(0, 99, groups)).tolist()
        targets = [Fraction(total * w, sum(weight)) for w in weight]
        assert largest_remainder(targets).tolist() == oracle.whole(targets)


@pytest.mark.spec("PO-ADAPTIVE-BUDGET")
@pytest.mark.parametrize(("H", "n"), [(17, 300), (33, 129), (65, 65), (2, 5_000)])
def test_wins_of_many_heads(H: int, n: int) -> None:
    """Ties, and scores that lie close."""
    for v in (rows(H, n, 9, 4), *(close(kind, H * n, H).reshape(H, n) for kind in CLOSE)):
        B = n // 3
        found = Adaptive(Fraction(1, 5))(H * B, Scores(v, np.arange(n + 1), heads=H))
        assert found.tolist() == oracle.adaptive_shares(plain(v), B, Fraction(1, 5))


@pytest.mark.spec("PO-COMPETITION-BUDGET")
@pytest.mark.parametrize(("H", "n"), [(17, 300), (33, 129), (65, 65), (2, 5_000)])
def test_quotas_of_many_heads(H: int, n: int) -> None:
    """Ties, and scores that lie close."""
    for v in (rows(H, n, 9, 4), *(close(kind, H * n, H).reshape(H, n) for kind in CLOSE)):
        B = n // 3
        found = Competition(Fraction(1, 5))(H * B, Scores(v, np.arange(n + 1), heads=H))
        assert found.tolist() == oracle.competition_shares(plain(v), B, Fraction(1, 5))


@pytest.mark.spec("CC-BUDGET", "CC-BUDGET-FORMS")
@pytest.mark.parametrize("n", [25, 1_001, 2**24 + 1, 2**31 + 7, 2**32 + 1, 2**53 + 1, 10**18 + 1])
@pytest.mark.parametrize("share", ["0.28", "0.3", "0.07", "99%", "0.5", "1.0"])
def test_a_share_of_any_number(n: int, share: str) -> None:
    """The ceiling of the exact product, as an integer."""
    exact = Fraction(share) if share[-1] != "%" else Fraction(int(share[:-1]), 100)
    tokens = -(-exact.numerator * n // exact.denominator)
    assert parse_budget(share).tokens(n) == tokens
    assert effective_budget(parse_budget(share), n, 4, 128) == max(132, tokens)
    assert parse_budget(n).tokens(5) == n


@pytest.mark.spec("CC-MEMORY")
def test_bytes_of_any_size() -> None:
    """A thousand sequences of ten million tokens: beyond 2^53."""
    assert kv_bytes(126, 8, 128, 10**7 + 1, 1_001, 2) == 2 * 126 * 8 * 128 * (10**7 + 1) * 1_001 * 2
