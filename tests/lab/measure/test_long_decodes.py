"""Tests of the measurement of eviction during long generation."""

from pathlib import Path

import pytest
import torch

from experiments.studies.results import Row, load_rows
from experiments.studies.subject import Loading, Subject
from lab.measure import long_decodes
from models_integration.model.frame import decode

pytestmark = pytest.mark.law("figures-are-counted-right")


@pytest.fixture(scope="module")
def pocket() -> Subject:
    return Loading("pocket", dtype="float32").subject()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the samples short."""
    for name, value in {"LENGTH": 230, "PROMPT": 36, "BUDGET": 36, "ITEMS": 2}.items():
        monkeypatch.setattr(long_decodes, name, value)


@pytest.mark.parametrize(("text", "share"), [
    ("1. apple\n2. stone\nEnd.", 1.0), (" 1. apple\n2. river", 0.5), ("2. apple\n1. stone", 0.0),
    ("1. apple 2. stone", 0.0),
])
def test_a_line_counts_with_its_word_and_its_number(text: str, share: float) -> None:
    assert long_decodes.copied(text, ["apple", "stone"]) == share


def test_the_full_cache_answers_as_one_forward_pass_over_all_tokens(pocket: Subject) -> None:
    """The tokens of a late question, read one by one, give the greedy answer of the text as a whole."""
    sample = long_decodes.late_question(pocket, 0)
    row, ids = long_decodes.row_of(pocket, "late", 0, "fullcache"), [*sample.prompt, *sample.given]
    start = len(ids)
    while len(ids) < start + sample.most and not set(ids[start:]) & pocket.stop_ids:
        with torch.no_grad():
            ids.append(int(pocket.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert row["score"] == sample.judge(ids[start:])
    assert row["tokens"] == len(ids)
    assert len(sample.prompt) == long_decodes.PROMPT
    assert "Question:" in decode(pocket.tokenizer, list(sample.given))


@pytest.mark.parametrize("policy", ["tova", "snapkv/every=64"])
def test_a_policy_holds_its_budget_while_tokens_are_decoded(pocket: Subject, policy: str) -> None:
    held = long_decodes.row_of(pocket, "late", 0, policy)["held"]
    cadence = 64 if "every" in policy else 1
    assert long_decodes.BUDGET <= held <= long_decodes.BUDGET + cadence


def test_a_stopped_measurement_continues(pocket: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_decodes, "POLICIES", ("fullcache", "tova"))
    monkeypatch.setattr(long_decodes, "TASKS", {"copy": long_decodes.copy_and_count})
    rows = long_decodes.measure(pocket, tmp_path, 2)
    first = next(rows)
    rows.close()  # type: ignore[attr-defined]  # a generator, annotated as an iterator
    assert load_rows(tmp_path / long_decodes.ROWS) == [first]
    more = list(long_decodes.measure(pocket, tmp_path, 2))
    assert [(row["index"], row["policy"]) for row in more] == [(0, "tova"), (1, "fullcache"), (1, "tova")]


def rows_of(scores: dict[str, tuple[float, float]]) -> list[Row]:
    return [
        {"task": task, "index": index, "policy": policy, "score": score - 0.25 * index, "length": 2 - score, "held": 9}
        for task in long_decodes.TASKS for policy, each in scores.items() for index, score in enumerate(each)
    ]


def test_the_table_has_paired_differences_and_leaves_out_what_the_full_cache_cannot_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_decodes, "POLICIES", ("fullcache", "tova"))
    rows = rows_of({"fullcache": (1.0, 1.25), "tova": (0.5, 0.75)})
    assert long_decodes.difference(rows, "copy", "tova", "score").value == -0.5
    lines = long_decodes.table(rows)
    assert lines[2][:4] == ["`tova`", "0.50", "-0.50 [-0.50, -0.50]", "0.50"]
    poor = [row | {"score": 0.5} if row["task"] == "late" else row for row in rows]
    assert not any("late" in cell for cell in long_decodes.table(poor)[0])
