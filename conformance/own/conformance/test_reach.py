"""Strategies reach what they are there for."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from conformance.oracles import s1, s2
from conformance.strategies.numbers import ablations, small_parameters
from conformance.strategies.prompts import (
    GROUPS,
    AttentionInputs,
    Prompt,
    attention_inputs,
    hot_sets,
    later_segments,
    prompts,
)
from conformance.strategies.trunks import CORNERS, EvictionProblem, Text, corners, evictions, random_evictions, texts

# Reach is a question of existence: no shrinking, fixed cases.
SEARCH = settings(
    max_examples=3000, derandomize=True, database=None, phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


def reaches(strategy: st.SearchStrategy[object], condition: Callable[..., bool]) -> None:
    find(strategy, condition, settings=SEARCH)


@pytest.mark.parametrize("corner", CORNERS)
def test_evictions_reach_each_corner(corner: str) -> None:
    reaches(evictions(), lambda problem: corner in corners(problem, problem.expected()))


def test_random_evictions_reach_each_corner_in_1_percent() -> None:
    """The seeded generator on other seeds than the suite's."""
    seen: Counter[str] = Counter()
    for problem in random_evictions(99, 2000):
        seen.update(corners(problem, problem.expected()))
    assert min(seen[corner] for corner in CORNERS) >= 20


def tied_at_the_cut(problem: EvictionProblem) -> bool:
    result = problem.expected()
    split = {float(r) for g, r in enumerate(result.ratio) if not problem.protected[g] and problem.score[g] == 0.5}
    return len(split) > 1


@pytest.mark.parametrize(
    "condition",
    [tied_at_the_cut, lambda p: p.budget >= len(p.impact), lambda p: p.budget == 0, lambda p: len(p.score) == 1],
)
def test_evictions_reach_ties_and_ends(condition: Callable[[EvictionProblem], bool]) -> None:
    reaches(evictions(), condition)


@pytest.mark.parametrize("group", GROUPS)
def test_attention_inputs_reach_each_head_group(group: int) -> None:
    reaches(attention_inputs(), lambda inputs: len(inputs.q) == group * len(inputs.k))


def chunks(inputs: AttentionInputs) -> int:
    return -(-int(inputs.q.shape[1]) // inputs.parameters.C)


@pytest.mark.parametrize(
    "condition",
    [
        lambda x: chunks(x) == 1, lambda x: chunks(x) > 3, lambda x: x.softcap is not None,
        lambda x: x.q.shape[1] % x.parameters.C == 1, lambda x: (x.q[0, 0] == x.q[0, 1]).all(),
    ],
)
def test_attention_inputs_reach_each_shape(condition: Callable[[AttentionInputs], bool]) -> None:
    reaches(attention_inputs(), condition)


def test_later_segments_reach_gaps() -> None:
    reaches(later_segments(), lambda x: x.k.shape[1] > x.q.shape[1] and np.diff(x.positions).max() > 1)


def hot_edges(inputs: AttentionInputs) -> s1.Segment:
    return s1.coattention(
        inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), inputs.parameters, 1.0, None
    )


@pytest.mark.parametrize(
    "condition",
    [
        lambda x: any(len(row) > 1 for row in hot_edges(x).intra), lambda x: any(hot_edges(x).cross),
        lambda x: max(hot_edges(x).salience) > 3,
    ],
)
def test_hot_sets_reach_edges_of_both_kinds(condition: Callable[[AttentionInputs], bool]) -> None:
    reaches(hot_sets(), condition)


def merges_some(text: Text) -> bool:
    E = list(zip(*(column.tolist() for column in text.coattention.edges()), strict=True))
    return len(s2.trunks(text.ends.tolist(), E, text.parameters)) < len(s2.sentences(text.ends.tolist()))


def splits_some(text: Text) -> bool:
    return any(len(sentence) > text.parameters.T_max for sentence in s2.sentences(text.ends.tolist()))


@pytest.mark.parametrize("condition", [merges_some, splits_some, lambda text: not text.ends.any()])
def test_texts_reach_merges_and_splits(condition: Callable[[Text], bool]) -> None:
    reaches(texts(), condition)


@pytest.mark.parametrize(
    "condition",
    [
        lambda prompt: len(set(prompt.token_ids.tolist())) < len(prompt.token_ids), lambda prompt: prompt.share == 1,
        lambda prompt: not prompt.sentence_ends & set(prompt.token_ids.tolist()),
        lambda prompt: prompt.share * len(prompt.token_ids) < prompt.inputs.parameters.W_recent,
    ],
)
def test_prompts_reach_repeats_and_floors(condition: Callable[[Prompt], bool]) -> None:
    reaches(prompts(), condition)


@pytest.mark.parametrize("name", ["k_heads", "k_intra", "k_cross", "N_sink", "W_recent", "N_min", "tau_merge", "alpha"])
def test_parameters_reach_zero(name: str) -> None:
    reaches(small_parameters(), lambda p: getattr(p, name) == 0)


@pytest.mark.parametrize(("impact", "graph"), [("uniform", "zero"), ("salience", "degree"), ("mixture", "zero")])
def test_ablations_reach_each_form(impact: str, graph: str) -> None:
    reaches(ablations(), lambda p: (p.impact, p.graph) == (impact, graph))
