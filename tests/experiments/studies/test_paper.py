"""`kvspec paper`: tables that its files can fill, numbers counted from the rows, resumed runs, and errors."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("transformers", reason="papers are run on transformers models")

from typer.testing import CliRunner

from experiments.studies import page as elements
from experiments.studies.answers import read_budget
from experiments.studies.evidence.rules import rules_of
from experiments.studies.papers import BEST, PAPERS, load_paper, rules_of_part
from experiments.studies.papers.tables import Measured, fill
from experiments.studies.subject import Loading
from experiments.tasks.loaders import INFINITEBENCH, LONGBENCH, LOOGLE
from kvspec.cli.app import app
from models_integration.policies.methods import parse_policy
from spec.errors import SpecError

pytestmark = pytest.mark.law("figures-are-counted-right")

TINY = """
title = "Tiny"
method = "crystalcache"
[study]
seeds = [1]
questions = 1
placements = ["paper"]
policies = ["streamingllm", "snapkv", "crystalcache"]
controls = ["fullcache"]
budgets = ["0.9", "evict 0.2"]
contexts = 3
[[part]]
name = "needle"
tasks = ["needle"]
lengths = [400, 200000]
quick = {lengths = [200, 200000], contexts = 2}
[[part]]
name = "files"
kind = "longbench-file"
files = ["hotpotqa"]
lengths = [200]
[[part]]
name = "costs"
kind = "costs"
tasks = ["needle"]
budgets = ["0.5"]
lengths = [400, 200000]
quick = {lengths = [300]}
[[table]]
name = "latency"
title = "Table 5"
parts = ["costs"]
rows = ["length"]
columns = ["time"]
measure = "seconds"
[[table]]
name = "memory"
title = "Table 6"
parts = ["costs"]
rows = ["length"]
columns = ["memory"]
measure = "memory"
[[table]]
name = "one"
title = "Table 1"
parts = ["needle"]
versus = ["best baseline", "fullcache"]
published = {columns = [["Llama", "0.9"]], crystalcache = [0.75], snapkv = [nan]}
[[table]]
name = "by-length"
title = "Table 2"
parts = ["needle"]
rows = ["model"]
columns = ["length", "depth"]
policies = ["crystalcache"]
budgets = ["0.9"]
[[table]]
name = "times"
title = "Table 3"
parts = ["needle"]
rows = ["length"]
columns = ["time"]
policies = ["snapkv"]
measure = "seconds"
[[table]]
name = "bytes"
title = "Table 4"
parts = ["needle"]
measure = "MiB"
[[table]]
name = "files"
title = "Table 5"
parts = ["files"]
[[table]]
name = "none"
title = "Table 6"
note = "Not run: nobody can."
"""


def called(folder: Path, *options: str, text: str = TINY) -> tuple[int, str]:
    (folder / "tiny.toml").write_text(text, encoding="utf-8")
    arguments = ["paper", str(folder / "tiny.toml"), "--backend", "numpy", "--out", str(folder / "out"), *options]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    if isinstance(done.exception, SpecError):
        raise done.exception
    return done.exit_code, done.output


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "study.jsonl").read_text("utf-8").splitlines()]


def untimed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return sorted(({**row, "seconds": None} for row in rows), key=lambda row: str((row["length"], row["index"])))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("paper")
    code, output = called(folder, "--quick")
    assert code == 0, output
    return folder, output


def test_a_table_has_the_figures_of_its_rows_and_the_published_ones(ran: tuple[Path, str]) -> None:
    rows, tables = rows_in(ran[0]), pd.read_csv(ran[0] / "out" / "tables.csv").set_index(["table", "row", "column"])
    right = {
        (cell["policy"], cell["budget"], row["index"]): str(row["metadata"]["value"]) in cell["answer"]
        for row in rows for cell in row["cells"]
    }
    assert len(rows) == 2

    def mean(policy: str, budget: str) -> float:
        return fmean(right[policy, budget, index] for index in range(2))

    for budget in ("0.9", "evict 0.2"):
        column = f"pocket {budget}"
        full, method = tables.loc["one", "fullcache", column], tables.loc["one", "crystalcache", column]
        assert (full.value, method.value, method.n) == (
            mean("fullcache", "1.0"), mean("crystalcache", budget), 2
        )
        best = max(mean("streamingllm", budget), mean("snapkv", budget))
        assert method[f"over {BEST}"] == method.value - best
        assert method["over fullcache"] == method.value - full.value
        assert pd.isna(tables.loc["one", "snapkv", column][f"over {BEST}"])
    assert tables.loc["one", "crystalcache", "Llama (published) 0.9"].published == 0.75
    for row in rows:
        one = tables.loc["by-length", "pocket", f"200 {row['metadata']['depth']}"]
        assert (one.value, one.n) == (right["crystalcache", "0.9", row["index"]], 1)
    assert tables.loc["times", "200", "snapkv"].value == fmean(row["seconds"]["snapkv"] for row in rows)
    kept = [cell["mean_bytes"] / 2**20 for row in rows for cell in row["cells"] if cell["policy"] == "fullcache"]
    assert tables.loc["bytes", "fullcache", "pocket 0.9"].value == fmean(kept)


def test_stages_have_seconds_and_caches_have_bytes(ran: tuple[Path, str]) -> None:
    """Check that weights are counted once, that the peak exceeds the memory during decoding, and that S1 takes time."""
    tables = pd.read_csv(ran[0] / "out" / "tables.csv").groupby("table")
    seconds, memory = (tables.get_group(name).set_index("column").value for name in ("latency", "memory"))
    assert [name[:2] for name in seconds.index if name[0] == "S"] == ["S1", "S2", "S3", "S4", "S5", "S6"]
    assert 0 < seconds["S1 coattention"] < seconds["forward, crystalcache"]
    model = Loading("pocket").subject().model
    assert memory["weights"] == sum(one.nbytes for one in model.parameters()) / 2**20
    config = model.config
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    slot = elements * model.dtype.itemsize / 2**20
    for name, tokens in (("full cache", 300), ("crystalcache", 150)):
        assert memory[f"cache, {name}"] >= slot * tokens
        assert memory["weights"] < memory[f"decode, {name}"] < memory[f"peak, {name}"]
    assert memory["cache, crystalcache"] < 0.6 * memory["cache, full cache"]


@pytest.mark.law("as-it-is-described")
def test_what_was_not_run_says_so(ran: tuple[Path, str]) -> None:
    folder, output = ran
    page = (folder / "out" / "paper.html").read_text("utf-8")
    for sentence in (
        "Not run: give --file for hotpotqa (longbench-file).", "Not run: nobody can.",
        "Not run on pocket: 200000 tokens, more than the positions of the model.",
    ):
        assert sentence in " ".join(output.split())
        assert sentence in page
    assert "not run" in (folder / "out" / "by-length.tex").read_text("utf-8")


@pytest.mark.law("as-it-is-described")
def test_long_names_and_intervals_leave_room_for_a_table() -> None:
    """Check that the name of a policy can break at its parts, and that an interval breaks only on paper."""
    created = elements.table("t", ["policy", "mean"], [['a_b(c="d")', "0.40 [0.17, 0.69]"]])
    assert '<th scope="row">a_<wbr>b(<wbr>c=<wbr>&quot;d&quot;)</th>' in created
    assert '<td class="figure">0.40 <span class="unbroken">[0.17, 0.69]</span></td>' in created
    on_screen, _, on_paper = elements.style("report").partition("@media print")
    assert ".unbroken { white-space: nowrap; }" in on_screen
    assert ".unbroken { white-space: normal; }" in on_paper


@pytest.mark.law("saved-is-what-was")
def test_a_run_that_was_cut_gives_the_same_rows(ran: tuple[Path, str], tmp_path: Path) -> None:
    first, path = rows_in(ran[0]), tmp_path / "out" / "study.jsonl"
    path.parent.mkdir()
    path.write_text((ran[0] / "out" / "study.jsonl").read_text("utf-8")[:-40], encoding="utf-8")
    assert called(tmp_path, "--quick", "--part", "one")[0] == 0
    assert untimed(rows_in(tmp_path)) == untimed(first)
    before = path.read_bytes()
    assert called(tmp_path, "--quick", "--part", "by-length")[0] == 0
    assert path.read_bytes() == before
    costs = path.with_name("costs.jsonl")
    costs.write_bytes(before := (ran[0] / "out" / "costs.jsonl").read_bytes())
    assert called(tmp_path, "--quick", "--part", "memory")[0] == 0
    assert costs.read_bytes() == before


@pytest.mark.law("as-it-is-described")
def test_a_dry_run_says_what_there_is_to_do_and_stores_nothing(tmp_path: Path) -> None:
    code, output = called(tmp_path, "--quick", "--dry-run")
    assert code == 0
    # There are two samples, each with the full cache and three policies at two budgets. Answers have at most 50 tokens.
    (line,) = (line.split() for line in output.splitlines() if line.strip().startswith("needle"))
    assert line[1:3] == ["2", "14"]
    assert line[4] == "700"
    assert "memory: weights" in output.partition("part 1 of ")[2]
    assert "hours" in output
    assert not (tmp_path / "out").exists()


PROBLEMS = """
title = "Problems"
method = "streamingllm"
[study]
contexts = 3
questions = 1
seeds = [0]
placements = ["paper"]
policies = ["streamingllm"]
controls = ["fullcache"]
budgets = ["64"]
answer_tokens = 1
lengths = [300]
[[part]]
name = "problems"
kind = "math-dev-file"
files = ["math500"]
filed = {contexts = 9}
tasks = ["arithmetic"]
[[part]]
name = "long"
tasks = ["needle"]
lengths = [200000]
"""


@pytest.mark.law("as-it-is-described")
def test_a_part_reads_all_rows_of_a_file_or_has_tasks_without_it(tmp_path: Path) -> None:
    """Check four problems. The MD5 of the id assigns one of them to the dev split."""
    rows = [{"problem": "What is 1 + 1?", "answer": "2", "unique_id": f"test/algebra/{at}.json"} for at in range(4)]
    (file := tmp_path / "math500.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dev = [row for row in rows if int(hashlib.md5(row["unique_id"].encode()).hexdigest(), 16) % 5 < 2]
    for options, samples in (((), 3), (("--file", str(file)), len(dev))):
        code, output = called(tmp_path, "--dry-run", *options, text=PROBLEMS)
        assert code == 0, output
        (line,) = (line.split() for line in output.splitlines() if line.strip().startswith("problems"))
        assert line[1] == str(samples)
        assert "Not run on pocket: 200000 tokens" in output


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("quick", [True, False])
def test_shipped_papers_name_what_there_is(name: str, quick: bool) -> None:
    paper = load_paper(name)
    asked = dict[str, set[str]]()
    for part in paper.parts:
        assert {file.removesuffix("_e") for file in part.files} <= {*LONGBENCH, *LOOGLE, *INFINITEBENCH, "math500"}
        rules = rules_of_part(paper, part, ["pocket"], (), quick)
        known = paper.study if rules is None else vars(rules)
        asked[part.name] = {"fullcache", *known["policies"]}
    for table in paper.tables:
        policies = set().union(*(asked[part] for part in table.parts)) or {"fullcache"}
        assert set(table.policies) <= policies
        assert {one for one in table.versus if one != BEST} <= policies
        for row in (row for row in table.published if table.rows == ("policy",) and row != "columns"):
            assert row in policies or parse_policy(row)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        (("--part", "two"), ("", ""), "part = 'two': must be one of latency, memory, one, by-length"),
        (("--file", "musique.jsonl"), ("", ""), "musique.jsonl': is not a file of this evaluation; use hotpotqa"),
        ((), ('rows = ["model"]', 'rows = ["mode"]'), "table by-length: axes = 'mode': must be one of model, policy"),
        ((), ("crystalcache = [0.75]", "crystalcache = []"), "must have a figure for each published column"),
        ((), ('name = "none"', 'name = "../../x"'), "table: name = '../../x': must have only letters, digits"),
        ((), ('name = "none"', "name = 5"), "name = 5: must be text in quotes"),
        ((), ('parts = ["files"]', 'parts = ["file"]'), "table files: parts = 'file': must be one of needle, files"),
        ((), ('title = "Tiny"', ""), "missing: title; the keys are title, method"),
        ((), ("contexts = 3", "context = 3"), "unknown: context; did you mean contexts?; the keys"),
        ((), ("evict 0.2", "evict 1.2"), "r must lie in [0, 1), such as 'evict 0.75'"),
        ((), ("[study]", "study"), "must be a TOML file"),
    ],
)
def test_what_is_wrong_is_refused(
    options: tuple[str, ...], change: tuple[str, str], reason: str, tmp_path: Path,
) -> None:
    with pytest.raises(SpecError) as error:
        called(tmp_path, "--quick", *options, text=TINY.replace(*change) if change[0] else TINY)
    assert reason in str(error.value)
    assert not (tmp_path / "out" / "study.jsonl").exists()


@pytest.mark.law("refused-before-anything-changes")
def test_an_unknown_paper_is_refused_with_the_names() -> None:
    with pytest.raises(SpecError, match=f"must be one of {', '.join(PAPERS)}"):
        load_paper("crystal")


def counted(right: Mapping[tuple[str, str, str], Sequence[int]]) -> tuple[Any, ...]:
    """Return tables of the paper on diversity from right and wrong answers, by model, budget and policy."""
    paper = load_paper("diversity")
    measured = dict[str, list[Measured]]({"table-2": [], "table-3": [], "extraction": []})
    for table in (one for one in paper.tables if one.name in measured):
        (part,) = (part for part in paper.parts if part.name in table.parts)
        for model in dict.fromkeys(model for model, _, _ in right):
            rules = rules_of_part(paper, part, [model], (), True)
            assert rules is not None
            cells = {(budget, policy): each for (name, budget, policy), each in right.items() if name == model}
            rows = [
                {
                    "task": "arithmetic", "length": 256, "metadata": {}, "metric": "boxed number", "cells": [
                        {"policy": policy, "budget": budget, "right": each[at], "answer": r"\boxed{1}" * each[at]}
                        for (budget, policy), each in cells.items()
                    ],
                } for at in range(40)
            ]
            measured[table.name].append(Measured(rules, model, rows))
    return tuple(fill(one, paper, measured[one.name]) for one in paper.tables if one.name in measured)


def test_the_registered_rules_decide_about_what_was_counted() -> None:
    """Check two models with 40 answers at each budget.

    Lambda 0.5 and 1.5 gain ten answers, so the smaller is chosen.
    """
    better, equal = [1] * 20 + [0] * 20, [1] * 10 + [0] * 30
    chosen = {0.5: better, 1.0: equal, 1.5: better}
    right = {
        (model, budget, policy): each for model in ("first", "second") for budget in ("64", "128") for policy, each in (
            ("triattention", equal), *((f"diverse-triattention(diversity={one})", lam) for one, lam in chosen.items()),
        )
    }
    probe = counted(right)[0]
    assert "chooses lambda 0.5; mean differences 0.5: +0.2500, 1: +0.0000, 1.5: +0.2500." in probe.note
    alone = {key: each for key, each in right.items() if key[2][-4:] not in ("1.0)", "1.5)")}
    _, confirmed, boxes = counted(alone)
    assert "gives Branch A; first 64: p 0.0002 (passes Bonferroni), " in confirmed.note
    for changed, note in (
        ({key: equal if key[0] == "first" else each for key, each in alone.items()}, "gives Branch C"),
        ({key: equal if key[0] == "second" else each for key, each in alone.items()}, "gives Branch B"),
        ({key: each for key, each in alone.items() if key[0] == "first"}, "needs two models and has 1"),
    ):
        assert note in counted(changed)[1].note
    assert boxes.ours[("first", "64"), ("triattention",)].value.value == 0.75


def test_a_share_that_is_evicted_is_rounded_down_in_what_is_kept() -> None:
    assert [read_budget(text).tokens(10) for text in ("evict 0.75", "0.25", "evict 0.8", "0.2", "5")] == [2, 3, 2, 2, 5]
    with pytest.raises(SpecError, match=r"budgets = 'evict 1': r must lie"):
        rules_of(title="t", model="pocket", contexts=1, questions=1, seed=0, lengths=[9], placements=["after"],
                 tasks=["needle"], policies=["snapkv"], budgets=["evict 1"])
