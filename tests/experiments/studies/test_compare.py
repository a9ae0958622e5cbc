"""Tests of `kvspec compare`: rules from options, cells, resumed runs, tables and files."""

import math
import re
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("transformers", reason="the comparison drives transformers models")

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel
from typer import Exit
from typer.testing import CliRunner

from experiments.studies.evidence.kept import CONTROL_BOUNDS, FULL, steps
from experiments.studies.evidence.rules import PARTS, Rules, load_rules, rules_of
from experiments.studies.evidence.run import Item, items, merged, methods
from experiments.studies.evidence.samples import Samples
from experiments.studies.evidence.tables import right_answers
from experiments.studies.own_texts import user_question_rows
from experiments.studies.report import control_table, failed_controls, fitting_tables, summary, summary_tables, verdict
from experiments.studies.results import load_rows
from experiments.studies.subject import Loading, Subject
from experiments.tasks import PLACEMENTS
from experiments.tasks.registry import TABLE
from kvspec.cli.app import app
from kvspec.cli.options import names_of
from kvspec.cli.study_runs import GRIDS, Running, run, study_of
from models_integration import ObservedSegment, observe
from models_integration.policies.sizes import bytes_per_token
from reference.policies.names import NAMES
from reference.statistics import wilson
from spec.errors import SpecError
from spec.tables import result_table

pytestmark = pytest.mark.law("figures-are-counted-right")

LOADING = Loading("", "numpy")
CALIBRATED = re.compile("triattention|kvzip-heads|q-filters|attention-stats|kvzap|fast-kvzip")


def rules(
    policies: str = "crystalcache,streamingllm,fullcache", budgets: str = "0.3,0.5",
    tasks: str = "needle,delayed_association", lengths: str = "1024", samples: int = 20, placements: str = "after",
    *, seeds: str = "42", controls: bool = True,
) -> Rules:
    """Return rules as `kvspec compare` creates them."""
    return rules_of(**study_of(
        "t", names_of("policies", policies), budgets, tasks, lengths, samples, seeds, placements, "pocket",
        controls=controls, bare=False,
    ))


SMALL = rules(budgets="0.9", tasks="needle", lengths="200", samples=2)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Loading("pocket", "numpy").subject()


def ran(study: Rules, out: Path) -> list[dict[str, Any]]:
    """Return the rows after a run with any exit code."""
    with suppress(Exit):
        run(study, LOADING, Running(out))
    return load_rows(out / "study.jsonl")


def cells_of(study: Rules, subject: Subject) -> dict[str, list[list[tuple[str, str]]]]:
    """Return the cells of the first context's samples, by task."""
    actual: dict[str, list[list[tuple[str, str]]]] = {}
    for item in items(replace(study, contexts=1), subject, PARTS):
        actual.setdefault(item.task, []).append(list(item.cells(study)))
    return actual


@pytest.mark.law("as-it-is-described")
def test_options_are_the_product_of_their_parts_with_one_full_cache_and_the_controls(subject: Subject) -> None:
    limited = {*product(("crystalcache", "streamingllm"), ("0.3", "0.5")), (FULL, "1.0")}
    controls = {("without needle", "1.0"), ("only needle", "1.0")}
    actual = cells_of(rules(), subject)
    assert {task: [set(cells) for cells in each] for task, each in actual.items()} == {
        "needle": [limited | controls, {("window holds needle", "0.3")}, {("window misses needle", "0.3")}],
        "delayed_association": [limited | controls | {("window misses needle", "0.3")}],
    }
    prose = cells_of(rules(tasks="needle_in_prose,key_value_short,prose_continuation"), subject)
    assert {name for each in prose.values() for cells in each for name, _ in cells} & set(CONTROL_BOUNDS) == {
        "without needle", "only needle",
    }
    assert not {name for name, _ in prose["prose_continuation"][0]} & set(CONTROL_BOUNDS)


