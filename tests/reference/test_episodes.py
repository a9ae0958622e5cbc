"""EpiCache's episodes: clusters, prompts, shares of layers and the episode of a question, against the brute force."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conformance.methods import episodes as oracle
from conformance.plugin import fewer_examples
from conformance.tolerances import scores_agree
from reference.policies.episodes import (
    cluster_windows,
    layer_shares,
    nearest_episode,
    prompt_windows,
    visible_in_windows,
)
from spec.errors import SpecError

pytestmark = pytest.mark.usefixtures("reference_items")

CLEAR = Fraction(1, 10**9)
"""Smallest difference of two exact numbers that floating-point numbers order in the same way."""
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.spec("PO-EPISODES")
@fewer_examples
@given(seed=seeds, m=st.integers(1, 14), d=st.integers(1, 3), K=st.integers(1, 4))
def test_episodes_are_those_of_the_oracle(seed: int, m: int, d: int, K: int) -> None:
    x, K = np.random.default_rng(seed).normal(size=(m, d)).round(3), min(K, m)
    wanted = oracle.clusters(x.tolist(), K, seed)
    assume(wanted.margin > CLEAR)
    labels, centroids = cluster_windows(x, K, seed)
    assert labels.tolist() == wanted.labels
    assert scores_agree(centroids.ravel(), [x for row in wanted.centroids for x in row])


@pytest.mark.spec("PO-EPISODES")
def test_equal_windows_share_an_episode_and_an_empty_episode_is_left_out() -> None:
    x = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    labels, centroids = cluster_windows(x, 3)
    assert labels.tolist() == oracle.clusters(x.tolist(), 3, 42).labels == [0, 1, 0, 1, 0]
    assert centroids.tolist() == [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.spec("PO-EPISODES")
@pytest.mark.parametrize("K", [0, 6])
def test_more_episodes_than_windows_are_refused(K: int) -> None:
    with pytest.raises(SpecError, match=f"episodes = {K}: must be a number from 1 to 5, the number of windows"):
        cluster_windows(np.zeros((5, 2)), K)


@pytest.mark.spec("PO-EPISODE-PROMPT", "PO-EPISODE-TURN")
@given(seed=seeds, m=st.integers(1, 12), P=st.integers(1, 5))
def test_prompts_and_turns_are_those_of_the_oracle(seed: int, m: int, P: int) -> None:
    """Numbers on a coarse grid have exact products, of which many are equal."""
    rng = np.random.default_rng(seed)
    x, labels, c = rng.integers(-2, 3, (m, 2)) / 2, rng.integers(0, 3, m), rng.integers(-2, 3, (3, 2)) / 2
    given_lists = x.tolist(), labels.tolist(), c.tolist()
    assert prompt_windows(x, labels, c, P) == oracle.prompts(*given_lists, P)
    assert [nearest_episode(one, c) for one in x] == [oracle.nearest(one, given_lists[2]) for one in given_lists[0]]


@pytest.mark.spec("PO-EPISODE-LAYERS")
@given(
    eighths=st.lists(st.integers(0, 8), min_size=1, max_size=7), M=st.integers(1, 60),
    power=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_shares_are_those_of_the_oracle(eighths: list[int], M: int, power: float) -> None:
    """All weights are exact, because the range of the similarities is made a power of two."""
    similarity = [0.0, 1.0, *(one / 8 for one in eighths)]
    actual = layer_shares(np.array(similarity), M, power)
    assert actual.tolist() == oracle.shares(similarity, M, power)
    assert actual.sum() == M * len(similarity)
    assert actual.min() >= max(1, M // 4)


@pytest.mark.spec("PO-EPISODE-LAYERS")
def test_equal_similarities_and_a_power_of_zero_give_equal_shares() -> None:
    assert layer_shares(np.full(3, 0.9), 5).tolist() == [5, 5, 5]
    assert layer_shares(np.array([0.1, 0.5, 0.9]), 5, 0.0).tolist() == [5, 5, 5]


@pytest.mark.spec("PO-EPISODE-LAYERS")
def test_wrong_similarities_and_powers_are_refused() -> None:
    for similarity, power, argument in (([0.5, np.nan], 1.1, "similarities"), ([0.5, 0.7], -1.0, "power = -1.0")):
        with pytest.raises(SpecError, match=argument):
            layer_shares(np.array(similarity), 8, power)


@pytest.mark.spec("PO-EPISODE-LAYERS")
@given(n=st.integers(1, 30), half=st.integers(1, 6), N_sink=st.integers(0, 5))
def test_the_pass_in_windows_is_that_of_the_oracle(n: int, half: int, N_sink: int) -> None:
    visible = visible_in_windows(n, 2 * half, N_sink)
    assert [np.flatnonzero(row).tolist() for row in visible] == [
        oracle.window_of(i, 2 * half, N_sink) for i in range(n)
    ]
