"""The comparison: plans, cells, stored results, intervals, the runner's placements and the command itself."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the comparison drives transformers models")

from typer.testing import CliRunner

from models_integration import CrystalCache, FullCache, StreamingLLM
from models_integration.cli.app import app
from models_integration.studies.compare.plan import CONTROLS, Cell, Plan, cells
from models_integration.studies.compare.report import comparison_table, control_table, draw
from models_integration.studies.compare.rules import verdict
from models_integration.studies.compare.run import answer, run_cell, run_plan
from models_integration.studies.results import find_row, load_rows
from models_integration.studies.subject import Subject, load_subject
from models_integration.tasks import draw_sample, place, score
from reference.statistics import wilson
from spec.errors import SpecError
from spec.tables import result_table

SMALL = Plan(budgets=("0.9",), tasks=("needle",), length=200, samples=2)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("pocket", "numpy")


def silent(what: str) -> None:
    """Progress that nobody watches."""


def rows_of(subject: Subject, plan: Plan, path: Path) -> list[dict[str, object]]:
    return list(run_plan(subject, plan, path, silent))


def test_a_plan_is_the_product_of_its_parts_with_one_full_cache_and_the_controls() -> None:
    made = list(cells(Plan()))
    assert len(made) == len(set(made)) == 2 * (2 * 2 + 1) + 4 + 3
    assert {cell.policy for cell in made if cell.control} == set(CONTROLS)
    assert {(cell.budget_requested, cell.budget) for cell in made if cell.policy == "crystalcache"} == {
        ("0.3", 308), ("0.5", 512),
    }


def test_every_policy_gets_the_one_budget_of_eq_30() -> None:
    assert Plan(length=1000).tokens("0.3") == 300
    assert Plan(length=300).tokens("0.3") == 132  # the floor: sink + recent
    assert Plan(length=100).tokens("0.3") == 100


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"policies": ("snapkw",)}, "policy"), ({"tasks": ("haystack",)}, "task"),
        ({"placement": "before"}, "placement"), ({"budgets": ("1.5",)}, "budget"), ({"samples": 0}, "samples"),
    ],
)
def test_a_plan_of_unknown_parts_is_refused(change: dict[str, object], argument: str) -> None:
    with pytest.raises(SpecError) as error:
        replace(Plan(), **change)  # type: ignore[arg-type]
    assert error.value.argument == argument


@pytest.mark.parametrize(("correct", "n"), [(0, 20), (1, 20), (16, 20), (20, 20), (7, 60)])
def test_the_ends_of_a_wilson_interval_are_where_the_score_test_turns(correct: int, n: int) -> None:
    """Each end p has |share - p| = z sqrt(p (1 - p) / n), with z the 97.5 % point of the normal distribution."""
    for p in wilson(correct, n):
        assert math.isclose(abs(correct / n - p), 1.959963984540054 * math.sqrt(max(0, p * (1 - p)) / n), abs_tol=1e-9)


def test_a_second_run_skips_what_is_stored(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = rows_of(subject, SMALL, path)
    stored = path.read_bytes()
    assert rows_of(subject, SMALL, path) == first
    assert path.read_bytes() == stored
    wider = replace(SMALL, samples=3)
    assert len(rows_of(subject, wider, path)) == len(first)
    assert len(load_rows(path)) == 2 * len(first)


def test_rows_pass_the_result_table(subject: Subject, tmp_path: Path) -> None:
    rows = rows_of(subject, SMALL, tmp_path / "results.jsonl")
    result_table(rows)
    for row in rows:
        assert row["mean_cache"] <= row["peak_cache"]  # type: ignore[operator]


def test_controls_hold_on_the_pocket_model(subject: Subject) -> None:
    plan = Plan(policies=(), tasks=("needle",), budgets=("0.3",), length=512, samples=4)
    for cell in cells(plan):
        row = run_cell(subject, cell, silent)
        assert verdict(row).endswith("holds"), row


@pytest.mark.parametrize("placement", ["after", "in_prompt", "paper"])
def test_the_full_cache_answers_in_every_placement(subject: Subject, placement: str) -> None:
    sample = draw_sample("needle", subject.tokenizer, 300, 0, 7)
    given = answer(subject.model, FullCache(), place(sample, placement), 50, subject.stop_ids)
    assert score(subject.tokenizer, given.token_ids, sample)
    prompt = 300 if placement == "after" else 300 + len(sample.question_ids)
    assert given.kept == prompt


@pytest.mark.parametrize("placement", ["in_prompt", "paper"])
def test_a_placement_keeps_the_question_of_a_compacted_prompt(subject: Subject, placement: str) -> None:
    """The fact stands in the recent window, and so does the question: StreamingLLM must still answer."""
    sample = draw_sample("needle", subject.tokenizer, 400, 4, 7)
    assert sample.metadata["depth"] == 1.0
    given = answer(subject.model, StreamingLLM(150), place(sample, placement), 50, subject.stop_ids)
    assert given.kept == 150
    assert score(subject.tokenizer, given.token_ids, sample)


def test_the_mean_cache_counts_the_question_and_the_answer(subject: Subject) -> None:
    sample = draw_sample("needle", subject.tokenizer, 400, 0, 7)
    method = CrystalCache(200, sentence_ends=subject.sentence_ends, backend="numpy")
    given = answer(subject.model, method, place(sample, "after"), 3, frozenset())
    fed = given.kept + len(sample.question_ids)
    assert given.mean_cache == (fed + (fed + 1) + (fed + 2) + (fed + 3)) / 4
    assert given.peak_cache == 400


def test_tables_and_picture_are_drawn(subject: Subject, tmp_path: Path) -> None:
    rows = rows_of(subject, SMALL, tmp_path / "results.jsonl")
    measured = [row for row in rows if not row["control"]]
    controls = [row for row in rows if row["control"]]
    assert comparison_table(measured).row_count == len(measured) == 3
    assert control_table(controls).row_count == len(controls) == 4
    draw(measured, tmp_path / "picture.png", "small")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_compares_and_takes_up_again(tmp_path: Path) -> None:
    arguments = ["compare", "--length", "200", "--samples", "1", "--tasks", "needle", "--budgets", "0.9"]
    arguments += ["--backend", "numpy", "--no-controls", "--out", str(tmp_path)]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "crystalcache" in result.output
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["policy"] for row in rows] == ["crystalcache", "streamingllm", "fullcache"]
    assert (tmp_path / "comparison.png").exists()


def test_the_command_names_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "--budgets", "half", "--out", str(tmp_path)])
    assert isinstance(result.exception, SpecError)
    assert "half" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_cells_are_told_apart_by_model_backend_and_specification() -> None:
    cell = Cell("crystalcache", "needle", 200, "0.5", 132, "after", 2, 42, control=False)
    one, other = cell.identity("pocket@1", "numpy"), cell.identity("pocket@2", "numpy")
    assert find_row([one], other) is None
    assert find_row([one], cell.identity("pocket@1", "numba")) is None
    assert find_row([one], one) == one
