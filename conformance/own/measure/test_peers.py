"""kvpress on a model's prompts: all of the comparison that needs no kvpress."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the comparison drives a model")

from conformance.measure.peers.differences import OURS
from conformance.measure.peers.inputs import SMALL, drawn
from conformance.measure.peers.prompts.__main__ import STUDY
from conformance.measure.peers.prompts.ours import drawn as prompts_of
from conformance.measure.peers.prompts.ours import groups_of, run_ours
from conformance.measure.peers.prompts.page import cell_of, page, paired
from conformance.measure.peers.prompts.plan import COUNTERPARTS, TASKS, UNEXPLAINED, Plan, constants, ratio
from conformance.measure.peers.sets import marked, overlap, packed, positions_of, unpacked
from conformance.own.models_integration.studies.contexts import answer
from models_integration.policies.methods import constants_of
from models_integration.studies.evidence.rules import Rules, load_rules
from models_integration.studies.results import Row, append_row
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks import place
from models_integration.tasks.chat import bare
from models_integration.tasks.context import Ground
from models_integration.tasks.prose import read_prose
from models_integration.tasks.registry import resolve_task
from reference import policies
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Observation
from spec.retention import Granularity, Retention

LENGTH = 1024
BUDGETS = ("0.5", "0.25")


@pytest.fixture(scope="module")
def subject(one_thread: None) -> Subject:
    return Loading(backend="numpy").subject()


@pytest.fixture(scope="module")
def rules() -> Rules:
    return load_rules(STUDY / "rules.toml")


def test_keys_are_found_at_their_positions() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 20, 4)).astype(np.float32)
    chosen = np.stack([rng.permutation(20)[:7] for _ in keys])
    some = np.stack([head[at] for head, at in zip(keys, chosen, strict=True)])
    assert positions_of(some, keys).tolist() == chosen.tolist()
    with pytest.raises(ValueError, match="head 1: a key is none"):
        positions_of(np.where(np.arange(3)[:, None, None] == 1, some + 1, some), keys)
    keys[2, 5] = keys[2, 9]
    with pytest.raises(ValueError, match="head 2: 1 of 20 keys"):
        positions_of(some, keys)


@given(st.integers(1, 40).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1), min_size=1), min_size=2).map(
    lambda groups: (n, groups)
)))
def test_kept_sets_come_back_from_their_text_and_overlap_as_sets_do(drawn: tuple[int, list[set[int]]]) -> None:
    n, groups = drawn
    kept = marked([sorted(group) for group in groups], n)
    assert (unpacked(packed(kept), n) == kept).all()
    assert [set(np.flatnonzero(row).tolist()) for row in kept] == groups
    shares = overlap(kept[:-1], kept[1:])
    for share, some, others in zip(shares, groups, groups[1:], strict=False):
        assert share == len(some & others) / len(some | others)


@pytest.mark.parametrize("n", [64, 1024, 2048, 8192])
@pytest.mark.parametrize("budget", ["0.5", "0.3", "0.2", "0.1"])
def test_a_press_keeps_as_many_tokens_as_our_budget(n: int, budget: str) -> None:
    """kvpress's own formula, in floating point, gives our exact ceiling."""
    B = -(-n * Fraction(budget) // 1)
    assert int(n * (1 - float(ratio(budget, n)))) == B == n * (1 - Fraction(ratio(budget, n)))


def test_a_length_at_which_kvpress_would_keep_another_number_is_refused(tmp_path: Path) -> None:
    assert int(1000 * (1 - 0.8)) == 199
    with pytest.raises(SpecError, match="length = 1000"):
        Plan(1, 1000, ("0.2",), tmp_path)
    with pytest.raises(SpecError, match="prompts = 0"):
        Plan(0, 1024, ("0.2",), tmp_path)


@pytest.mark.parametrize("policy", COUNTERPARTS.values())
def test_the_presses_are_given_our_defaults(policy: str) -> None:
    """Every constant of a counterpart's signature that both sides share has the plan's value."""
    from inspect import signature

    named = {"W": "window", "kernel": "kernel", "c": "chunk", "N_sink": "sinks", "N_future": "future"}
    make = getattr(policies, {"streamingllm": "streaming_llm"}.get(policy, policy.replace("-", "_")))
    shared = [name for name in signature(make).parameters if name in named]
    for name in shared:
        assert signature(make).parameters[name].default == getattr(constants(1), named[name])
    assert bool(shared) == (policy not in ("keydiff", "knorm"))
    assert set(shared) <= constants_of(policy)


@pytest.mark.parametrize("seed", range(8))
def test_our_pyramid_on_one_layer_is_what_the_policy_keeps_there(seed: int) -> None:
    """The budgets part alone, against the whole policy on all layers."""
    inputs, (ours, _) = drawn(seed, 120), OURS["PyramidKV"]
    views, heads = dict.fromkeys(range(SMALL.layers), inputs.view), len(inputs.k)
    B = -(-inputs.kept * inputs.n // 1)
    found, _ = policies.retain(
        policies.pyramidkv(SMALL.window, SMALL.kernel), Budget(count=int(B)),
        Observation(inputs.n, SMALL.layers * heads, None, views),
    )
    for layer in range(SMALL.layers):
        groups = [found.group(layer * heads + head).tolist() for head in range(heads)]
        assert ours(replace(inputs, layer=layer), frozenset()) == groups


@pytest.mark.parametrize("press", OURS)
def test_every_reading_gives_kept_sets_on_every_input(press: str) -> None:
    """Also where a pyramid's line has no token left for its last layer, of which no budget can be made."""
    ours, readings = OURS[press]
    for seed in range(30):
        inputs = drawn(seed, 40)
        for some in [(), *((reading,) for reading in readings), readings]:
            for kept in ours(inputs, frozenset(some)):
                assert kept == sorted(set(kept))
                assert set(kept) <= set(range(inputs.n))


def test_inputs_at_another_ratio_are_the_same_tensors() -> None:
    inputs = drawn(3, 40)
    view, other = inputs.view, inputs.at("0.25")
    assert (other.ratio, other.kept, other.view) == ("0.25", Fraction(3, 4), view)
    assert inputs.ratio != "0.25"


def test_kept_sets_of_every_granularity_are_spread_over_layers_and_heads() -> None:
    sets = [np.array([0, 3]), np.array([1]), np.array([2, 4]), np.array([0, 1, 2])]
    for granularity, some, copies in (
        (Granularity.MODEL, sets[:1], 4), (Granularity.LAYER, sets[:2], 2), (Granularity.HEAD, sets, 1),
    ):
        offsets = np.cumsum([0, *map(len, some)])
        found = groups_of(Retention(np.concatenate(some), offsets, 5, granularity), 2, 2)
        expected = [group.tolist() for group in some for _ in range(copies)]
        assert [np.flatnonzero(row).tolist() for row in found] == expected


def test_prompts_are_the_development_parts(subject: Subject, rules: Rules, tmp_path: Path) -> None:
    """No context of them is one on which a claim is confirmed, nor one twice; tasks take turns."""
    found = list(prompts_of(subject, rules, Plan(12, LENGTH, BUDGETS, tmp_path)))
    assert len(found) == len({item.sample.context_digest for item in found}) == 12
    assert {Rules.part_of(item.sample.context_digest) for item in found} == {"dev"}
    assert {item.task for item in found} <= set(TASKS)
    assert [item.index for item in found] == sorted(item.index for item in found)
    assert all(item.sample.length == LENGTH and item.placement == "after" for item in found)


def test_our_half_says_what_a_session_says_and_goes_on(subject: Subject, rules: Rules, tmp_path: Path) -> None:
    """One observed prompt, against a context per policy and budget; a second run adds nothing."""
    plan, told = Plan(1, LENGTH, BUDGETS, tmp_path), list[str]()
    for _ in range(2):
        run_ours(rules, plan, told.append, "pocket")
    (row,) = plan.rows("ours").values()
    assert len(told) == 1
    ground = Ground(subject.tokenizer, read_prose(subject.tokenizer), bare(subject.tokenizer))
    sample = resolve_task(row["task"])(ground, LENGTH, row["index"], rules.seeds[0])[0]
    assert (row["context"], row["question"]) == (list(sample.context_ids), list(sample.question_ids))
    for policy in ("snapkv", "pyramidkv", "streamingllm", "adakv"):
        for budget in BUDGETS:
            alone, _ = answer(subject.model, subject.policy(policy, budget), place(sample), 6, subject.stop_ids)
            assert row["answers"][policy][budget] == alone.token_ids
            kept = unpacked(row["kept"][policy][budget], LENGTH)
            assert kept.sum(axis=1).mean() == LENGTH * float(budget)


def rows(n: int, sets: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[Row, Row]:
    """A prompt of two layers with two heads: every policy's sets, every press's, and ours as read, which are these but
    for the last."""
    read = [*theirs[:-1], sets[-1]]
    ours: Row = {
        "prompt": "p", "length": n, "budgets": ["0.5"], "task": "needle_in_prose", "model": "m", "versions": {"a": "1"},
        "keys": ["x", "y"], "full": [1], "seconds": 60.0,
        "kept": {policy: {"0.5": packed(marked(sets, n))} for policy in COUNTERPARTS.values()},
        "answers": {policy: {"0.5": [1, 2]} for policy in COUNTERPARTS.values()},
    }
    explained = {"layers": 2, "readings": {"average pool": 1, UNEXPLAINED: 1}, "kept": packed(marked(read, n))}
    other: Row = {
        "prompt": "p", "length": n, "budgets": ["0.5"], "keys": ["x", "z"], "full": [1], "seconds": 120.0,
        "date": "2026-01-02", "versions": {"b": "2"}, "attention": "sdpa", "dtype": "torch.float32",
        "kept": {press: {"0.5": packed(marked(theirs, n))} for press in COUNTERPARTS},
        "answers": {press: {"0.5": {"ids": [1, 3], "refused": "no"}} for press in COUNTERPARTS},
        "explained": {press: {"0.5": explained} for press in COUNTERPARTS},
        "checked": {"press": "SnapKV", "budget": "0.5", "equal": True},
    }
    return ours, other


def test_a_cell_counts_what_differs(tmp_path: Path) -> None:
    """By hand: of four heads one is equal, and under the readings three."""
    ours, theirs = rows(10, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1], [2, 4], [5, 6, 7], [8, 9]])
    equal: Any = rows(10, [[0, 1]] * 4, [[0, 1]] * 4)
    equal[1]["answers"]["SnapKV"]["0.5"] = {"ids": [1, 2], "refused": ""}
    cell = cell_of([(ours, theirs), equal], "SnapKV", "0.5", lambda _, ids: ids[1] == 2)
    assert cell.tokens == (2, (9 / 4 + 2) / 2)
    assert (cell.same, cell.read_same, cell.answers, cell.same_answers, cell.refused) == (1, 1, 1, 1, 1)
    assert cell.overlap == (1 + 1 / 3 + 1 / 4 + 0 + 4) / 8
    assert cell.read_overlap == (1 + 1 + 1 + 0 + 4) / 8
    assert cell.right == (2, 1)
    assert dict(cell.differing) == {1: 1}
    assert dict(cell.readings) == {"average pool": 2, UNEXPLAINED: 2}
    plan = Plan(5, 10, ("0.5",), tmp_path)
    with pytest.raises(SpecError, match="both halves"):
        paired(plan)
    append_row(plan.file("ours"), ours)
    append_row(plan.file("theirs"), theirs)
    (pair,) = paired(plan)
    text = page(plan, [pair], lambda _, ids: ids[1:] == [2])
    assert "| SnapKV | 0.5 | 2 / 2.25 | 0 | 0.395833 | average pool (1 of 2), unexplained (1 of 2) | 0 |" in text
    assert "in 8 of 16 layers" in text
    assert "to the last bit on 0 of 1 prompts" in text
    assert "fails on 1 questions under PyramidKV" in text
    assert "| SnapKV | 0.5 | 0 | 1 | 0 |" in text
