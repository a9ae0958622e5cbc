"""The comparison: plans, cells, stored results, intervals, the runner's placements and the command itself."""

import json
import math
import re
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the comparison drives transformers models")

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

from conformance.own.models_integration.studies.contexts import answer
from models_integration import CrystalCache, FullCache, ObservedSegment, RetentionPolicy, StreamingLLM, observe
from models_integration.cli.app import app
from models_integration.cli.options import names_of
from models_integration.studies.answers import SAMPLES, Answer, Key, answers
from models_integration.studies.compare.plan import Cell, Plan, cells, run_plan
from models_integration.studies.compare.report import comparison_tables, control_table, failed_controls
from models_integration.studies.compare.rules import CONTROL_BOUNDS, verdict
from models_integration.studies.results import find_row, load_rows
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks import Sample, draw_sample, place, score
from models_integration.tasks.registry import IN_PROSE, resolve_task
from reference.statistics import wilson
from spec.errors import SpecError
from spec.tables import result_table

pytestmark = pytest.mark.law("figures-are-counted-right")

SMALL = Plan(budgets=("0.9",), tasks=("needle",), length=200, samples=2)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Loading("pocket", "numpy").subject()


def given_by(
    subject: Subject, policy: RetentionPolicy, sample: Sample, placement: str, most: int = 50, stop: bool = True,
) -> Answer:
    """What one policy's cell says."""
    stopping = subject if stop else replace(subject, stop_ids=frozenset())
    asked = {Key("its name", 1): policy.on(subject.model)}
    ((_, given),) = answers(stopping, place(sample, placement), asked, most)
    return given


def silent(what: str) -> None:
    """Progress that nobody watches."""


def rows_of(subject: Subject, plan: Plan, path: Path) -> list[dict[str, object]]:
    return list(run_plan(subject, plan, path, silent))


@pytest.mark.law("as-it-is-described")
def test_a_plan_is_the_product_of_its_parts_with_one_full_cache_and_the_controls() -> None:
    made = list(cells(Plan()))
    assert len(made) == len(set(made)) == 2 * (2 * 2 + 1) + 4 + 3
    assert {cell.policy for cell in made if cell.control} == set(CONTROL_BOUNDS)
    assert {(cell.budget_requested, cell.budget) for cell in made if cell.policy == "crystalcache"} == {
        ("0.3", 308), ("0.5", 512),
    }


@pytest.mark.law("as-it-is-described")
def test_every_policy_gets_the_one_budget_and_every_control_sinks_and_window() -> None:
    assert Plan(length=1000).tokens("0.3") == Plan(length=1000).control_tokens("0.3") == 300
    assert (Plan(length=300).tokens("0.3"), Plan(length=300).control_tokens("0.3")) == (90, 132)
    assert (Plan(length=100).tokens("0.3"), Plan(length=100).control_tokens("0.3")) == (30, 100)
    assert Plan(length=100).tokens("300") == 100


@pytest.mark.law("refused-before-anything-changes")
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


