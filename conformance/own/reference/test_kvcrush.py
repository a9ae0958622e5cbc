"""KVCrush: distances, representatives and kept sets against brute force; at size; what it can stand on."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.brute import BLOCK, KERNEL, W
from conformance.assurance.oracles.policies import best_blocks, crushed
from conformance.plugin import sparingly
from conformance.strategies.numbers import Numbers
from conformance.strategies.policy_inputs import decided, drawn
from reference import policies
from reference.policies.kvcrush import ANCHORS, anchor_distances, scored_or_representative
from spec.arrays import BoolVector, Matrix
from spec.errors import SpecError
from spec.policy import Scores, Selection

pytestmark = pytest.mark.usefixtures("reference_items")

seeds = st.integers(0, 2**32 - 1)
shares_of = st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(2, 3), Fraction(1)])


def chosen(
    values: Matrix, protected: BoolVector, B: int, b: int, share: Fraction, anchor: str, heads: int,
) -> list[list[int]]:
    given_scores = Scores(np.where(protected, np.nan, values), np.arange(values.shape[1] + 1), heads=heads)
    found: Selection = scored_or_representative(given_scores, np.full(len(values), B), protected, b, share, anchor)
    assert {found.positions.dtype, found.offsets.dtype} == {np.dtype(np.int64)}
    return [part.tolist() for part in np.split(found.positions, found.offsets[1:-1])]


def rows_of(values: Matrix, protected: BoolVector) -> list[list[float | None]]:
    return [[None if held else float(x) for x, held in zip(row, protected, strict=True)] for row in values]


@pytest.mark.spec("PO-REPRESENTATIVES")
@given(seed=seeds, n=st.integers(1, 40), b=st.integers(1, 6), B=st.integers(0, 42), share=shares_of,
       anchor=st.sampled_from(ANCHORS))
def test_blocks_are_those_of_brute_force(seed: int, n: int, b: int, B: int, share: Fraction, anchor: str) -> None:
    """Two layers of two heads; few values, so that tokens, blocks and distances tie; some tokens have no score."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, (4, n)).astype(np.float64)
    values[rng.random((4, n)) < rng.choice([0.0, 0.2])] = np.nan
    protected = rng.random(n) < rng.choice([0.0, 0.1])
    rows = rows_of(values, protected)
    expected = [own for layer in (rows[:2], rows[2:]) for own in crushed(layer, b, B, share, anchor)]
    assert chosen(values, protected, B, b, share, anchor, 2) == expected


@pytest.mark.spec("PO-REPRESENTATIVES")
@given(seed=seeds, n=st.integers(1, 60), b=st.integers(1, 8), B=st.integers(0, 64), share=shares_of)
def test_as_many_blocks_stay_as_by_scores_alone(seed: int, n: int, b: int, B: int, share: Fraction) -> None:
    values = np.random.default_rng(seed).permutation(2 * n).reshape(2, n).astype(np.float64)
    protected = np.arange(n) < seed % 3
    for row, own in zip(rows_of(values, protected), chosen(values, protected, B, b, share, "mean", 2), strict=True):
        assert len(own) == len(best_blocks(row, b, B))


