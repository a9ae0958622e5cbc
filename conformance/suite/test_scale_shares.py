"""The parts of policies on the host at full size: selection, shares and budgets over thousands of tokens and groups."""

from fractions import Fraction

import numpy as np
import pytest

from conformance.oracles import policies as oracle
from conformance.strategies.scale_numbers import Numbers
from reference.crystalcache.protection import effective_budget
from reference.memory import kv_bytes
from reference.policies.budgets import Adaptive, Competition, even, largest_remainder
from reference.policies.selectors import fill_units, top_units
from spec.arrays import Matrix
from spec.budget import parse_budget
from spec.policy import Scores

pytestmark = [pytest.mark.usefixtures("compiled"), pytest.mark.usefixtures("reference_items")]

SIZES = [17, 33, 65, 129, 257, 1_025, 5_000]


def rows(groups: int, n: int, values: int, pinned: int) -> Matrix:
    """Scores of few values, so that most tie; the first tokens are protected."""
    found: Matrix = Numbers(groups * n).integers(0, values, groups * n).reshape(groups, n) / values
    found[:, :pinned] = np.nan
    return found


def plain(values: Matrix) -> list[list[float | None]]:
    return [[None if np.isnan(x) else x for x in row.tolist()] for row in values]


@pytest.mark.spec(id="PO-TOP-UNITS")
@pytest.mark.parametrize("n", [*SIZES, 66_000])
@pytest.mark.parametrize("values", [1, 7])
def test_the_best_tokens_of_many(n: int, values: int) -> None:
    v = rows(2, n, values, 5)
    found = top_units(Scores(v, np.arange(n + 1)), np.array([n // 2, n // 3]), np.arange(n) < 5)
    for g, B in enumerate((n // 2, n // 3)):
        got = found.positions[found.offsets[g] : found.offsets[g + 1]]
        assert got.tolist() == oracle.top(plain(v)[g], B)


@pytest.mark.spec(id="PO-FILL-UNITS")
@pytest.mark.parametrize("chunk", [10, 17, 33, 65, 129, 257])
def test_whole_chunks_of_any_length(chunk: int) -> None:
    """Chunks of one length; totals and members of dyadics tie."""
    n = 40 * chunk
    members = Numbers(chunk).integers(0, 4, n) / 4
    totals = np.add.reduceat(members, np.arange(0, n, chunk))
    scores = Scores(totals[None], np.arange(0, n + 1, chunk), members[None])
    B = n // 3 + chunk // 2
    found = fill_units(scores, np.array([B]), np.zeros(n, dtype=np.bool_))
    assert found.positions.tolist() == oracle.chunk_selection(members.tolist(), chunk, B)


@pytest.mark.spec(id="PO-WHOLE-SHARES")
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


@pytest.mark.spec(id="PO-ADAPTIVE-BUDGET")
@pytest.mark.parametrize(("H", "n"), [(17, 300), (33, 129), (65, 65), (2, 5_000)])
def test_wins_of_many_heads(H: int, n: int) -> None:
    v, B = rows(H, n, 9, 4), n // 3
    found = Adaptive(Fraction(1, 5))(H * B, Scores(v, np.arange(n + 1), heads=H))
    assert found.tolist() == oracle.adaptive_shares(plain(v), B, Fraction(1, 5))


@pytest.mark.spec(id="PO-COMPETITION-BUDGET")
@pytest.mark.parametrize(("H", "n"), [(17, 300), (33, 129), (65, 65), (2, 5_000)])
def test_quotas_of_many_heads(H: int, n: int) -> None:
    v, B = rows(H, n, 9, 4), n // 3
    found = Competition(Fraction(1, 5))(H * B, Scores(v, np.arange(n + 1), heads=H))
    assert found.tolist() == oracle.competition_shares(plain(v), B, Fraction(1, 5))


@pytest.mark.spec(id="CC-BUDGET")
@pytest.mark.spec(id="CC-BUDGET-FORMS")
@pytest.mark.parametrize("n", [25, 1_001, 2**24 + 1, 2**31 + 7, 2**32 + 1, 2**53 + 1, 10**18 + 1])
@pytest.mark.parametrize("share", ["0.28", "0.3", "0.07", "99%", "0.5", "1.0"])
def test_a_share_of_any_number(n: int, share: str) -> None:
    """The ceiling of the exact product, as an integer."""
    exact = Fraction(share) if share[-1] != "%" else Fraction(int(share[:-1]), 100)
    tokens = -(-exact.numerator * n // exact.denominator)
    assert parse_budget(share).tokens(n) == tokens
    assert effective_budget(parse_budget(share), n, 4, 128) == max(132, tokens)
    assert parse_budget(n).tokens(5) == n


@pytest.mark.spec(id="CC-MEMORY")
def test_bytes_of_any_size() -> None:
    """A thousand sequences of ten million tokens: beyond 2^53."""
    assert kv_bytes(126, 8, 128, 10**7 + 1, 1_001, 2) == 2 * 126 * 8 * 128 * (10**7 + 1) * 1_001 * 2
