"""Tests of S2 at full size: many sentences, long trunks, positions above 2^32, sums whose order matters."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from conformance import tolerances
from conformance.checks.stage_checks import edges_of
from conformance.oracles import s2
from conformance.oracles.scale import stages as oracle
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_tables import Lists, lists, some_ends
from spec.arrays import BoolVector
from spec.backend import CrystalStages
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import CoAttention

pytestmark = pytest.mark.usefixtures("compiled")

NO_EDGES = replace(PAPER, k_intra=0, k_cross=0)
WHOLE = 2**31 - 1  # The largest T_max.


@dataclass(frozen=True)
class Case:
    """Input of S2: neighbour lists, sentences and limits."""

    name: str
    lists: Lists
    every: int
    T_max: int
    tau_merge: float = 0.64
    """Threshold near the weights, so that each weight can change the result."""

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("paper", Lists(20_000, 8, 4, 1024), 6, 32),
    Case("words", Lists(80_000, 2, 2, 512), 1, 32),
    Case("long-trunks", Lists(30_000, 6, 4, 1024), 4, 4096),
    Case("endless-trunk", Lists(70_000, 5, 1, 2048), 3, WHOLE, 0.3),
    Case("wide-lists", Lists(3_000, 40, 8, 1024), 5, 300),
    Case("beyond-2^24", Lists(4_000, 6, 3, 256, 2**24 - 2_001), 4, 40),
    Case("beyond-2^31", Lists(4_000, 6, 3, 256, 2**31 - 2_001), 4, 40),
    Case("beyond-2^32", Lists(4_000, 6, 3, 256, 2**32 + 77), 4, 40),
    Case("beyond-2^53", Lists(4_000, 6, 3, 256, 2**53 - 2_001), 4, 40),
]


def parameters(case: Case) -> CrystalCacheParameters:
    shape = case.lists
    return replace(
        PAPER, C=shape.C, k_intra=shape.k_intra, k_cross=shape.k_cross, T_max=case.T_max, tau_merge=case.tau_merge
    )


@pytest.mark.spec("CC-INTERFACE-EDGES")
def test_a_pair_is_found_by_itself(stages: CrystalStages) -> None:
    """Check that an interface adds only the edges of its pairs of tokens.

    Few pairs of about 25 interfaces are among the 240 000 edges. Colliding hashes would add edges of different pairs.
    """
    shape = Lists(60_000, 3, 1, 1024, near=False)
    actual, ends = lists(shape), np.arange(shape.n) % 2_400 == 1_031
    p = replace(PAPER, C=shape.C, k_intra=shape.k_intra, k_cross=shape.k_cross, T_max=WHOLE)
    want = oracle.trunks(ends, oracle.edge_columns(actual), 0, p)
    assert 20 < len(want) - 1 <= ends.sum() + 1
    assert np.array_equal(stages.trunks(actual, np.ones(shape.n), ends, p).offsets, want)


@pytest.mark.spec("CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-TRUNKS")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_offsets_at_full_size(stages: CrystalStages, case: Case) -> None:
    """Check the offsets of trunks.

    Most pairs of an interface have no edge, so an edge of a different pair, added by error, changes the offsets.
    """
    p, actual = parameters(case), lists(case.lists)
    ends = some_ends(case.lists.n, case.every, 2)
    got = stages.trunks(actual, np.ones(case.lists.n), ends, p)
    want = oracle.trunks(ends, oracle.edge_columns(actual), actual.start, p)
    assert np.array_equal(got.offsets, want)
    merged = len(oracle.sentences(ends)) - len(np.setdiff1d(oracle.sentences(ends) + actual.start, want))
    assert merged < 0.9 * len(oracle.sentences(ends)), "too few sentences merge"


def bare(n: int, start: int = 0) -> CoAttention:
    empty = np.zeros((n, 0), dtype=np.int64), np.zeros((n, 0))
    return CoAttention(start, np.ones(n), *empty, *empty)


def offsets(stages: CrystalStages, ends: BoolVector, T_max: int, start: int = 0) -> list[int]:
    n = len(ends)
    result = stages.trunks(bare(n, start), np.ones(n), ends, replace(NO_EDGES, T_max=T_max)).offsets
    return [int(x) for x in result]


@pytest.mark.spec("CC-SENTENCES")
@pytest.mark.parametrize("n", [16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1_024, 1_025, 65_537])
def test_every_token_is_a_sentence(stages: CrystalStages, n: int) -> None:
    """Check sentences of one token, for numbers of sentences near the limits of integer dtypes."""
    assert offsets(stages, np.ones(n, dtype=np.bool_), WHOLE) == list(range(n + 1))


@pytest.mark.spec("CC-SENTENCES")
@pytest.mark.parametrize("length", [15, 16, 31, 33, 65, 129, 257, 1_025, 65_537])
def test_sentences_of_one_length(stages: CrystalStages, length: int) -> None:
    """Check three sentences of equal length, followed by one token."""
    ends = np.zeros(3 * length + 1, dtype=np.bool_)
    ends[length - 1 :: length] = True
    assert offsets(stages, ends, WHOLE) == [0, length, 2 * length, 3 * length, 3 * length + 1]


@pytest.mark.spec("CC-TRUNKS")
@pytest.mark.parametrize("start", [2**24 - 13, 2**31 - 13, 2**32 - 13, 2**53 - 41])
def test_odd_offsets_beyond_every_width(stages: CrystalStages, start: int) -> None:
    """Check trunks of five tokens at large positions. A narrower dtype can represent only every second position."""
    assert offsets(stages, np.arange(40) % 5 == 4, 5, start) == list(range(start, start + 41, 5))


@pytest.mark.spec("CC-SPLIT")
@pytest.mark.parametrize("T_max", [1, 7, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1_024, 1_025, 65_536, 65_537])
def test_one_long_sentence_is_split(stages: CrystalStages, T_max: int) -> None:
    """Check that 200 003 tokens in one sentence are split into pieces that differ by at most one, larger first."""
    n = 200_003
    k = -(-n // T_max)
    sizes = [n // k + (piece < n % k) for piece in range(k)]
    assert offsets(stages, np.zeros(n, dtype=np.bool_), T_max) == np.cumsum([0, *sizes]).tolist()


@pytest.mark.spec("CC-SPLIT")
def test_a_sentence_that_float32_does_not_count(stages: CrystalStages) -> None:
    """Check the split of 2^24 + 1 tokens, which is one token more than T_max."""
    n = 2**24 + 1
    assert offsets(stages, np.zeros(n, dtype=np.bool_), n - 1) == [0, n // 2 + 1, n]


@pytest.mark.spec("CC-SPLIT")
@pytest.mark.parametrize("start", [2**24 + 1, 2**31 - 3, 2**32 + 5, 2**40 + 1])
def test_pieces_at_far_positions(stages: CrystalStages, start: int) -> None:
    assert offsets(stages, np.zeros(67, dtype=np.bool_), 32, start) == [start + x for x in (0, 23, 45, 67)]


@pytest.mark.spec("CC-INTERFACE")
@pytest.mark.parametrize("length", [5, 6, 16, 17, 33, 65, 129, 257, 1_025, 70_000])
def test_five_tokens_on_either_side(stages: CrystalStages, length: int) -> None:
    """Check that only edges between the last five and the first five tokens of two sentences count."""
    def joined(a: int, b: int) -> bool:
        n = 2 * length
        index, weight = np.full((n, 1), -1), np.zeros((n, 1))
        index[length - a, 0], weight[length - a, 0] = length - 1 + b, 0.9
        ends = np.zeros(n, dtype=np.bool_)
        ends[length - 1] = True
        result = CoAttention(0, np.ones(n), index, weight, np.full((n, 1), -1), np.zeros((n, 1)))
        p = replace(PAPER, C=WHOLE, k_intra=1, k_cross=1, T_max=WHOLE)
        return len(stages.trunks(result, np.ones(n), ends, p).offsets) == 2

    assert joined(1, 1)
    assert joined(5, 5)
    if length > 5:
        assert not joined(6, 1)
        assert not joined(1, 6)


@pytest.mark.spec("CC-MERGE")
@pytest.mark.parametrize("T_max", [16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1_024, 1_025, 65_537])
def test_a_trunk_grows_to_T_max_and_no_further(stages: CrystalStages, T_max: int) -> None:
    """Check that T_max linked sentences of one token merge, and that the next sentence begins a new trunk."""
    n = 2 * T_max + 1
    index, weight = np.arange(1, n + 1)[:, None], np.full((n, 1), 0.5)
    index[-1], weight[-1] = -1, 0.0
    actual = CoAttention(0, np.ones(n), index, weight, np.full((n, 1), -1), np.zeros((n, 1)))
    p = replace(PAPER, C=WHOLE, k_intra=1, k_cross=1, T_max=T_max)
    got = stages.trunks(actual, np.ones(n), np.ones(n, dtype=np.bool_), p).offsets
    assert got.tolist() == [0, T_max, 2 * T_max, n]


@pytest.mark.spec("CC-TRUNK-IMPACT")
@pytest.mark.parametrize("size", [3, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1_024, 1_025, 65_537, 150_000])
@pytest.mark.parametrize("last", [True, False])
def test_the_three_largest_of_a_long_trunk(stages: CrystalStages, size: int, last: bool) -> None:
    """Check the three largest impacts of three equal trunks. The impacts are last in the trunk, or anywhere."""
    numbers, n = Numbers(size), 3 * size
    M = 0.1 + numbers.fractions(n)
    if last:
        M = np.sort(M.reshape(3, size), axis=1).ravel()
    ends = np.zeros(n, dtype=np.bool_)
    ends[size - 1 :: size] = True
    got = stages.trunks(bare(n), M, ends, replace(NO_EDGES, T_max=WHOLE))
    assert got.offsets.tolist() == [0, size, 2 * size, n]
    assert got.impact.tolist() == oracle.trunk_impact(M, got.offsets).tolist()


@pytest.mark.spec("CC-TRUNK-IMPACT")
def test_the_impact_of_many_trunks(stages: CrystalStages) -> None:
    """Check the impact of 70 000 trunks of at most three tokens."""
    n = 140_000
    M, ends = Numbers(3).fractions(n), some_ends(n, 2, 3)
    got = stages.trunks(bare(n), M, ends, replace(NO_EDGES, T_max=3))
    assert len(got.impact) > 2**16
    assert got.impact.tolist() == oracle.trunk_impact(M, got.offsets).tolist()


@pytest.mark.spec("CC-UNIT-TRUNK-IMPACT")
@pytest.mark.parametrize("m", [16, 17, 33, 65, 129, 257, 1_025, 65_537])
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_unit_impact_between_extremes_anywhere(stages: CrystalStages, m: int, at: str) -> None:
    """Check trunks of one token. Two adjacent trunks have the least and the greatest impact."""
    M = 1 + Numbers(m).fractions(m)
    place = {"first": 0, "middle": m // 2, "last": m - 2}[at]
    M[[place, place + 1]] = 0.5, 9.0
    p = replace(NO_EDGES, trunk_impact="unit", T_max=1)
    actual = stages.trunks(bare(m), M, np.zeros(m, dtype=np.bool_), p).impact
    assert tolerances.close("CC-IMPACT", actual, (M - 0.5) / (9.0 - 0.5 + p.epsilon))


@pytest.mark.spec("CC-ADAPTIVE-MERGE")
@pytest.mark.parametrize(("n", "every"), [(300, 2), (700, 3), (500, 1)])
def test_the_median_of_hundreds_of_interfaces(stages: CrystalStages, n: int, every: int) -> None:
    given, ends = lists(Lists(n, 6, 3, 256)), some_ends(n, every, 6)
    p = replace(PAPER, C=256, k_intra=6, k_cross=3, merge="median", T_max=300)
    want = s2.trunks(ends.tolist(), edges_of(given), p)
    actual = stages.trunks(given, np.ones(n), ends, p).offsets
    assert actual.tolist() == [*(g[0] for g in want), n]
