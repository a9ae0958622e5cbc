"""Stages of the published policies at full size: keys and queries around every width, ties over thousands of tokens."""

import numpy as np
import pytest

from conformance.oracles.scale import selectors as oracle
from conformance.strategies.scale_attention import Shape, addressed
from conformance.strategies.scale_numbers import Numbers
from conformance.suite.test_policy_stages import best, kept
from conformance.tolerances import UNIT_ROUNDOFF, attention_error, expected_error, received_radius
from spec.backend import PolicyStages

pytestmark = pytest.mark.usefixtures("compiled")

WIDTHS = [16, 17, 31, 33, 64, 65, 127, 129, 256, 257, 513, 1_025]


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "n"), [
    *[(3, 1, n) for n in [*WIDTHS, 3_000]], *[(20, 20, n) for n in (33, 257, 700)], *[(34, 2, n) for n in (65, 513)],
])
def test_every_query_of_a_long_prompt_is_counted(policy_stages: PolicyStages, H: int, H_kv: int, n: int) -> None:
    """Each query attends to one key, so that what a key receives is a number of queries: all, and the last few."""
    inputs = addressed(Shape("counted", H, H_kv, 64, n))
    target = _attended_keys(inputs.q, inputs.k)
    for m in {1, 5, min(n, 65), n}:
        want = np.zeros((H_kv, n))
        for h in range(H):
            np.add.at(want[h * H_kv // H], target[h, n - m :], 1.0)
        found = policy_stages.received_attention(inputs.q[:, n - m :], inputs.k, inputs.scaling, None)
        assert np.array_equal(np.round(found, 3), want)


def _attended_keys(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The key of each query's largest logit, among those that it sees, (H, n)."""
    group, n = len(q) // len(k), k.shape[1]
    ahead = np.triu(np.ones((n, n), dtype=np.bool_), 1)
    return np.stack([
        np.where(ahead, -np.inf, q[h].astype(np.float64) @ k[h // group].astype(np.float64).T).argmax(axis=1)
        for h in range(len(q))
    ])


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "m", "n", "d", "softcap"), [
    (9, 3, 700, 700, 64, None), (4, 2, 300, 300, 257, None), (5, 1, 1_025, 1_025, 33, None), (8, 1, 400, 400, 64, 2.0),
    (6, 2, 129, 1_200, 64, None), (40, 20, 65, 65, 16, None), (34, 2, 1, 3_000, 128, None), (3, 3, 4, 513, 64, 2.0),
])
def test_received_attention_of_thousands(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, m: int, n: int, d: int, softcap: float | None,
) -> None:
    """Within the certified radius of a masked softmax in float64."""
    numbers = Numbers(n + d)
    q, k = ((numbers.fractions(h * t * d).reshape(h, t, d) - 0.5).astype(np.float32) for h, t in ((H, m), (H_kv, n)))
    G, scaling = H // H_kv, 8 * d**-0.5
    A, error = oracle.attended(q, k, scaling, softcap), attention_error(q, k, scaling, softcap, precision)
    for head, got in enumerate(policy_stages.received_attention(q, k, scaling, softcap)):
        rows = A[head * G : (head + 1) * G].reshape(-1, n)
        radius = received_radius(rows, np.tile(error, G), precision)
        assert radius.max() < 0.005 * rows.sum(axis=0).max(), "the inputs leave nothing certain"
        assert (np.abs(got - rows.sum(axis=0)) <= radius).all()


@pytest.mark.spec("PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize(("H", "H_kv", "m", "n", "d", "softcap"), [
    (9, 3, 700, 1_300, 64, None), (4, 2, 300, 300, 257, None), (8, 1, 400, 400, 64, 2.0), (6, 2, 129, 1_200, 64, None),
    (40, 20, 65, 65, 16, None), (34, 2, 1, 3_000, 128, None),
])
def test_largest_attention_of_thousands(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, m: int, n: int, d: int, softcap: float | None,
) -> None:
    """Within the certified bound of a masked softmax in float64; norms of which late ones are small, or early ones."""
    numbers = Numbers(n + d)
    q, k = ((numbers.fractions(h * t * d).reshape(h, t, d) - 0.5).astype(np.float32) for h, t in ((H, m), (H_kv, n)))
    scaling, ramp = 8 * d**-0.5, np.linspace(1.0, 3.0, m)
    A, error = oracle.attended(q, k, scaling, softcap), attention_error(q, k, scaling, softcap, precision)
    error = error + 8 * UNIT_ROUNDOFF[precision] * (1 + error)
    for norms in (ramp, ramp[::-1]):
        weighed = A / norms[:, None]
        found = policy_stages.largest_attention(q, k, norms, scaling, softcap)
        assert error.max() < 0.005, "the inputs leave nothing certain"
        assert (found >= (weighed * (1 - error)[:, None]).max(axis=1)).all()
        assert (found <= (weighed * (1 + error)[:, None]).max(axis=1)).all()


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "m", "n", "d"), [
    (4, 2, 17, 16, 16), (3, 1, 129, 129, 64), (20, 20, 65, 257, 32), (6, 2, 1_025, 1_025, 64), (2, 1, 255, 400, 256),
    (34, 2, 33, 513, 16), (2, 2, 3_000, 3_000, 32),
])
def test_expected_attention_of_thousands(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, m: int, n: int, d: int,
) -> None:
    """Queries around a direction of their head that wander on, so that late ones count as much as early ones."""
    numbers = Numbers(n + d)
    q, k, v = (
        (numbers.fractions(h * t * d).reshape(h, t, d) - 0.5).astype(np.float32)
        for h, t in ((H, m), (H_kv, n), (H_kv, n))
    )
    q += (np.linspace(0, 1, m)[:, None] * np.cos(np.arange(d)) / 2).astype(np.float32)
    inv_freq, at = 10_000.0 ** (-np.arange(d // 2) / (d // 2)), np.arange(max(0, n - m) + 4, max(0, n - m) + 4 + m)
    ahead, scaling = np.arange(n + 4, n + 516), 4 * d**-1.0
    want, mass = oracle.expected(q, k, v, at, ahead, inv_freq, 1.25, scaling)
    found = policy_stages.expected_attention(q, k, v, at, ahead, inv_freq, 1.25, scaling)
    error = expected_error(mass, m, d, n, precision)
    assert error < 0.05, "the inputs leave nothing certain"
    assert (np.abs(found - want) <= error * want).all()


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("n", [*WIDTHS, 4_097, 70_000])
@pytest.mark.parametrize("values", [2, 1_000_000])
def test_the_best_of_thousands_of_tokens(policy_stages: PolicyStages, n: int, values: int) -> None:
    """Rows of which some evict one token, some half, some nearly all; ties everywhere, or nowhere."""
    numbers, groups = Numbers(n + values), 5
    scores = numbers.integers(0, values, groups * n).reshape(groups, n) / values
    scores[numbers.integers(0, 40, groups * n).reshape(groups, n) == 0] = np.nan
    pinned = np.zeros((groups, n), dtype=np.bool_)
    pinned[2:, n - n // 4 :] = True
    shares = np.array([n - 1, n // 2, n // 3, n // 2 + 1, 3])
    assert kept(policy_stages, scores, shares, pinned) == best(scores, shares, pinned)


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("groups", [33, 129, 1_025])
def test_the_best_tokens_of_many_sets(policy_stages: PolicyStages, groups: int) -> None:
    """As many as the layers and heads of large models: each row has its own share."""
    numbers = Numbers(groups)
    scores = numbers.fractions(groups * 20).reshape(groups, 20)
    shares = numbers.integers(0, 21, groups)
    pinned = numbers.integers(0, 5, groups * 20).reshape(groups, 20) == 0
    assert kept(policy_stages, scores, shares, pinned) == best(scores, shares, pinned)
