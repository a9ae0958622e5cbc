"""Tests that compare the stages of the published policies with brute force on small inputs."""

from typing import Any

import numpy as np
import pytest

from conformance.oracles.scale import selectors as oracle
from conformance.strategies.numbers import CLOSE, SPECIAL, TYPE_PAIRS, TYPES, close, of_type
from conformance.tolerances import UNIT_ROUNDOFF, attention_error, expected_error, scores_agree
from spec.arrays import BoolMatrix, IntVector, Matrix, Vector
from spec.backend import PolicyStages

SEEDS = range(40)


def single(x: Any) -> Any:
    """Return `x` as a contiguous float32 array, like the tensors of a model."""
    return np.ascontiguousarray(x, dtype=np.float32)


def drawn(seed: int) -> tuple[Any, Any, Any, float | None, Any]:
    """Return random q, k and v, and for some seeds a soft cap or attention sinks.

    There are 1 to 26 tokens, 1 to 3 KV heads with 1 or 2 query heads each, and 4 channels.
    """
    rng = np.random.default_rng(seed)
    n, H_kv, G = int(rng.integers(1, 27)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    q, k, v = (rng.standard_normal((heads, n, 4)) for heads in (H_kv * G, H_kv, H_kv))
    return 2 * q, k, v, None if seed % 4 else 5.0, 2 * rng.standard_normal(H_kv * G) if seed % 3 == 1 else None


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("seed", SEEDS)
def test_received_attention(policy_stages: PolicyStages, precision: str, seed: int, dtype: type) -> None:
    """Check the attention that each key of each KV head gets from all queries, the later half, and the last one."""
    q, k, _, softcap, sinks = drawn(seed)
    q, k, n = q.astype(dtype), k.astype(dtype), k.shape[1]
    for m in {1, (n + 1) // 2, n}:
        late = q[:, n - m :]
        want = oracle.attended(late, k, 0.5, softcap, sinks).reshape(len(k), -1, n).sum(axis=1)
        actual = policy_stages.received_attention(late, k, 0.5, softcap, sinks)
        assert actual.shape == (len(k), n)
        assert actual.dtype == np.float64
        assert all(scores_agree(got, row, precision) for got, row in zip(actual, want.tolist(), strict=True))


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
def test_each_query_gives_one(policy_stages: PolicyStages) -> None:
    """Check that the attention of a query sums to 1, for one key, for equal keys, and for logits far apart."""
    one = policy_stages.received_attention(single(np.ones((6, 1, 4))), single(np.ones((2, 1, 4))), 1.0, None)
    assert one.tolist() == [[3.0], [3.0]]
    equal = policy_stages.received_attention(single(np.ones((2, 4, 4))), single(np.ones((2, 4, 4))), 0.5, None)
    assert np.abs(equal - [1 + 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4]).max() < 1e-6
    q, k = single([[[2000.0], [-2000.0], [2000.0]]]), single([[[1.0], [-1.0], [0.0]]])
    assert policy_stages.received_attention(q, k, 1.0, None).tolist() == [[2.0, 1.0, 0.0]]
    assert policy_stages.received_attention(q, k, 1.0, 3000.0).tolist() == [[2.0, 1.0, 0.0]]


@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS")
def test_each_query_and_head_has_its_own_largest_logit(policy_stages: PolicyStages) -> None:
    """Check rows of equal logits: -3 000, 0, 3 000 or 6 000 in different queries and heads.

    A backend that subtracts the largest logit of several queries or heads computes exp(-3 000) = 0.
    """
    q = single([[[0.0], [6_000.0]], [[3_000.0], [-3_000.0]]])
    k = single(np.ones((1, 2, 1)))
    assert policy_stages.received_attention(q, k, 1.0, None).tolist() == [[3.0, 1.0]]
    assert policy_stages.largest_attention(q, k, np.ones(2), 1.0, None).tolist() == [[1.0, 0.5]] * 2


@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS")
def test_logits_far_above_the_soft_cap(policy_stages: PolicyStages) -> None:
    """Check logits of 3 000 and -3 000 under a cap of log(3) / 2: the second key gets 1/4.

    A tanh that is computed from exp of twice its argument would overflow.
    """
    q, k, cap = single([[[3_000.0], [3_000.0]]]), single([[[1.0], [-1.0]]]), float(np.log(3.0)) / 2
    received = policy_stages.received_attention(q, k, 1.0, cap)
    assert np.abs(received - [[1.75, 0.25]]).max() < 1e-5
    largest = policy_stages.largest_attention(q, k, np.ones(2), 1.0, cap)
    assert np.abs(largest - [[1.0, 0.25]]).max() < 1e-5


@pytest.mark.spec("PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("seed", SEEDS)
def test_largest_attention(policy_stages: PolicyStages, precision: str, seed: int, dtype: type) -> None:
    """Check the largest attention to each key, by query head, of all queries, the later half, and the last one."""
    q, k, _, softcap, sinks = drawn(seed)
    q, k, n = q.astype(dtype), k.astype(dtype), k.shape[1]
    norms = np.random.default_rng(seed).uniform(0.01, 9.0, n)
    for m in {1, (n + 1) // 2, n}:
        late = q[:, n - m :]
        want = (oracle.attended(late, k, 0.5, softcap, sinks) / norms[n - m :, None]).max(axis=1)
        actual = policy_stages.largest_attention(late, k, norms[n - m :], 0.5, softcap, sinks)
        assert actual.shape == (len(q), n)
        assert actual.dtype == np.float64
        assert all(scores_agree(got, row, precision) for got, row in zip(actual, want.tolist(), strict=True))


@pytest.mark.spec("PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize("size", [1.0, 2.0**-90, 2.0**90, 2.0**-200, 2.0**200, 2.0**-960, 2.0**960])
def test_the_query_that_gives_most_decides(policy_stages: PolicyStages, size: float) -> None:
    """Check exact results for logits far apart and norms that are small or large powers of 2."""
    q, k = single([[[2000.0], [-2000.0], [2000.0]]]), single([[[1.0], [-1.0], [0.0]]])
    norms = size * np.array([4.0, 2.0, 1.0])
    assert (size * policy_stages.largest_attention(q, k, norms, 1.0, None)).tolist() == [[1.0, 0.5, 0.0]]
    assert (size * policy_stages.largest_attention(q, k, norms, 1.0, 3000.0)).tolist() == [[1.0, 0.5, 0.0]]
    group = np.concatenate([q, -q])
    assert (size * policy_stages.largest_attention(group, k, norms, 1.0, None)).tolist() == [
        [1.0, 0.5, 0.0], [0.5, 1.0, 0.0],
    ]


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize("seed", SEEDS)
def test_expected_attention(policy_stages: PolicyStages, precision: str, seed: int) -> None:
    """Check queries after a sink or of a later segment, with rotation factors equal to 1 and above 1."""
    (q, k, v), sinks = map(single, drawn(seed)[:3]), drawn(seed)[4]
    n, factor, inv_freq = k.shape[1], 1.0 + (seed % 3) / 4, np.array([1.0, 0.25])
    for m in {1, n}:
        at, ahead = np.arange(n + 1 - m, n + 1), np.arange(n + 1, n + 4)
        want, _ = oracle.expected(q[:, n - m :], k, v, at, ahead, inv_freq, factor, 0.5, sinks)
        actual = policy_stages.expected_attention(q[:, n - m :], k, v, at, ahead, inv_freq, factor, 0.5, sinks)
        assert actual.shape == (len(k), n)
        assert actual.dtype == np.float64
        assert all(scores_agree(got, row, precision) for got, row in zip(actual, want.tolist(), strict=True))


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize("spread", [False, True])
def test_expected_logits_of_a_thousand(policy_stages: PolicyStages, spread: bool) -> None:
    """Check expected logits near 1 000 in one head and near -1 000 or 0 in the other. The largest differ by about 1.

    The logits are due to the mean of the queries, or in the first head to the spread of queries with a mean of 0.
    """
    a = 45.0 if spread else 1_000.0
    q, k = np.zeros((2, 2, 4)), np.zeros((1, 3, 4))
    q[0, :, 0], q[1, :, 0] = [a, -a if spread else a], 0.0 if spread else -a
    k[0, :, 0] = 1 - np.arange(3) / 1024
    v, at, ahead = single([[[1.0], [2.0], [4.0]]]), np.arange(2), np.arange(2, 5)
    given = single(q), single(k), v, at, ahead, np.full(2, 1e-12), 1.0, 1.0
    want, _ = oracle.expected(*given)
    assert (np.abs(policy_stages.expected_attention(*given) - want) <= 0.01 * want).all()


def best(values: Matrix, shares: IntVector, pinned: BoolMatrix) -> list[list[int]]:
    """Return the best tokens of each row, sorted by: pinned first, then with a score, larger score, lower index."""
    result = []
    for row, B, pins in zip(values.tolist(), shares.tolist(), pinned.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda j: (not pins[j], row[j] != row[j], -row[j], j))
        result.append(sorted(order[: max(B, sum(pins))]))
    return result


def kept(stages: PolicyStages, values: Matrix, shares: IntVector, pinned: BoolMatrix) -> list[list[int]]:
    actual = stages.best_tokens(values, shares, pinned)
    assert len(actual.offsets) == len(values) + 1
    return [actual.positions[low:high].tolist() for low, high in zip(actual.offsets, actual.offsets[1:], strict=False)]


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("seed", range(120))
def test_best_tokens(policy_stages: PolicyStages, seed: int) -> None:
    """Check rows with many ties, infinite scores, tokens without a score, separate pinned tokens, and any share."""
    rng = np.random.default_rng(seed)
    g, n = int(rng.integers(1, 5)), int(rng.integers(1, 27))
    values = rng.integers(-2, rng.integers(0, 9), (g, n)).astype(np.float64)
    for odd in (np.nan, np.inf, -np.inf):
        values[rng.random((g, n)) < (seed % 3) / 12] = odd
    pinned, shares = rng.random((g, n)) < rng.choice([0.0, 0.2, 0.8]), rng.integers(0, n + 3, g)
    assert kept(policy_stages, values, shares, pinned) == best(values, shares, pinned)
    view = np.broadcast_to(pinned[0], values.shape)
    assert kept(policy_stages, values, shares, view) == best(values, shares, view)


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "d"), [(8, 2, 16), (5, 5, 128), (6, 1, 160)])
def test_expected_attention_of_many_heads_and_channels(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, d: int,
) -> None:
    """Check inputs for which each pair of channels changes the result.

    Every frequency rotates its pair by a large angle, and the mean of the queries is not zero.
    """
    rng = np.random.default_rng(d)
    q, k, v = (single(rng.standard_normal((heads, n, d))) for heads, n in ((H, 24), (H_kv, 30), (H_kv, 30)))
    inv_freq, at, ahead = np.linspace(1.0, 0.3, d // 2), np.arange(10, 34), np.arange(35, 43)
    q, scaling = single(q / 4 + 1), 2.0 / d
    want, mass = oracle.expected(q, k, v, at, ahead, inv_freq, 1.5, scaling)
    actual = policy_stages.expected_attention(q, k, v, at, ahead, inv_freq, 1.5, scaling)
    error = expected_error(mass, 24, d, 30, precision)
    assert error < 0.05, "the error bound is too large for a test"
    assert (np.abs(actual - want) <= error * want).all()


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize("n", [1_025, 1_100, 1_400])
def test_half_precision_beyond_a_thousand_keys(policy_stages: PolicyStages, n: int) -> None:
    """Check that float16 keys are read exactly, and that sums over the keys are not computed in float16."""
    actual = policy_stages.received_attention(np.ones((2, 3, 4), np.float16), np.ones((1, n, 4), np.float16), 0.5, None)
    shares = [1 / (n - 2), 1 / (n - 1), 1 / n]
    want = 2 * np.array([sum(shares)] * (n - 2) + [sum(shares[1:]), shares[2]])
    assert (np.abs(actual[0] - want) <= 2e-6 * want).all()


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("g", [255, 256, 257, 300, 1_025])
def test_as_many_kept_sets_as_there_are(policy_stages: PolicyStages, g: int) -> None:
    """Check many kept sets that each have one of two tokens. The last set has both tokens."""
    values, shares = np.tile([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], (g, 1))[:g], np.where(np.arange(g) < g - 1, 1, 2)
    pinned = np.zeros((g, 2), dtype=np.bool_)
    assert kept(policy_stages, values, shares, pinned) == best(values, shares, pinned)


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("n", [33, 100, 700])
def test_ties_among_hundreds_go_to_the_lower_token(policy_stages: PolicyStages, n: int) -> None:
    """Check many ties for every share, because a partial sort returns equal values in any order."""
    values = np.random.default_rng(n).integers(0, 3, (6, n)).astype(np.float64)
    shares, pinned = n * np.arange(1, 7) // 7, np.zeros((6, n), dtype=np.bool_)
    assert kept(policy_stages, values, shares, pinned) == best(values, shares, pinned)


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("kind", [*CLOSE, *SPECIAL])
@pytest.mark.parametrize("n", [2, 17, 130, 1_100, 5_000])
def test_close_and_missing_scores_are_told_apart(policy_stages: PolicyStages, n: int, kind: str) -> None:
    """Check adjacent float64 numbers of any size, subnormal and huge ones included. -0.0 and 0.0 are equal.

    All values that are not a number rank equally, after minus infinity. Ties go to the lower token.
    """
    values = close(kind, n, (3, n))
    shares, pinned = np.array([1, (n + 1) // 2, n - 1]), np.zeros((3, n), dtype=np.bool_)
    assert kept(policy_stages, values, shares, pinned) == best(values, shares, pinned)


@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize("n", [31, 32, 33, 63, 64, 65, 127, 129, 257])
def test_each_of_many_queries_counts_once(policy_stages: PolicyStages, precision: str, n: int) -> None:
    """Check queries that each attend to one key, with two queries for each key and with distinct norms."""
    q, k, target = np.zeros((1, n, n)), np.eye(n)[None], np.arange(n) // 2
    q[0, np.arange(n), target] = 2000.0
    norms: Vector = np.asarray(1.0 + (7 * np.arange(n) + 3) % n)
    largest = np.zeros(n)
    norms[-1] = 0.5
    np.maximum.at(largest, target, 1 / norms)
    q, k = single(q), single(k)
    assert policy_stages.received_attention(q, k, 1.0, None).tolist() == [np.bincount(target, minlength=n).tolist()]
    actual = policy_stages.largest_attention(q, k, norms, 1.0, None)
    assert (np.abs(actual[0] - largest) <= 4 * UNIT_ROUNDOFF[precision] * largest).all()


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize(("first", "bits"), [(2**24, 27), (2**31 - 3, 20), (2**32 - 3, 20), (2**40, 12)])
def test_queries_far_from_the_start(policy_stages: PolicyStages, precision: str, first: int, bits: int) -> None:
    """Check positions and frequencies that float32 cannot hold, and whose products are exact in float64."""
    q, k, v = map(single, drawn(8)[:3])
    n, inv_freq = k.shape[1], np.round(np.array([0.9, 0.0137]) * 2.0**bits) / 2.0**bits
    at, ahead = first + 1 + np.arange(n), first + n + 1 + np.arange(3)
    want, _ = oracle.expected(q, k, v, at, ahead, inv_freq, 1.0, 0.5)
    actual = policy_stages.expected_attention(q, k, v, at, ahead, inv_freq, 1.0, 0.5)
    assert all(scores_agree(got, row, precision) for got, row in zip(actual, want.tolist(), strict=True))


@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize(("of_q", "of_k"), TYPE_PAIRS)
def test_attention_of_every_type_and_size(policy_stages: PolicyStages, precision: str, of_q: str, of_k: str) -> None:
    """Check numbers of any size that a type can hold, also if the type cannot hold their sums or squares.

    The scaling makes the products of queries and keys similar for all types.
    """
    (q, large), (k, small) = of_type(of_q, 3, (4, 12, 4)), of_type(of_k, 4, (2, 12, 4))
    norms, scaling = np.linspace(0.5, 2, 12), 0.5 / (large * small)
    weights = oracle.attended(q.astype(np.float64), k.astype(np.float64), scaling, None)
    pairs = [
        (policy_stages.received_attention(q, k, scaling, None), weights.reshape(2, -1, 12).sum(axis=1)),
        (policy_stages.largest_attention(q, k, norms, scaling, None), (weights / norms[:, None]).max(axis=1)),
    ]
    for actual, want in pairs:
        assert all(scores_agree(got, row, precision) for got, row in zip(actual, want.tolist(), strict=True))


@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS", "PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize("other", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("of", ["keys", "queries"])
def test_a_longer_type_is_not_rounded_to_float16(
    policy_stages: PolicyStages, precision: str, of: str, dtype: str, other: str,
) -> None:
    """Check that the second logit is larger by 1 than the first.

    If the keys or the queries were rounded to float16 or bfloat16, the logits would be equal.
    """
    if of == "keys":
        q, k = np.array([[[4096.0, 0.0]]], other), np.array([[[1.0, 0.0], [1.0 + 2.0**-12, 0.0]]], dtype)
    else:
        q, k = np.array([[[4097.0, -4096.0]]], dtype), np.array([[[0.0, 0.0], [1.0, 1.0]]], other)
    one, want = np.ones(1), np.exp([-1.0, 0.0]) / (1 + np.exp(-1.0))
    turn, v = (np.array([2]), np.array([2]), np.zeros(1), 1.0, 1.0), np.array([[[1.0, 0.0], [0.0, 1.0]]], dtype)
    for actual, error in (
        (policy_stages.received_attention(q, k, 1.0, None), attention_error(q, k, 1.0, None, precision)[0]),
        (policy_stages.largest_attention(q, k, one, 1.0, None), attention_error(q, k, 1.0, None, precision)[0]),
        (policy_stages.expected_attention(q, k, v, *turn), expected_error(8_193.0, 1, 2, 2, precision)),
    ):
        assert error < 0.2
        assert (np.abs(actual[0] - want) <= error * want).all()


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize(("of_q", "of_k", "of_v"), [
    *[("float32", "float32", kind) for kind in TYPES], *[(of_q, of_k, "float32") for of_q, of_k in TYPE_PAIRS],
])
def test_expected_attention_of_every_type_and_size(
    policy_stages: PolicyStages, precision: str, of_q: str, of_k: str, of_v: str,
) -> None:
    """Check values whose squares the type cannot hold, with queries and keys of any type."""
    (q, large), (k, small) = of_type(of_q, 5, (4, 9, 4)), of_type(of_k, 6, (2, 12, 4))
    v, _ = of_type(of_v, 7, (2, 12, 4))
    at, ahead, inv_freq, scaling = np.arange(3, 12), np.arange(12, 20), np.array([1.0, 0.25]), 0.5 / (large * small)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    want, _ = oracle.expected(wide[0], wide[1], wide[2], at, ahead, inv_freq, 1.25, scaling)
    actual = policy_stages.expected_attention(q, k, v, at, ahead, inv_freq, 1.25, scaling)
    assert all(scores_agree(got, row, precision) for got, row in zip(actual, want.tolist(), strict=True))