@pytest.mark.spec("PO-REPRESENTATIVES")
@pytest.mark.parametrize(("heads", "b", "n"), [(2, 16, 5_000), (8, 64, 20_000), (1, 300, 40_000)])
@pytest.mark.parametrize("anchor", ANCHORS)
def test_blocks_of_thousands_of_tokens(heads: int, b: int, n: int, anchor: str) -> None:
    """More bits in a block, and more blocks, than 8 bits count; some blocks are nearer than others by far."""
    numbers, m = Numbers(n + heads), n // b
    values = numbers.integers(0, 10**6, heads * n).reshape(heads, n) / 10**6
    values[:, : m * b] += np.tile(np.repeat(numbers.integers(0, 8, m) / 4, b), (heads, 1))
    protected = np.arange(n) >= n - 32
    closed = m * b - b * protected[: m * b].reshape(m, b).any(axis=1).sum()
    bits = values[:, :closed] >= np.sort(values[:, :closed], axis=1)[:, (closed + 1) // 2, None]
    words = bits.reshape(heads, -1, b)
    point = {"alternating": np.arange(b) % 2, "mean": words.mean(axis=1) > 0.5, "zeros": 0, "ones": 1}[anchor]
    distances = anchor_distances(values, protected, b, anchor)
    assert distances[: closed // b].tolist() == [int((words[:, at] != point).sum()) for at in range(closed // b)]
    for row, own in zip(values, chosen(values, protected, n // 3, b, Fraction(1, 2), anchor, heads), strict=True):
        places = (n // 3 - n % b) // b - (m - closed // b)
        totals = row[:closed].reshape(-1, b).sum(axis=1)
        best = np.argsort(-totals, kind="stable")[: places - places // 2]
        left = np.setdiff1d(np.arange(closed // b), best)
        left = left[np.argsort(distances[left], kind="stable")]
        near = [left[at * len(left) // (places // 2)] for at in range(places // 2)]
        assert {at // b for at in own if at < closed} == {*best.tolist(), *map(int, near)}


@pytest.mark.spec("PO-KVCRUSH")
@sparingly
@given(seed=seeds, B=st.integers(1, 30))
def test_without_representatives_it_is_block_retention(seed: int, B: int) -> None:
    inputs = drawn(seed)
    plain = policies.in_blocks(policies.snapkv(W, KERNEL), BLOCK)
    assert decided(policies.kvcrush(W, KERNEL, BLOCK, Fraction(0)), inputs, B) == decided(plain, inputs, B)


@pytest.mark.spec("PO-KVCRUSH")
def test_the_anchor_reaches_the_choice() -> None:
    """And a share of a float is the number that the float is."""
    inputs = drawn(3, n=200, L=1, heads=(2, 1))
    found = [decided(policies.kvcrush(W, KERNEL, BLOCK, 0.5, anchor), inputs, 60) for anchor in ANCHORS]
    assert all(one != other for at, one in enumerate(found) for other in found[:at])
    assert found[0] == decided(policies.kvcrush(W, KERNEL, BLOCK, Fraction(1, 2)), inputs, 60)


@pytest.mark.spec("PO-KVCRUSH")
@pytest.mark.parametrize(("make", "argument"), [
    (lambda: policies.with_representatives(policies.chunkkv()), "host"),
    (lambda: policies.with_representatives(policies.h2o()), "host"),
    (lambda: policies.with_representatives(policies.tova()), "host"),
    (lambda: policies.with_representatives(policies.streaming_llm()), "host"),
    (lambda: policies.kvcrush(block=0), "block"),
    (lambda: policies.kvcrush(share=1.5), "share"),
    (lambda: policies.kvcrush(share=float("nan")), "share"),
    (lambda: policies.kvcrush(anchor="random"), "anchor"),
])
def test_what_it_cannot_stand_on_is_refused(make: object, argument: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.argument == argument


@pytest.mark.spec("PO-KVCRUSH")
@pytest.mark.parametrize("b", [1, 3, 64])
def test_a_budget_below_a_block_is_one_block(b: int) -> None:
    """Of a host that protects nothing."""
    inputs = drawn(3, n=64 * 3, L=1, heads=(1, 1))
    assert [len(own) for own in decided(policies.with_representatives(policies.knorm(), b), inputs, 1)] == [b]


@pytest.mark.spec("PO-KVCRUSH")
def test_it_stands_on_shares_of_a_layer_too() -> None:
    """Under Ada-KV each head has its own number of places; all are exact to less than a block."""
    inputs = drawn(5, n=120, L=1, heads=(3, 1))
    host = policies.adakv(W, KERNEL)
    sizes = [len(own) for own in decided(policies.in_blocks(host, BLOCK), inputs, 40)]
    found = decided(policies.with_representatives(host, BLOCK), inputs, 40)
    assert [len(own) for own in found] == sizes
    assert len(set(sizes)) > 1
