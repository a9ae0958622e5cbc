"""TriAttention: equations, modes, cadence and pinned prompt compared with brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import policies as oracle
from conformance.methods import triattention as brute
from conformance.methods.brute import Brute
from conformance.methods.triattention import rows as tri_rows
from conformance.plugin import fewer_examples
from conformance.strategies.numbers import seeds
from conformance.strategies.policy_inputs import calibrated, decided, drawn, identity, observation
from conformance.tolerances import scores_agree
from lab.policy_cases import PROMPT, decoded, long, triattention
from reference import policies
from reference.triattention import Mode, band_statistics, joined, z_scores
from spec.budget import Budget
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")

MODES: tuple[Mode, ...] = ("global", "head", "layer and head")


@pytest.mark.spec("TA-STATISTICS")
@given(seed=seeds)
def test_statistics_are_means_of_queries_and_of_their_bands(seed: int) -> None:
    q = drawn(seed).layers[0].q
    mean, magnitude = band_statistics(q)
    for head, actual, sizes in zip(q.tolist(), mean, magnitude, strict=True):
        want, want_sizes = brute.statistics(head)
        assert scores_agree(actual, want)
        assert scores_agree(sizes, want_sizes)
    half = mean.shape[1] // 2
    assert (np.hypot(mean[:, :half], mean[:, half:]) <= magnitude * (1 + 1e-12)).all()


@pytest.mark.spec("TA-STATISTICS")
def test_bands_pair_the_two_halves_of_a_head() -> None:
    """Check channels (3, 0, 4, 0): the first band is 3 + 4i, of size 5. Three bands have six channels."""
    for q, sizes in (([3.0, 0.0, 4.0, 0.0], [5.0, 0.0]), ([3.0, 0.0, 0.0, 4.0, 0.0, 1.0], [5.0, 0.0, 1.0])):
        assert band_statistics(np.array([[q]]))[1].tolist() == [sizes]


@pytest.mark.spec("TA-RANKING")
@given(seed=seeds, pinned=st.integers(0, 6))
def test_rows_are_z_scored_over_what_is_not_pinned(seed: int, pinned: int) -> None:
    X = np.random.default_rng(seed).standard_normal((3, 6))
    X[1] = 2.0
    actual = z_scores(X, np.arange(6) >= pinned)
    assert actual[1, pinned:].tolist() == [0.0] * (6 - pinned)
    for row, want in zip(actual, X.tolist(), strict=True):
        assert scores_agree(row, brute.z_score(want, [p < pinned for p in range(6)]))


@pytest.mark.spec("TA-RANKING")
def test_a_small_deviation_counts_as_a_millionth() -> None:
    """Rows that differ only by 1e-9 must stay near 0."""
    z = z_scores(np.array([[0.0, 1e-9]]), np.ones(2, dtype=np.bool_))
    assert z.tolist() == [[-5e-4, 5e-4]]


@pytest.mark.spec("TA-RANKING")
def test_three_modes_of_two_layers() -> None:
    """Check two layers of two KV heads with one token."""
    best = np.array([[[1.0], [4.0]], [[3.0], [0.5]]])
    assert [joined(best, mode).tolist() for mode in MODES] == [
        [[4.0]], [[2.0], [2.25], [2.0], [2.25]], [[1.0], [4.0], [3.0], [0.5]],
    ]


@pytest.mark.spec("TA-POLICY", "PO-STEP")
@pytest.mark.parametrize("mode", MODES)
@fewer_examples
@given(seed=seeds, B=st.integers(4, 8), slack=st.integers(1, 4), pinned=st.sampled_from([0, 2]))
def test_steps_fire_at_the_budget_and_the_slack(mode: Mode, seed: int, B: int, slack: int, pinned: int) -> None:
    """The policy must keep B when B + slack tokens are stored. t counts all tokens seen, including evicted ones."""
    inputs = long(seed)
    policy = triattention(inputs, mode, pinned, slack)
    groups = 1 if mode == "global" else len(inputs.layers) * inputs.H_kv
    live = [list(range(PROMPT))] * groups
    for seen, actual in enumerate(decoded(policy, inputs, B), PROMPT):
        live = live if seen == PROMPT else [[*row, seen - 1] for row in live]
        if seen == PROMPT or len(live[0]) >= B + slack:
            at = live
            rows = tri_rows(inputs, mode, lambda g, at=at: at[g % groups], seen, pinned)  # type: ignore[misc]
            live = [[row[i] for i in oracle.top(s, B)] for s, row in zip(rows, live, strict=True)]
        assert actual == live


@pytest.mark.spec("TA-POLICY")
def test_the_default_slack_is_128() -> None:
    inputs = drawn(1)
    cadence = policies.triattention(calibrated(inputs), identity(inputs)).cadence
    assert [cadence.due(999, B + more, B) for B in (1, 64) for more in (127, 128)] == [False, True, False, True]


@pytest.mark.spec("TA-POLICY")
def test_a_pinned_prompt_that_does_not_fit_is_an_error_that_says_so() -> None:
    inputs = drawn(2, n=12)
    policy = triattention(inputs, "global", pin_prompt=6)
    with pytest.raises(SpecError, match="exceeds the budget of 5 tokens") as caught:
        policies.retain(policy, Budget(count=5), observation(policy, inputs))
    assert (caught.value.argument, caught.value.value) == ("pin_prompt", 6)
    assert decided(policy, inputs, 6) == [list(range(6))]
    assert set(range(6)) < set(decided(policy, inputs, 9)[0])


@pytest.mark.spec("TA-POLICY")
def test_other_layers_or_heads_than_the_calibrations_are_refused() -> None:
    inputs, other = drawn(5, n=8, L=2, heads=(2, 2)), drawn(5, n=8, L=1, heads=(2, 2))
    three = drawn(5, n=8, L=2, heads=(3, 1))
    modes: tuple[Mode, Mode] = ("global", "layer and head")
    for shown, mode in zip((other, three), modes, strict=True):
        policy = triattention(inputs, mode)
        with pytest.raises(SpecError) as caught:
            policies.retain(policy, Budget(count=5), observation(policy, shown))
        assert caught.value.argument == "calibration"


@pytest.mark.spec("TA-POLICY")
@pytest.mark.parametrize("one", brute.BRUTES, ids=lambda one: one.name)
def test_a_prompt_on_top_of_the_budget_is_a_reading(one: Brute) -> None:
    """TensorRT-LLM keeps b tokens in addition to a prompt of p: p + b with the prompt pinned.

    kvspec keeps b tokens including the prompt.
    """
    inputs = drawn(5, n=12, L=2, heads=(2, 2))
    theirs, ours = (decided(one.policy(inputs, {"pin_prompt": 3}), inputs, B) for B in (7, 4))
    assert theirs == one.kept(inputs, 4, pin_prompt=3, prompt="on top")
    assert ours == one.kept(inputs, 4, pin_prompt=3)
    assert [(positions[:3], len(positions)) for positions in theirs] == [([0, 1, 2], 7)] * len(theirs)
