"""The decode study: its conversations, its cache under each arm, its probes and its tables."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the study drives a model")

import torch

from conformance.measure.studies.decode.__main__ import main
from conformance.measure.studies.decode.plan import CONTROL, PROMPT, STRATA, Plan, draw_conversation
from conformance.measure.studies.decode.predictions import query_changes
from conformance.measure.studies.decode.probes import Flags, changed_flags, fixed_points, held_up, surviving_pairs
from conformance.measure.studies.decode.report import differences, markdown, scores
from conformance.measure.studies.decode.rules import ARMS, BASES, T_BREATH
from conformance.measure.studies.decode.run import blocks, hold, read_block, read_prompt, run_plan
from models_integration.policies.methods import CrystalCache
from models_integration.studies.results import load_rows
from models_integration.studies.subject import Loading, Subject
from reference.crystalcache import empty_state, extend
from reference.statistics import holm
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER

TOKENS = 768
SMALL = Plan(samples=2, tokens=TOKENS, arms=("full", "tight: on", "tight: window"))


@pytest.fixture(scope="module")
def subject(one_thread: None) -> Subject:
    return Loading("pocket", "numpy").subject()


def test_a_conversation_has_its_facts_where_its_strata_are(subject: Subject) -> None:
    """Each value stands once in the text, in its stratum's range; the same index gives the same conversation."""
    conversation = draw_conversation(subject.tokenizer, 3, 2048)
    assert len(conversation.ids) == PROMPT + 2048
    assert conversation == draw_conversation(subject.tokenizer, 3, 2048)
    assert conversation != draw_conversation(subject.tokenizer, 4, 2048)
    assert tuple(question.stratum for question in conversation.questions) == STRATA
    ranges = {"prompt": (0, PROMPT - 128), CONTROL: (PROMPT + 2048 - 128, PROMPT + 2048)}
    ranges |= {f"quarter {i}": (PROMPT + (i - 1) * 512 - 24, PROMPT + i * 512) for i in (1, 2, 3, 4)}
    ids = conversation.ids
    for question in conversation.questions:
        # A sentence that opens the text has no space before it.
        rest, n = question.answer_ids[1:], len(question.answer_ids)
        starts = [i for i in range(len(ids) - n) if ids[i + 1 : i + n] == rest]
        assert len(starts) == 1
        low, high = ranges.get(question.stratum, ranges["prompt"])
        assert low <= starts[0] <= starts[0] + n <= high
        assert len(question.ids) + n < T_BREATH


def test_a_stream_too_short_for_its_facts_is_refused(subject: Subject) -> None:
    with pytest.raises(SpecError) as caught:
        draw_conversation(subject.tokenizer, 0, 64)
    assert caught.value.argument == "tokens"


@pytest.mark.parametrize(
    ("change", "argument"), [({"arms": ("on",)}, "arm"), ({"samples": 0}, "samples"), ({"tokens": 100}, "tokens")],
)
def test_a_plan_that_cannot_be_run_is_refused(change: dict[str, object], argument: str) -> None:
    with pytest.raises(SpecError) as caught:
        Plan(**change)  # type: ignore[arg-type]
    assert caught.value.argument == argument


def test_every_arm_differs_from_its_base_in_one_mechanism() -> None:
    for setting in ("wide", "middle", "tight"):
        base = ARMS[f"{setting}: on"]
        for name, field in (
            ("static graph", "hebb"), ("no resonance", "alpha_res"), ("no decay", "beta_0"),
            ("PAPER", "breath_protection"),
        ):
            arm = ARMS[f"{setting}: {name}"]
            assert arm.budget == base.budget
            assert {key for key, value in vars(arm.parameters).items() if value != getattr(PAPER, key)} ^ {
                key for key, value in vars(base.parameters).items() if value != getattr(PAPER, key)
            } == {field}
    assert set(BASES) == set(ARMS) - {"full"}


@torch.no_grad()
def test_a_block_is_what_decode_does_step_by_step(subject: Subject) -> None:
    """The study's blocks and `decode=True`, one token at a time, hold the same positions and say the same next."""
    ids = draw_conversation(subject.tokenizer, 5, TOKENS).ids
    end, model = PROMPT + 2 * T_BREATH, subject.model
    reading, filled = read_prompt(subject, ids[:PROMPT])
    cache, memory = filled(), ARMS["tight: on"].start(reading)
    hold(cache, memory)
    for block in blocks(ids[PROMPT:end]):
        memory = read_block(model, cache, memory, block, reading.engine)
    with CrystalCache(320, subject.sentence_ends, backend="numpy", decode=True)(model) as run:
        model(input_ids=torch.tensor([ids[:PROMPT]]))
        assert run.cache is not None
        for token in ids[PROMPT:end]:
            model(input_ids=torch.tensor([[token]]), past_key_values=run.cache)
        said = [model(input_ids=torch.tensor([[ids[end]]]), past_key_values=run.cache).logits]
    held = run.cache.stored_positions()[:-1]
    said.append(model(input_ids=torch.tensor([[ids[end]]]), past_key_values=cache).logits)
    assert held.tolist() == memory.held.tolist()
    assert len(held) <= 320
    assert said[0].argmax() == said[1].argmax()