@pytest.mark.law("as-it-is-described")
def test_every_task_placement_and_policy_is_taken_together_or_refused_with_its_reason(subject: Subject) -> None:
    """Check the rules alone. Each policy is applied to the model as the runner does."""
    names = [name for name in NAMES if name != FULL]
    for task, placement in product(TABLE, PLACEMENTS):
        if task.endswith("_turns") and placement != "after":
            with pytest.raises(SpecError, match=f"placements = '{placement}': {task} supports only after: the earlier"):
                rules(",".join(names), "0.9", task, placements=placement)
        else:
            study = rules(",".join(names), "0.9", task, placements=placement)
            assert (study.tasks, study.placements, study.policies) == ((task,), (placement,), tuple(names))
    taken = set[str]()
    for name in names:
        method = None if CALIBRATED.search(name) else methods(rules(name, "0.9"), subject)[name]
        taken |= {name} if method else set()
        if method is None or not steps(method):
            reason = "is needed; `kvspec calibrate`" if method is None else "always evicts only after the prompt"
            with pytest.raises(SpecError, match=f"{reason}.*"):
                methods(rules(f"{name}@prompt", "0.9"), subject)
        else:
            taken |= set(methods(rules(f"{name}@prompt", "0.9"), subject))
    assert {"h2o", "h2o@prompt", "tova", "tova@prompt", "snapkv"} <= taken


@pytest.mark.law("saved-is-what-was")
def test_a_second_run_adds_what_is_not_stored(subject: Subject, tmp_path: Path) -> None:
    """Check that samples, policies and budgets are added to the stored rows, and that no cell is measured twice."""
    first = ran(SMALL, tmp_path)
    assert ran(SMALL, tmp_path) == first
    assert len(first) == 2 * 3
    wider = ran(replace(SMALL, contexts=3), tmp_path)
    assert [row["index"] for row in wider] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    added = ran(replace(SMALL, policies=("snapkv", "crystalcache")), tmp_path)[len(wider) :]
    assert [(row["index"], [cell["policy"] for cell in row["cells"]]) for row in added] == [
        (0, ["snapkv"]), (1, ["snapkv"]),
    ]
    joined = merged([*first, *added])
    assert sum({"snapkv", "crystalcache"} <= row["seconds"].keys() for row in joined) == len(added)
    for key in ("metric", "task", "placement", "seed", "chat_template", "model", "length"):
        assert all(key in row for row in first)
    for cell in (cell for row in first for cell in row["cells"]):
        assert isinstance(cell["answer"], str)
        assert {"kept", "answer_slots", "mean_bytes", "peak_bytes", "right"} <= cell.keys()


@pytest.mark.law("an-identity-tells-apart")
def test_a_chat_template_is_the_default_and_another_sample(subject: Subject) -> None:
    """A tokenizer without a template reads bare text. An option also chooses bare text."""
    def drawn(bare: bool) -> list[Item]:
        study = replace(rules(tasks="needle,needle_in_prose,delayed_association"), bare=bare)
        return [item for item in items(replace(study, contexts=1), subject, PARTS) if not item.control]

    plain = drawn(True)
    assert [item.digest for item in drawn(False)] == [item.digest for item in plain]
    subject.tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}<assistant>"
    )
    try:
        framed = drawn(False)
        named = framed[0].identity(SMALL, subject)["template"]
        assert (named, plain[0].identity(replace(SMALL, bare=True), subject)["template"]) == (
            framed[0].sample.chat_template, None,
        )
        assert [item.digest for item in drawn(True)] == [item.digest for item in plain]
    finally:
        subject.tokenizer.chat_template = None
    for one, other in zip(framed, plain, strict=True):
        assert one.sample.length == other.sample.length
        assert one.unit(SMALL, subject) != other.unit(SMALL, subject)
        assert ("template", None) in one.identity(SMALL, subject).items()
        assert (one.sample.chat_template != "none") is (other.sample.chat_template == "none")
        texts = [str(subject.tokenizer.decode(list(ids))) for ids in (one.sample.context_ids, one.sample.question_ids)]
        assert "user" in texts[0][:20]
        assert "assistant" in texts[1]


