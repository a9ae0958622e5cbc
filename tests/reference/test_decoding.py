"""Policies during decoding, compared with a simulation that keeps sets of positions and computes all scores again."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.methods import policies as oracle
from conformance.methods import vase as brute
from conformance.methods.brute import HALF, KERNEL, N_SINK, SEED, W, plain
from conformance.methods.morphkv import morphkv
from conformance.plugin import fewer_examples
from conformance.strategies.numbers import seeds
from conformance.strategies.policy_inputs import Inputs, drawn, groups_of
from conformance.tolerances import scores_agree
from lab.policy_cases import PROMPT, STEPS, decoded, long, shown
from reference import policies
from reference.policies.morphkv import morphkv_score
from reference.policies.vase import window_attention
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Cadence, LayerView, Observation, Running
from spec.retention import Granularity

pytestmark = pytest.mark.usefixtures("reference_items")


def one_head(layer: oracle.Layer, g: int, live: list[int], seen: int) -> oracle.Layer:
    """Return a KV head with its group of queries and its stored keys."""
    G = len(layer["q"]) // len(layer["k"])
    return {
        **layer, "q": [q[:seen] for q in layer["q"][g * G : (g + 1) * G]],
        "k": [[layer["k"][g][p] for p in live]], "v": [[layer["v"][g][p] for p in live]],
    }


Simulate = Callable[[oracle.Layer, int, int], list[list[int]]]


def h2o(layer: oracle.Layer, g: int, B: int, sinks: int = 0, weigh: bool = False) -> list[list[int]]:
    """Return H2O's sets, from sums in a table by position. The sinks and the newest half of B are kept.

    A choice of VATP weighs the sums with the values.
    """
    size = [sum(map(abs, value)) if weigh else 1.0 for value in layer["v"][g]]
    sums: dict[int, float] = {}
    live: list[int] = []
    history = []
    for seen in range(1, PROMPT + STEPS + 1):
        live = [*live, seen - 1]
        head = one_head(layer, g, live, seen)
        for q in head["q"]:
            for p, w in zip(live, oracle.weights({**head, "q": [q]}, 0, q[seen - 1], len(live)), strict=True):
                sums[p] = sums.get(p, 0.0) + w
        if seen >= PROMPT:
            held = {*range(sinks), *live[max(0, len(live) - B // 2) :]}
            heavy = sorted((p for p in live if p not in held), key=lambda p: (-sums[p] * size[p], p))
            live = sorted([*held, *heavy[: B - len(held)]])
            history.append(live)
    return history


def by_head(inputs: Inputs, B: int, simulate: Simulate) -> list[list[list[int]]]:
    runs = [simulate(plain(view), g, B) for view in inputs.layers for g in range(inputs.H_kv)]
    return [list(step) for step in zip(*runs, strict=True)]


sequences = given(seed=st.integers(0, 2**32 - 1), B=st.integers(2, 12))
few = settings(max_examples=20)


@pytest.mark.spec("PO-H2O")
@few
@sequences
def test_h2o_drops_one_token_a_step(seed: int, B: int) -> None:
    """Check that sums belong to their tokens, that the newest half is kept, and that each step adds its attention."""
    assert decoded(policies.h2o(), long(seed), B) == by_head(long(seed), B, h2o)


@pytest.mark.spec("PO-TOVA")
def test_tova_evicts_the_newest_where_it_weighs_least() -> None:
    """Check two keys. The newest, key 1, has the smallest weight of the last query."""
    view = LayerView(np.ones((1, 2, 1)), np.array([[[1.0], [0.0]]]), None, 1.0, None)
    kept = policies.retain(policies.tova(), Budget(count=1), Observation(2, 1, None, {0: view}))
    assert kept.positions.tolist() == [0]


@pytest.mark.spec("PO-STEP")
def test_slack_lets_the_cache_grow_and_then_cuts_to_the_budget() -> None:
    """Check sizes with eviction at budget + slack: they grow from 4 to 6 and return to 4."""
    policy = replace(policies.knorm(), cadence=Cadence(every=1, excess=3))
    sizes = [len(step[0]) for step in decoded(policy, long(3), 4)]
    assert sizes == [4, 5, 6, 4, 5, 6, 4, 5, 6, 4]


@pytest.mark.spec("PO-STEP")
def test_a_step_that_is_not_due_changes_nothing_but_the_new_token() -> None:
    history = decoded(policies.snapkv(3, 3), long(4), 5)
    for at, (before, after) in enumerate(pairwise(history)):
        assert after == [[*row, PROMPT + at] for row in before]


@pytest.mark.spec("PO-STEP")
def test_what_cannot_go_on_is_refused() -> None:
    """Check a scorer without steps, and heads of different lengths."""
    inputs = drawn(5, n=PROMPT + STEPS, L=2, heads=(3, 1))
    nothing = [list(range(PROMPT))] * 6
    with pytest.raises(SpecError, match="evicts only at the end"):
        policies.start(policies.streaming_llm(), Budget(count=5), Observation(PROMPT, 1, None, {}))
    ada = policies.adakv(3, 3)
    with pytest.raises(SpecError, match="the same number"):
        policies.start(ada, Budget(count=5), shown(ada, inputs, nothing, PROMPT, PROMPT - 3))


@pytest.mark.spec("PO-STEP")
def test_records_do_not_change_under_a_step() -> None:
    """Check that the same step twice gives the same result: no record is changed in place."""
    inputs, policy, budget = long(6), policies.h2o(), Budget(count=5)
    groups = groups_of(policy, inputs)
    assert policy.granularity is Granularity.HEAD
    _, running = policies.start(policy, budget, shown(policy, inputs, [list(range(PROMPT))] * groups, PROMPT, 0))
    before = Running(running.live.copy(), np.array(running.records))
    live = np.column_stack([running.live, np.full(groups, PROMPT)])
    view = shown(policy, inputs, live, PROMPT + 1, PROMPT)
    once, twice = (policies.advance(policy, budget, running, view)[1] for _ in range(2))
    assert once.live.tolist() == twice.live.tolist()
    assert np.array_equal(np.asarray(running.records), np.asarray(before.records))


fusions = pytest.mark.parametrize("fusion", ["sum", "max"])


@pytest.mark.spec("PO-MORPHKV")
@fusions
def test_windows_of_many_queries(fusion: str) -> None:
    view = drawn(3, n=200, L=1, heads=(2, 2)).layers[0]
    for rows in (33, 65, 129):
        assert all(map(scores_agree, morphkv_score(view, rows, fusion), morphkv(plain(view), rows, fusion)))


@pytest.mark.spec("PO-VASE")
@pytest.mark.spec("PO-UNIFORM")
def test_the_oracle_has_the_published_known_answer() -> None:
    """Compare with the known answer in Random123's kat_vectors: philox4x64 with 10 rounds of zeros."""
    assert brute.philox([0] * 4, [0, 0]) == [
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    ]