def test_a_second_run_reads_what_is_stored(subject: Subject, tmp_path: Path) -> None:
    """Sizes are what the schedule says; a run that is cut off goes on where it was; the tables hold every arm."""
    told: list[str] = []
    path = tmp_path / "study.jsonl"
    rows = list(run_plan(subject, replace(SMALL, samples=1), path, told.append))
    rows = list(run_plan(subject, SMALL, path, told.append))
    assert sum("(stored)" in what for what in told) == 3
    assert len(told) == 3 * 3
    assert rows == load_rows(path)
    assert len(rows) == 2
    for row in rows:
        full, on, window = (row["found"][name] for name in SMALL.arms)
        assert (full["mean"], full["end"]) == (PROMPT + (TOKENS + 1) / 2, PROMPT + TOKENS)
        assert (window["mean"], window["peak"], window["end"]) == (320 + (T_BREATH + 1) / 2, 320 + T_BREATH, 320)
        assert abs(on["mean"] - window["mean"]) <= 2
        assert all(full["right"].values())
        assert window["right"][CONTROL] == 1
        assert window["right"]["prompt 1"] == 0
    assert all(f"| {arm} |" in markdown(rows, SMALL.arms) for arm in SMALL.arms)


def test_flags_are_compared_where_both_are_live() -> None:
    before = Flags(np.array([0, 1, 4, 7]), np.array([True, False, True, True]))
    after = Flags(np.array([1, 4, 7, 9]), np.array([True, True, False, True]))
    assert changed_flags(before, after) == (2, 3)


def test_a_self_pulse_holds_a_trunk_up_only_at_a_high_impact() -> None:
    """The audit's figures: all fall to 0.155 ... 0.17 up to 10.75, and 11 is the first with a second fixed point."""
    low, high = fixed_points(10.75, PAPER), fixed_points(11.0, PAPER)
    assert [round(D, 4) for D in low] == [0.1656, 0.1656]
    assert [round(D, 4) for D in high] == [0.1662, 0.8430]
    assert fixed_points(20.0, replace(PAPER, alpha_res=0.0))[0] == 0.0


def test_trunks_fall_with_their_own_graph_too(subject: Subject) -> None:
    """No neighbour can lower D: all are at or above the self-pulse's fixed point, and high impacts stay up."""
    ids = draw_conversation(subject.tokenizer, 0, TOKENS).ids
    with torch.no_grad():
        reading, _ = read_prompt(subject, ids[:PROMPT])
    view = reading.view
    state = extend(empty_state(parse_budget("100%")), view.q, view.k, reading.ids, reading.sentence_ends, PAPER)
    for impact in (8.0, 20.0):
        D = held_up(state, impact, PAPER, reading.engine, 20)
        assert len(D) > 0
        assert (fixed_points(impact, PAPER)[1] - 1e-6 <= D).all()


def test_pairs_across_chunks_are_told_from_pairs_inside(subject: Subject) -> None:
    """One chunk has no pair across; small chunks have; nothing is left that was not above the threshold."""
    ids = draw_conversation(subject.tokenizer, 0, TOKENS).ids
    with torch.no_grad():
        reading, _ = read_prompt(subject, ids[:PROMPT])
    _, across = surviving_pairs(reading, PAPER, 1)
    assert across == (0, 0, 0)
    for pairs in surviving_pairs(reading, replace(PAPER, C=64), 4):
        assert pairs.joined > 0
        assert pairs.later <= pairs.above <= pairs.joined


def _row(on: list[int], window: list[int]) -> dict[str, object]:
    answers = {"tight: on": on, "tight: window": window}
    return {"found": {arm: {"right": dict(zip(STRATA, right, strict=True))} for arm, right in answers.items()}}


def test_differences_are_paired_and_leave_the_control_out() -> None:
    rows = [_row([1, 0, 0, 0, 0, 0, 0, 1], [0] * 8), _row([0] * 8, [0] * 7 + [1]), _row([1] * 8, [1, 1] + [0] * 6)]
    assert (7 * scores(rows, "tight: on")).round(9).tolist() == [1, 0, 7]
    found = differences(rows, ("tight: on", "tight: window"))
    assert set(found) == {"tight: window"}
    assert (found["tight: window"].better, found["tight: window"].worse, found["tight: window"].p) == (0, 2, 0.5)
    assert round(21 * found["tight: window"].mean, 9) == -6


def test_holm_by_hand() -> None:
    adjusted = holm({"a": 0.04, "b": 0.01, "c": 0.03})
    assert {name: round(p, 9) for name, p in adjusted.items()} == {"b": 0.03, "c": 0.06, "a": 0.06}


def test_predictions_count_every_question(subject: Subject) -> None:
    """Seven questions are compared with the first, on old positions that both still hold."""
    with torch.no_grad():
        (changed, common), (_, later) = query_changes(subject, 0, "tight: on", TOKENS)
    assert 0 <= changed < common
    assert 0 < later <= common <= 7 * 320


def test_the_command_writes_tables_and_rows(subject: Subject, tmp_path: Path) -> None:
    arguments = ["--samples", "1", "--tokens", str(TOKENS), "--arms", "tight: on,tight: window"]
    main([*arguments, "--contexts", "0", "--backend", "numpy", "--out", str(tmp_path)])
    assert (tmp_path / "study.md").read_text(encoding="utf-8").startswith("| arm | right |")
    assert len(load_rows(tmp_path / "study.jsonl")) == 1
    assert "fixed points" in json.loads((tmp_path / "study-predictions.json").read_text(encoding="utf-8"))
