"""Stages of the published policies against brute force on small inputs: masked softmax, sums and sorts by hand."""

import math
from typing import Any

import numpy as np
import pytest

from conformance.oracles import policies as oracle
from conformance.strategies.policy_cases import drawn
from conformance.tolerances import scores_agree
from spec.arrays import BoolMatrix, IntVector, Matrix
from spec.backend import PolicyStages

SEEDS = range(40)


def single(x: Any) -> Any:
    """As a model's tensors are."""
    return np.ascontiguousarray(x, dtype=np.float32)


@pytest.mark.spec(id="PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("seed", SEEDS)
def test_received_attention(policy_stages: PolicyStages, precision: str, seed: int, dtype: type) -> None:
    """Of all queries, of the later half, and of the last alone; every key of every KV head."""
    view = drawn(seed).layers[0]
    q, k = view.q.astype(dtype), view.k.astype(dtype)
    layer = {"q": q.tolist(), "k": k.tolist(), "scaling": view.scaling, "softcap": view.softcap}
    n, G = k.shape[1], len(q) // len(k)
    for m in {1, (n + 1) // 2, n}:
        found = policy_stages.received_attention(q[:, n - m :], k, view.scaling, view.softcap)
        rows = oracle.last_rows(layer, m)
        assert found.shape == (len(k), n)
        assert found.dtype == np.float64
        for g, got in enumerate(found):
            heads = [row for head in rows[g * G : (g + 1) * G] for row in head]
            assert scores_agree(got, [math.fsum(column) for column in zip(*heads, strict=True)], precision)


@pytest.mark.spec(id="PO-OBSERVED-ATTENTION")
def test_each_query_gives_one(policy_stages: PolicyStages) -> None:
    """Far apart logits, one key, equal keys: exactly."""
    one = policy_stages.received_attention(single(np.ones((6, 1, 4))), single(np.ones((2, 1, 4))), 1.0, None)
    assert one.tolist() == [[3.0], [3.0]]
    equal = policy_stages.received_attention(single(np.ones((2, 4, 4))), single(np.ones((2, 4, 4))), 0.5, None)
    assert np.abs(equal - [1 + 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4]).max() < 1e-6
    q, k = single([[[2000.0], [-2000.0], [2000.0]]]), single([[[1.0], [-1.0], [0.0]]])
    assert policy_stages.received_attention(q, k, 1.0, None).tolist() == [[2.0, 1.0, 0.0]]
    assert policy_stages.received_attention(q, k, 1.0, 3000.0).tolist() == [[2.0, 1.0, 0.0]]


@pytest.mark.spec(id="PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize("seed", SEEDS)
def test_expected_attention(policy_stages: PolicyStages, precision: str, seed: int) -> None:
    """One sink; queries of all tokens behind it, under a rotation with and without a factor."""
    inputs = drawn(seed)
    view, n = inputs.layers[0], inputs.n
    if n == 1:
        return
    q, k, v = single(view.q), single(view.k), single(view.v)
    layer = {"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), "scaling": view.scaling}
    want = oracle.expected_attention(layer, inputs.inv_freq.tolist(), inputs.factor, 1, 3)
    found = policy_stages.expected_attention(
        q[:, 1:], k[:, 1:], v[:, 1:], np.arange(1, n), np.arange(n, n + 3), inputs.inv_freq, inputs.factor, view.scaling
    )
    assert found.shape == (len(k), n - 1)
    assert found.dtype == np.float64
    for got, row in zip(found, want, strict=True):
        assert scores_agree(got, row[1:], precision)


def best(values: Matrix, shares: IntVector, pinned: BoolMatrix) -> list[list[int]]:
    """Row by row, by a sort of (pinned, has a score, score, index)."""
    found = []
    for row, B, own in zip(values.tolist(), shares.tolist(), pinned.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda j: (not own[j], row[j] != row[j], -row[j], j))
        found.append(sorted(order[: max(B, sum(own))]))
    return found


def kept(stages: PolicyStages, values: Matrix, shares: IntVector, pinned: BoolMatrix) -> list[list[int]]:
    found = stages.best_tokens(values, shares, pinned)
    assert len(found.offsets) == len(values) + 1
    return [found.positions[low:high].tolist() for low, high in zip(found.offsets, found.offsets[1:], strict=False)]


@pytest.mark.spec(id="PO-TOP-UNITS")
@pytest.mark.parametrize("seed", range(120))
def test_best_tokens(policy_stages: PolicyStages, seed: int) -> None:
    """Ties by the dozen, infinite scores, tokens without one, pinned tokens of each row's own, any share."""
    rng = np.random.default_rng(seed)
    g, n = int(rng.integers(1, 5)), int(rng.integers(1, 27))
    values = rng.integers(-2, rng.integers(0, 9), (g, n)).astype(np.float64)
    for special in (np.nan, np.inf, -np.inf):
        values[rng.random((g, n)) < (seed % 3) / 12] = special
    pinned, shares = rng.random((g, n)) < rng.choice([0.0, 0.2, 0.8]), rng.integers(0, n + 3, g)
    assert kept(policy_stages, values, shares, pinned) == best(values, shares, pinned)
    view = np.broadcast_to(pinned[0], values.shape)
    assert kept(policy_stages, values, shares, view) == best(values, shares, view)