@pytest.mark.law("saved-is-what-was")
def test_a_second_run_skips_what_is_stored(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = rows_of(subject, SMALL, path)
    stored = path.read_bytes()
    assert rows_of(subject, SMALL, path) == first
    assert path.read_bytes() == stored
    wider = replace(SMALL, samples=3)
    assert len(rows_of(subject, wider, path)) == len(first)
    assert len(load_rows(path)) == 2 * len(first)
    rows_of(subject, replace(SMALL, policies=("snapkv", "fullcache")), path)
    samples = load_rows(path.with_name(SAMPLES))
    assert [row["index"] for row in samples] == [0, 1, 2, 0, 1]
    assert [cell["policy"] for row in samples[3:] for cell in row["cells"]] == ["snapkv"] * 2


def test_rows_pass_the_result_table(subject: Subject, tmp_path: Path) -> None:
    rows = rows_of(subject, SMALL, tmp_path / "results.jsonl")
    result_table(rows)
    for row in rows:
        assert row["mean_cache"] <= row["peak_cache"]  # type: ignore[operator]


def test_facts_in_prose_and_policies_with_constants_are_compared(subject: Subject, tmp_path: Path) -> None:
    policies = ("streamingllm", "streamingllm(N_sink=200)", "fullcache")
    plan = Plan(policies, ("0.5",), IN_PROSE[1:], length=700, samples=1)
    assert {(cell.task, cell.policy) for cell in cells(plan) if cell.control} == set(
        product(IN_PROSE[1:], ("without needle", "only needle"))
    )
    rows = rows_of(subject, plan, tmp_path / "results.jsonl")
    result_table(rows)
    said = [row for row in load_rows(tmp_path / "samples.jsonl") if row["task"] == "keys_in_prose_4"]
    expected = place(resolve_task("keys_in_prose_4")(subject.ground, 700, 0, plan.seed)[0])
    cell = next(cell for cell in said[0]["cells"] if cell["policy"] == "streamingllm(N_sink=200)")
    alone, _ = answer(subject.model, StreamingLLM(350, N_sink=200), expected, 50, subject.stop_ids)
    assert cell["token_ids"] == alone.token_ids


def test_a_list_of_names_is_cut_outside_brackets() -> None:
    assert names_of("policies", "snapkv(W=16, kernel=5), knorm,knorm") == ("snapkv(W=16, kernel=5)", "knorm")


def test_controls_hold_on_the_pocket_model(subject: Subject, tmp_path: Path) -> None:
    plan = Plan(policies=(), tasks=("needle",), budgets=("0.3",), length=512, samples=4)
    for row in rows_of(subject, plan, tmp_path / "results.jsonl"):
        assert verdict(row).endswith("holds"), row


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("placement", ["after", "in_prompt", "paper"])
def test_the_full_cache_answers_in_every_placement(subject: Subject, placement: str) -> None:
    sample = draw_sample("needle", subject.tokenizer, 300, 0, 7)
    given = given_by(subject, FullCache(), sample, placement)
    assert score(subject.tokenizer, given.token_ids, sample)
    prompt = 300 if placement == "after" else 300 + len(sample.question_ids)
    assert given.kept == prompt


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("placement", ["in_prompt", "paper"])
def test_a_placement_keeps_the_question_of_a_compacted_prompt(subject: Subject, placement: str) -> None:
    """The fact stands in the recent window, and so does the question: StreamingLLM must still answer."""
    sample = draw_sample("needle", subject.tokenizer, 400, 4, 7)
    assert sample.metadata["depth"] == 1.0
    given = given_by(subject, StreamingLLM(150), sample, placement)
    assert given.kept == 150
    assert score(subject.tokenizer, given.token_ids, sample)


def test_the_mean_cache_counts_the_question_and_the_answer(subject: Subject) -> None:
    sample = draw_sample("needle", subject.tokenizer, 400, 0, 7)
    method = CrystalCache(200, sentence_ends=subject.sentence_ends, backend="numpy")
    given = given_by(subject, method, sample, "after", 4, stop=False)
    fed = given.kept + len(sample.question_ids)
    assert given.mean_cache == (fed + (fed + 1) + (fed + 2) + (fed + 3)) / 4
    assert given.peak_cache == 400


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("placement", ["after", "in_prompt"])
def test_the_batch_size_changes_no_row(subject: Subject, placement: str, tmp_path: Path) -> None:
    """Rows that keep different tokens, stop at different steps and decide in their steps are side by side."""
    policies = ("crystalcache", "streamingllm", "snapkv", "keydiff", "adakv", "pyramidkv", "h2o", "fullcache")
    plan = Plan(policies, ("0.7", "0.8"), ("needle",), 200, 2, 3, placement)
    one, five = (list(run_plan(subject, plan, tmp_path / str(size) / "r", silent, size)) for size in (1, 5))
    assert one == five


@pytest.mark.law("figures-are-counted-right")
def test_a_prompt_is_read_once_for_all_its_cells(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window's controls have samples of their own; what decides in its steps reads its question there."""
    read: list[int] = []

    def counted(model: PreTrainedModel, ids: Tensor, **rest: Any) -> ObservedSegment:
        read.append(ids.shape[1])
        return observe(model, ids, **rest)

    monkeypatch.setattr("models_integration.studies.answers.observe", counted)
    plan = Plan(("crystalcache", "snapkv", "tova", "fullcache"), ("0.7", "0.8"), ("needle",), 200, 2)
    rows_of(subject, plan, tmp_path / "results.jsonl")
    assert read == [200] * 3 * plan.samples
    read.clear()
    rows_of(subject, replace(plan, placement="in_prompt", controls=False), tmp_path / "results.jsonl")
    assert len(read) == 2 * plan.samples
    assert read[0] == read[1] + 1


@pytest.mark.law("promised-is-there-forgotten-is-not")
@pytest.mark.parametrize("stop", [3, 11, 20])
def test_a_stopped_run_loses_the_sample_it_was_at(subject: Subject, tmp_path: Path, stop: int) -> None:
    plan, told = replace(SMALL, samples=3), list[str]()
    whole = rows_of(subject, plan, tmp_path / "whole" / "results.jsonl")

    def stopping(what: str) -> None:
        told.append(what)
        if len(told) == stop:
            raise KeyboardInterrupt

    path = tmp_path / "stopped" / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(run_plan(subject, plan, path, stopping))
    each = len(list(cells(plan)))
    done = load_rows(path.with_name(SAMPLES))
    assert [row["index"] for row in done] == list(range(stop // each))
    told.clear()
    assert list(run_plan(subject, plan, path, told.append)) == whole
    assert len(told) == 3 * each
    assert sum("(stored)" in what for what in told) == stop // each * each


POLICIES = (
    "crystalcache", "streamingllm", "snapkv", "adakv", "diverse-nestedkv-without-continuum", "expected-attention",
    "triattention-by-layer-and-head@0123abcd", "diverse-h2o-described",
)
MANY_TASKS = ("needle", "delayed_association", "variable_tracking", "many_keys", "common_words", "questions")


def many_rows() -> list[dict[str, Any]]:
    """8 policies x 4 budgets x 6 tasks as they are stored, with a full cache and controls."""
    rows = []
    limited = [(name, budget, False) for name in POLICIES for budget in ("0.1", "0.2", "0.3", "0.5")]
    others = [("fullcache", "1.0", False), ("without needle", "1.0", True), ("only needle", "1.0", True)]
    for task in MANY_TASKS:
        for at, (policy, budget, control) in enumerate([*limited, *others]):
            B, correct = math.ceil(4096 * float(budget)), 7 * at % 11
            rows.append({
                "policy": policy, "task": task, "length": 4096, "budget_requested": budget, "budget": B,
                "placement": "after", "n": 10, "seed": 42, "control": control, "model": "m@0", "backend": "numpy",
                "spec_version": "0.3.0", "correct": correct, "accuracy": correct / 10, "mean_kept": float(B),
                "mean_cache": B + 20.0,
                "peak_cache": 4096, "over_budget": 0,
            })
    return rows


@pytest.mark.parametrize(("width", "tables"), [(200, 1), (80, 6), (40, 6), (28, 6)])
def test_scores_are_readable_in_every_terminal(width: int, tables: int) -> None:
    """No figure is cut: "0.…" says nothing."""
    rows = [row for row in many_rows() if not row["control"]]
    found = comparison_tables(rows, width)
    assert len(found) == tables
    console = Console(width=width, record=True, file=StringIO())
    for table in found:
        console.print(table)
    shown = console.export_text()
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    scores = [word for word in shown.split() if re.fullmatch(r"[01]\.\d\d", word)]
    assert len(scores) == len(rows)


def test_controls_that_fail_are_named() -> None:
    controls = [row for row in many_rows() if row["control"]]
    assert control_table(controls).row_count == 12
    failed = failed_controls(controls)
    assert "only needle (Needle)" in failed
    assert len(failed) == sum(verdict(row).endswith("FAILS") for row in controls)


@pytest.mark.law("saved-is-what-was")
def test_the_command_compares_and_takes_up_again(tmp_path: Path) -> None:
    arguments = ["compare", "--length", "200", "--samples", "1", "--tasks", "needle", "--budgets", "0.9"]
    arguments += ["--backend", "numpy", "--no-controls", "--out", str(tmp_path)]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "crystalcache" in result.output
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["policy"] for row in rows] == ["crystalcache", "streamingllm", "fullcache"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".jsonl", ".jsonl"]


@pytest.mark.law("one-line-with-the-way-out")
def test_the_command_names_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "--budgets", "half", "--out", str(tmp_path)])
    assert isinstance(result.exception, SpecError)
    assert "half" in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.law("an-identity-tells-apart")
def test_cells_are_told_apart_by_model_backend_and_specification() -> None:
    cell = Cell("crystalcache", "needle", 200, "0.5", 132, "after", 2, 42, control=False)
    one, other = cell.identity("pocket@1", "numpy"), cell.identity("pocket@2", "numpy")
    assert find_row([one], other) is None
    assert find_row([one], cell.identity("pocket@1", "numba")) is None
    assert find_row([one], one) == one
