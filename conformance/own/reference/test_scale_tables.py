"""The scale lane: tables, edges and caches of the reference at full size."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from conformance.oracles import s6
from conformance.oracles.scale import decode, selectors, stages
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_tables import lists, of_sizes, state_at
from conformance.suite.test_scale_decode import QUIET
from conformance.suite.test_scale_dissolution import SIZES
from conformance.suite.test_scale_trunks import CASES, Case
from reference.crystalcache.breath import protected_trunks_of
from reference.crystalcache.compaction import compact
from reference.crystalcache.live import keep
from reference.crystalcache.protection import protected_trunks
from spec.parameters import PAPER

pytestmark = pytest.mark.usefixtures("reference_items")


@pytest.mark.spec("CC-PROTECTED")
@pytest.mark.parametrize("m", SIZES)
def test_sinks_and_windows_over_many_trunks(m: int) -> None:
    """Trunks of up to three tokens; sink and window begin at any token, and may hold all of them."""
    offsets = of_sizes(Numbers(m).integers(1, 4, m)).offsets
    n = int(offsets[-1])
    for sink, recent in ((4, 128), (n // 3, n // 2), (n // 3 + 1, n // 2 + 1), (0, n), (n, 0)):
        p = replace(PAPER, N_sink=sink, W_recent=recent)
        assert protected_trunks(offsets, n, sink, recent).tolist() == stages.protected(offsets, n, p).tolist()


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize(("H", "n"), [(2, 41), (17, 257), (3, 1_025), (8, 9_000), (1, 140_000)])
def test_slots_of_long_caches(H: int, n: int) -> None:
    """One token in five goes, the first among them; keys and values say whose they are."""
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
    """One token in `share` goes, the first trunk whole: every later slot and number moves."""
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
    """Windows that begin at every token of a run; sinks that end inside the table."""
    before = state_at(seen, m, largest, 9, 400, QUIET)
    positions = before.live.positions.tolist()
    members = [positions[a:b] for a, b in pairwise(before.live.offsets.tolist())]
    for step in range(8 if m < 1_000 else 2):
        sink, recent = positions[0] + 70 + step, m // 3 + step
        found = protected_trunks_of(before.live, seen, sink, recent)
        assert found.tolist() == s6.protected(members, seen, sink, recent)


@pytest.mark.spec("CC-EDGES")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_edges_at_full_size(case: Case) -> None:
    """Order, orientation and absolute positions of up to 480 000 edges."""
    found = lists(case.lists)
    for got, want in zip(found.edges(), stages.edge_columns(found), strict=True):
        assert np.array_equal(got, want)
