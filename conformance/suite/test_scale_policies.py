"""Tests of the stages of policies, of selectors and of NestedKV's score at full size."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from conformance import tolerances
from conformance.oracles.scale import selectors as oracle
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_attention import Shape, addressed
from conformance.suite.test_policy_stages import best, kept
from conformance.tolerances import UNIT_ROUNDOFF, attention_error, expected_error, received_radius
from spec.arrays import Matrix
from spec.backend import DiversityStages, NestedKVStages, PolicyStages
from spec.parameters import NESTEDKV, NestedKVParameters

pytestmark = pytest.mark.usefixtures("compiled")


OF_ALL_COSINES = pytest.mark.beyond("numpy", "reference.backend:BACKEND")
"""Mark for inputs that are too large for the reference: the cosines of all pairs of 70 000 tokens need 39 GB."""


def signatures(n: int, d: int, kinds: int, numbers: Numbers) -> Matrix:
    """Return n unit vectors, of which at most `kinds` are distinct."""
    u = numbers.fractions(kinds * d).reshape(kinds, d) - 0.5
    u /= np.sqrt((u * u).sum(axis=1))[:, None]
    return u[numbers.integers(0, kinds, n)]


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize(("n", "d", "kinds", "k", "values", "lam"), [
    (40, 64, 9, 33, 3, 0.5), (300, 128, 40, 129, 5, 0.25), (1_100, 64, 300, 260, 1, 1.0),
    (2_000, 96, 2_000, 400, 9, 0.5), (2_500, 8, 30, 1_100, 6, 0.5), (5_000, 32, 60, 300, 2, 3.0),
    pytest.param(70_000, 8, 500, 60, 4, 0.5, marks=OF_ALL_COSINES), (900, 257, 20, 41, 1_000, 0.1),
])
def test_sets_of_thousands(
    selector: DiversityStages, n: int, d: int, kinds: int, k: int, values: int, lam: float,
) -> None:
    """Check sets of tokens with many equal vectors and equal scores.

    At most one token in twenty is retained, and one in forty has no score.
    """
    numbers = Numbers(n + d)
    V, s = signatures(n, d, kinds, numbers), numbers.integers(0, values, n) / values
    s[numbers.integers(0, 40, n) == 0] = np.nan
    retained = numbers.integers(0, max(20, 3 * n // k), n) == 0
    assert np.array_equal(selector.diverse(s, V, retained, k, lam), oracle.diverse(s, V, retained, k, lam))


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize("retained", [15, 16, 17, 33, 65, 129, 257, 1_025])
def test_all_that_is_retained_counts(selector: DiversityStages, retained: int) -> None:
    """Check that the best candidate loses because it equals a retained token, which is the last retained token."""
    n = retained + 2
    V = np.zeros((n, 4))
    V[:, 0], V[[retained - 1, n - 1]] = 1.0, [0.0, 1.0, 0.0, 0.0]
    V[n - 2] = [0.0, 0.0, 1.0, 0.0]
    s = np.where(np.arange(n) == n - 1, 1.0, 0.75)
    actual = selector.diverse(s, V, np.arange(n) < retained, retained + 1, 0.5)
    assert actual.tolist() == list(range(retained + 1))


@pytest.mark.spec("DV-GREEDY")
@pytest.mark.parametrize("n", [16, 17, 33, 65, 129, 257, 1_025, 4_097])
def test_of_equal_gains_the_first(selector: DiversityStages, n: int) -> None:
    """Check that the first k of equal tokens are selected, with and without a penalty.

    Without a penalty, larger scores are selected first, even if they differ by less than float32 resolves.
    """
    V = np.tile([0.6, 0.8], (n, 1))
    none = np.zeros(n, dtype=np.bool_)
    k = min(n // 2, 400)
    for lam in (0.0, 0.5):
        assert selector.diverse(np.ones(n), V, none, k, lam).tolist() == list(range(k))
    for s in (np.arange(n) / n, 1 + np.arange(n) / 2**40):  # In float32 the second scores are equal.
        assert selector.diverse(s, V, none, k, 0.0).tolist() == list(range(n - k, n))


@pytest.mark.spec("DV-COSINE")
@pytest.mark.parametrize("d", [9, 16, 17, 33, 65, 128, 129, 257, 1_025])
def test_the_order_of_channels_decides(selector: DiversityStages, d: int) -> None:
    """Check the order in which a cosine adds the channels.

    Two candidates have equal gains in the specified order, and different gains in two other orders.
    """
    numbers, seen = Numbers(d), 0
    while seen < 5:
        V = signatures(3, d, 3, numbers)
        V[1:] = np.abs(V[1:])
        V[0] = np.abs(V[0])
        exact = oracle.cosines_with(V, 0)
        other = [float(np.dot(V[j], V[0])) for j in (1, 2)]
        back = [float(oracle.cosines_with(V[:, ::-1], 0)[j]) for j in (1, 2)]
        s = np.array([0.0, exact[1], exact[2]])  # Both gains are 0 in the specified order, so the first is selected.
        if (s[1] - other[0] >= s[2] - other[1]) and (s[1] - back[0] >= s[2] - back[1]):
            continue
        seen += 1
        actual = selector.diverse(s, V, np.array([True, False, False]), 2, 1.0)
        assert actual.tolist() == [0, 1]


# This gate is less sharp than the gate of the paper (kappa = 10). Most of the radius of a* is kappa / 4 times the
# radius of a deviation. With kappa = 10 and thousands of tokens, float32 would decide little.
SOFT = replace(NESTEDKV, kappa=1.0)
# Upper bounds of the radius of a*, which is in [0, 1]. An error in a memory changes a score of these keys by more.
CERTAIN = {"float64": 1e-6, "float32": 0.02}
KEYS = [
    (3, 700, 64), (8, 2_000, 128), (16, 1_100, 64), (1, 4_127, 96), (5, 4_128, 32), (2, 9_000, 64), (2, 12_000, 32),
    (1, 600, 257), (2, 33_100, 16), (1, 66_000, 8),
]
# The error bound of a mean grows with the number of keys. With a wide window, smaller gains keep the radius small.
OTHERS: list[dict[str, float]] = [
    {"W": 65}, {"W": 257}, {"W": 1_025, "beta": 0.5, "kappa": 0.25}, {"b_max": 1_025, "b_min": 1_025},
    {"b_min": 17, "blocks": 130},
]
CASES = [(shape, SOFT) for shape in KEYS]
CASES += [((2, 2_500, 48), replace(SOFT, **changes)) for changes in OTHERS]  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def keys(H_kv: int, n: int, d: int) -> np.ndarray:
    """Return keys around one direction for each head, plus one direction for each passage of 3 to 60 tokens.

    A window of 64 tokens crosses passages everywhere, so the scores show the start of a window. A thirtieth of the
    tokens has the opposite direction. These tokens are far from the stable memory, and are the top share of the gap.
    """
    numbers = Numbers(n + d)
    passage = np.repeat(np.arange(n), numbers.integers(3, 60, n))[:n]
    near = (numbers.fractions((passage[-1] + 1) * d) - 0.5).reshape(-1, d)
    x = 0.2 * (numbers.fractions(H_kv * n * d).reshape(H_kv, n, d) - 0.5) + near[passage]
    main = np.linspace(0.25, 0.45, H_kv)[:, None, None] * np.cos(np.arange(d))
    turned = (np.arange(n) >= n // 3) & (np.arange(n) < n // 3 + n // 30)
    x += np.where(turned[:, None], -main, main)
    return x.astype(np.float32)


@pytest.mark.spec(
    "NK-SCORE", "NK-UNIT-KEYS", "NK-STABLE", "NK-EPISODIC", "NK-CURRENT", "NK-ANOMALY", "NK-MIN-MAX", "NK-GAP",
    "NK-BLEND", "NK-SURPRISE", "NK-ROUTE",
)
@pytest.mark.parametrize(("shape", "p"), [
    pytest.param(*case, marks=[pytest.mark.beyond("triton")] if case[0][2] > 256 else []) for case in CASES
])
def test_scores_of_thousands_of_keys(
    nestedkv_stages: NestedKVStages, precision: str, shape: tuple[int, int, int], p: NestedKVParameters,
) -> None:
    """Check the scores of every head, for many lengths, windows and blocks.

    Blocks have 128 tokens up to a length of 4 127 tokens, and more tokens above this length.
    """
    k = keys(*shape)
    actual = nestedkv_stages.anomaly_score(k, p)
    assert actual.shape == shape[:2]
    for head, got in zip(k, actual, strict=True):
        want = oracle.nestedkv(head, p)
        radius = nestedkv_radius(want, shape, p, precision)
        # The certified error grows with the square of the number of keys. CERTAIN is for up to 12 000 keys.
        assert radius < CERTAIN[precision] * max(1, shape[1] / 12_000) ** 2, "the error bound is too large for a test"
        assert np.abs(got - want.score).max() <= radius


def nestedkv_radius(
    want: oracle.Traced, shape: tuple[int, int, int], p: NestedKVParameters, precision: str,
) -> float:
    """Return the certified radius of a* of one head."""
    raw = [x.tolist() for x in want.raw]
    _, n, d = shape
    return tolerances.traced_radius(n, d, raw, want.shortest, want.deviation.tolist(), p, precision)


WIDTHS = [16, 17, 31, 33, 64, 65, 127, 129, 256, 257, 513, 1_025]


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "n"), [
    *[(3, 1, n) for n in [*WIDTHS, 3_000]], *[(20, 20, n) for n in (33, 257, 700)], *[(34, 2, n) for n in (65, 513)],
])
def test_every_query_of_a_long_prompt_is_counted(policy_stages: PolicyStages, H: int, H_kv: int, n: int) -> None:
    """Check the number of queries that attend to each key, for all queries and for the last few queries.

    Each query attends to exactly one key, so the attention that a key receives is a number of queries.
    """
    inputs = addressed(Shape("counted", H, H_kv, 64, n))
    target = _attended_keys(inputs.q, inputs.k)
    for m in {1, 5, min(n, 65), n}:
        want = np.zeros((H_kv, n))
        for h in range(H):
            np.add.at(want[h * H_kv // H], target[h, n - m :], 1.0)
        actual = policy_stages.received_attention(inputs.q[:, n - m :], inputs.k, inputs.scaling, None)
        assert np.array_equal(np.round(actual, 3), want)


def _attended_keys(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return the key with the largest logit of each query, among its visible keys, (H, n)."""
    group, n = len(q) // len(k), k.shape[1]
    ahead = np.triu(np.ones((n, n), dtype=np.bool_), 1)
    return np.stack([
        np.where(ahead, -np.inf, q[h].astype(np.float64) @ k[h // group].astype(np.float64).T).argmax(axis=1)
        for h in range(len(q))
    ])


@pytest.mark.spec("PO-OBSERVED-ATTENTION", "PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize("n", [33_000, 66_000])
def test_keys_whose_numbers_exceed_16_bits(policy_stages: PolicyStages, n: int) -> None:
    """Check the last queries of a long cache. Each query attends to one key, anywhere in the cache."""
    inputs = addressed(Shape("far", 8, 2, 64, 9, before=n))
    k, q, last = inputs.k, inputs.q, inputs.q.shape[1]
    received, norms = np.zeros((2, k.shape[1])), 1.0 + np.arange(last)
    largest = np.zeros((8, k.shape[1]))
    for h, queries in enumerate(q):
        for row, query in enumerate(queries):
            target = (query.astype(np.float64) @ k[h // 4, : n + row + 1].astype(np.float64).T).argmax()
            received[h // 4, target] += 1
            largest[h, target] = max(largest[h, target], 1 / norms[row])
    assert (np.flatnonzero(received.sum(axis=0)) >= n // 2).any()
    assert np.array_equal(policy_stages.received_attention(q, k, inputs.scaling, None).round(3), received)
    actual = policy_stages.largest_attention(q, k, norms, inputs.scaling, None)
    assert np.abs(actual - largest).max() <= 1e-6


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "m", "n", "d", "softcap"), [
    (9, 3, 700, 700, 64, None), (4, 2, 300, 300, 257, None), (5, 1, 1_025, 1_025, 33, None), (8, 1, 400, 400, 64, 2.0),
    (6, 2, 129, 1_200, 64, None), (40, 20, 65, 65, 16, None), (34, 2, 1, 3_000, 128, None), (3, 3, 4, 513, 64, 2.0),
])
def test_received_attention_of_thousands(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, m: int, n: int, d: int, softcap: float | None,
) -> None:
    """Check that received attention is inside the certified radius of a masked softmax in float64."""
    numbers = Numbers(n + d)
    q, k = ((numbers.fractions(h * t * d).reshape(h, t, d) - 0.5).astype(np.float32) for h, t in ((H, m), (H_kv, n)))
    G, scaling = H // H_kv, 8 * d**-0.5
    A, error = oracle.attended(q, k, scaling, softcap), attention_error(q, k, scaling, softcap, precision)
    for head, got in enumerate(policy_stages.received_attention(q, k, scaling, softcap)):
        rows = A[head * G : (head + 1) * G].reshape(-1, n)
        radius = received_radius(rows, np.tile(error, G), precision)
        assert radius.max() < 0.005 * rows.sum(axis=0).max(), "the error bound is too large for a test"
        assert (np.abs(got - rows.sum(axis=0)) <= radius).all()


@pytest.mark.spec("PO-KVZIP", "PO-KVZIP-PLUS")
@pytest.mark.parametrize(("H", "H_kv", "m", "n", "d", "softcap"), [
    (9, 3, 700, 1_300, 64, None), (4, 2, 300, 300, 257, None), (8, 1, 400, 400, 64, 2.0), (6, 2, 129, 1_200, 64, None),
    (40, 20, 65, 65, 16, None), (34, 2, 1, 3_000, 128, None), (2, 1, 2_100, 2_100, 32, None),
])
def test_largest_attention_of_thousands(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, m: int, n: int, d: int, softcap: float | None,
) -> None:
    """Check that the largest attention is inside the certified bound of a masked softmax in float64.

    The norms rise or fall with the position.
    """
    numbers = Numbers(n + d)
    q, k = ((numbers.fractions(h * t * d).reshape(h, t, d) - 0.5).astype(np.float32) for h, t in ((H, m), (H_kv, n)))
    scaling, ramp = 8 * d**-0.5, np.linspace(1.0, 3.0, m)
    A, error = oracle.attended(q, k, scaling, softcap), attention_error(q, k, scaling, softcap, precision)
    error = error + 8 * UNIT_ROUNDOFF[precision] * (1 + error)
    for norms in (ramp, ramp[::-1]):
        weighed = A / norms[:, None]
        actual = policy_stages.largest_attention(q, k, norms, scaling, softcap)
        assert error.max() < 0.005, "the error bound is too large for a test"
        assert (actual >= (weighed * (1 - error)[:, None]).max(axis=1)).all()
        assert (actual <= (weighed * (1 + error)[:, None]).max(axis=1)).all()


@pytest.mark.spec("PO-EXPECTED-ATTENTION")
@pytest.mark.parametrize(("H", "H_kv", "m", "n", "d"), [
    (4, 2, 17, 16, 16), (3, 1, 129, 129, 64), (20, 20, 65, 257, 32), (6, 2, 1_025, 1_025, 64), (2, 1, 255, 400, 256),
    (34, 2, 33, 513, 16), (2, 2, 3_000, 3_000, 32), (4, 2, 9, 70_000, 16),
])
def test_expected_attention_of_thousands(
    policy_stages: PolicyStages, precision: str, H: int, H_kv: int, m: int, n: int, d: int,
) -> None:
    """Check queries whose mean direction changes with the position, so that the mean of a part differs."""
    numbers = Numbers(n + d)
    q, k, v = (
        (numbers.fractions(h * t * d).reshape(h, t, d) - 0.5).astype(np.float32)
        for h, t in ((H, m), (H_kv, n), (H_kv, n))
    )
    q += (np.linspace(0, 1, m)[:, None] * np.cos(np.arange(d)) / 2).astype(np.float32)
    inv_freq, at = 10_000.0 ** (-np.arange(d // 2) / (d // 2)), np.arange(max(0, n - m) + 4, max(0, n - m) + 4 + m)
    ahead, scaling = np.arange(n + 4, n + 516), 4 * d**-1.0
    want, mass = oracle.expected(q, k, v, at, ahead, inv_freq, 1.25, scaling)
    actual = policy_stages.expected_attention(q, k, v, at, ahead, inv_freq, 1.25, scaling)
    error = expected_error(mass, m, d, n, precision)
    assert error < 0.05, "the error bound is too large for a test"
    assert (np.abs(actual - want) <= error * want).all()


@pytest.mark.spec("PO-TOP-UNITS")
@pytest.mark.parametrize("n", [*WIDTHS, 4_097, 70_000])
@pytest.mark.parametrize("values", [2, 1_000_000])
def test_the_best_of_thousands_of_tokens(policy_stages: PolicyStages, n: int, values: int) -> None:
    """Check rows that evict one token, half of the tokens, or nearly all tokens, with many ties or few."""
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
    """Check one row for each layer and head of a large model. Each row has a separate share."""
    numbers = Numbers(groups)
    scores = numbers.fractions(groups * 20).reshape(groups, 20)
    shares = numbers.integers(0, 21, groups)
    pinned = numbers.integers(0, 5, groups * 20).reshape(groups, 20) == 0
    assert kept(policy_stages, scores, shares, pinned) == best(scores, shares, pinned)