@pytest.mark.spec("PO-VASE")
def test_vase_s_windows_of_many_queries() -> None:
    view = drawn(3, n=200, L=1, heads=(2, 2)).layers[0]
    for rows in (33, 65, 129):
        assert all(map(scores_agree, window_attention(view, rows, 5), brute.attention(plain(view), rows, 5)))


@pytest.mark.spec("PO-VASE")
@fewer_examples
@given(seed=seeds, B=st.integers(W + N_SINK, 12))
def test_steps_draw_by_position_and_by_the_tokens_seen(seed: int, B: int) -> None:
    def simulate(layer: dict[str, object], g: int, B: int) -> list[list[int]]:
        live, history = list(range(PROMPT)), []
        for seen in range(PROMPT, PROMPT + STEPS + 1):
            live = live if seen == PROMPT else [*live, seen - 1]
            if seen == PROMPT or (seen % W == 0 and len(live) > B):
                one = one_head(layer, g, live, seen)
                (slots,) = brute.vase(one, groups[id(layer)] + g, seen, [live], B, W, KERNEL, N_SINK, HALF, SEED)
                live = [live[slot] for slot in slots]
            history.append(live)
        return history

    inputs = long(seed)
    layers = [plain(view) for view in inputs.layers]
    groups = {id(layer): at * inputs.H_kv for at, layer in enumerate(layers)}
    expected = [list(step) for step in zip(
        *(simulate(layer, g, B) for layer in layers for g in range(inputs.H_kv)), strict=True
    )]
    assert decoded(policies.vase(W, KERNEL, N_SINK, HALF, SEED), inputs, B) == expected