@pytest.mark.law("as-it-is-described")
def test_options_and_the_rules_that_they_write_are_one_run(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    options = ["--length", "200,220", "--seed", "1,2", "--tasks", "needle(depth=0.5)", "--policies", "h2o,snapkv(W=16)"]
    written = CliRunner().invoke(app, ["compare", *options, "--budgets", "64", "--write-rules", str(file)])
    assert written.exit_code == 0, written.output
    study = load_rules(file)
    again = rules("h2o,snapkv(W=16)", "64", "needle(depth=0.5)", "200,220", seeds="1,2")
    assert (study.source, again.source) == (str(file), "")
    assert replace(study, digest="", title="t", source="") == replace(again, digest="")
    assert (study.lengths, study.seeds, study.policies) == ((200, 220), (1, 2), ("h2o", "snapkv(W=16)"))


@pytest.mark.law("as-it-is-described")
def test_a_memory_becomes_tokens_of_the_model(tmp_path: Path) -> None:
    file, each = tmp_path / "rules.toml", bytes_per_token(Loading().subject().model)
    options = ["compare", "--policies", "snapkv", "--write-rules", str(file), "--budgets", f"0.3,{90 * each}B"]
    written = CliRunner().invoke(app, options)
    assert written.exit_code == 0, written.output
    assert load_rules(file).budgets == ("0.3", "90")
    two = CliRunner().invoke(app, [*options, "--model", "pocket,chat", "--force"])
    assert "depends on the model: give one model" in " ".join(f"{two.output} {two.exception}".split())


@pytest.mark.law("as-it-is-described")
def test_policies_that_decide_while_decoding_are_compared_below_sinks_and_window(tmp_path: Path) -> None:
    study = rules("h2o,tova,h2o@prompt", "48", "needle", "200", 1, controls=False)
    (row,) = ran(study, tmp_path)
    cells = {cell["policy"]: cell for cell in row["cells"]}
    assert all(cell["kept"] == 48 for cell in cells.values())
    assert cells["h2o"]["mean_cache"] <= 49 < cells["h2o@prompt"]["mean_cache"]


def test_controls_hold_on_the_pocket_model(tmp_path: Path) -> None:
    rows = ran(rules("fullcache", "0.3", "needle", "512", 4), tmp_path)
    counted = [row for row in summary(rows) if row["control"]]
    assert len(counted) == 4
    for row in counted:
        assert verdict(row).endswith("holds"), row


def test_a_prompt_is_read_once_for_all_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that controls of the window are separate samples.

    Policies with steps read their question in steps.
    """
    read: list[int] = []

    def counted(model: PreTrainedModel, ids: Tensor, **rest: Any) -> ObservedSegment:
        read.append(ids.shape[1])
        return observe(model, ids, **rest)

    monkeypatch.setattr("experiments.studies.evidence.kept.observe", counted)
    study = rules("crystalcache,snapkv,tova,fullcache", "0.7,0.8", "needle", "200", 2)
    ran(study, tmp_path)
    assert read == [200] * 3 * study.contexts
    read.clear()
    ran(replace(study, placements=("in_prompt",), controls=(FULL,)), tmp_path)
    assert len(read) == 2 * study.contexts
    assert abs(read[0] - read[1]) == 1


POLICIES = (
    "crystalcache", "streamingllm", "snapkv", "adakv", "diverse-nestedkv-without-continuum", "expected-attention",
    "triattention-by-layer-and-head@0123abcd", "diverse-h2o-described",
)
MANY_TASKS = ("needle", "delayed_association", "variable_tracking", "many_keys", "common_words", "questions")


def many_rows() -> list[dict[str, Any]]:
    """Return stored rows of 8 policies, 4 budgets and 6 tasks, with a full cache and controls."""
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
    """Check that no number is truncated: "0.…" is not readable."""
    rows = [row for row in many_rows() if not row["control"]]
    actual = summary_tables(rows, width)
    assert len(actual) == tables
    console = Console(width=width, record=True, file=StringIO())
    for table in actual:
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
def test_the_command_compares_takes_up_again_and_writes_a_table(tmp_path: Path) -> None:
    arguments = ["compare", "--length", "200", "--samples", "1", "--tasks", "needle", "--budgets", "0.9"]
    arguments += ["--backend", "numpy", "--no-controls", "--out", str(tmp_path)]
    for _ in range(2):
        result = CliRunner().invoke(app, [*arguments, "--table", str(tmp_path / "table.csv")])
        assert result.exit_code == 0, result.output
        assert "crystalcache" in result.output
        assert "1.00 [0.21, 1.00]" in result.output
    (row,) = load_rows(tmp_path / "study.jsonl")
    assert [cell["policy"] for cell in row["cells"]] == ["fullcache", "crystalcache", "streamingllm"]
    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        next(path.name for path in tmp_path.glob(".*.plan")), "report.html", "study.jsonl", "table.csv",
    ]
    report = CliRunner().invoke(app, ["report", str(tmp_path), "--table", str(tmp_path / "table.tex")])
    assert report.exit_code == 0, report.output
    assert report.output.split() == [str(tmp_path / "report.html"), str(tmp_path / "table.tex")]
    counted, table = summary([row]), pd.read_csv(tmp_path / "table.csv")
    result_table(counted)
    assert table["policy"].tolist() == [one["policy"] for one in counted]
    assert table[["accuracy", "low", "high"]].loc[0].tolist() == pytest.approx([1.0, *wilson(1, 1)])
    latex = (tmp_path / "table.tex").read_text(encoding="utf-8")
    assert "crystalcache" in latex
    # Outside the comment in the first line, no character is a command of LaTeX.
    assert re.search(r"(?<!\\)[_%#$]", latex.removeprefix("% Written by kvspec.\n")) is None


def test_a_grid_is_a_run_of_its_variants(tmp_path: Path) -> None:
    arguments = ["compare", "--grid", "appendix-a", "--length", "160", "--budgets", "0.95", "--samples", "1"]
    arguments += ["--tasks", "needle", "--no-controls", "--backend", "numpy", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (row,) = load_rows(tmp_path / "study.jsonl")
    assert [cell["policy"] for cell in row["cells"]] == list(GRIDS["appendix-a"])
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("width", [200, 80, 40])
def test_no_number_of_a_wide_table_is_cut(width: int) -> None:
    headings = ["policy", *(f"column {at}" for at in range(20))]
    lines = [[name, *(f"0.{at:02}{row}" for at in range(20))] for row, name in enumerate(("snapkv", "crystalcache"))]
    pieces = fitting_tables("Table 13", headings, lines, width)
    stream = StringIO()
    for piece in pieces:
        Console(width=width, file=stream).print(piece)
    assert "…" not in stream.getvalue()
    assert all(len(line) <= width for line in stream.getvalue().splitlines())
    assert {cell for line in lines for cell in line} <= set(stream.getvalue().split())
    assert (len(pieces) == 1) is (width == 200)


def row(index: int, full: float, likelihood: float) -> dict[str, object]:
    cells = [
        {"policy": policy, "budget": budget, "right": right, "kept": 10, "evidence_kept": 0}
        for policy, budget, right in (("fullcache", "1.0", full), ("snapkv", "0.3", likelihood))
    ]
    return {
        "task": "mine", "length": 100, "placement": "after", "context": str(index), "metadata": {},
        "evidence_tokens": 0, "cells": cells,
    }


def test_a_report_states_the_answers_that_it_compares() -> None:
    """Check answers below the smallest accuracy of the full cache: one of four, and none of four."""
    rows = [row(at, float(at == 0), 0.0) for at in range(4)]
    shown = right_answers(Samples(rows))
    assert "Compared with fullcache 1.0: 0.25 [" in shown
    assert '0.00 <span class="unbroken">[' in shown
    assert user_question_rows(rows) == []
