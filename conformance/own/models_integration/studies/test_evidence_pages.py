"""The pages about real weights say what their rows say: tables by the command, right answers by plain counting too."""

import json
import lzma
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the study drives transformers models")

from conformance.measure import evidence_pages
from models_integration.studies.evidence.rules import load_rules
from models_integration.studies.evidence.run import merged, study_unit
from models_integration.studies.evidence.summary import summary
from spec.tables import result_table

pytestmark = pytest.mark.law("figures-are-counted-right")


def right(study: str, placement: str, policy: str, budget: str) -> int:
    """Right answers about facts, counted in the file."""
    with lzma.open(evidence_pages.HOME / f"{study}.jsonl.xz") as file:
        rows = [json.loads(line) for line in file]
    return sum(
        bool(cell["right"]) for row in rows
        if (row["part"], row["placement"]) == ("confirm", placement) and row["task"] in evidence_pages.FACTS
        for cell in row["cells"] if (cell["policy"], cell["budget"]) == (policy, budget)
    )


def test_every_table_is_that_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(evidence_pages.stale()) == []
    page = tmp_path / "README.md"
    readme = evidence_pages.PAGES[0].read_text(encoding="utf-8")
    page.write_text(readme.replace("| CrystalCache | 26: ", "| CrystalCache | 27: "), encoding="utf-8")
    monkeypatch.setattr(evidence_pages, "ROOT", tmp_path)
    assert "README.md: table few" in evidence_pages.stale([page])


@pytest.mark.parametrize("policy", ["nestedkv", "crystalcache", "crystalcache(observed_layer=-1)", "random"])
def test_right_answers_of_the_readme_are_those_of_the_file(policy: str) -> None:
    readme = evidence_pages.PAGES[0].read_text(encoding="utf-8")
    line = next(line for line in readme.splitlines() if line.startswith(f"| {evidence_pages.NAMES[policy]} | "))
    after, in_prompt = line.split(" | ")[1:]
    counted = [right("rules", placement, policy, "0.3") for placement in ("after", "in_prompt")]
    assert [int(cell.split(":")[0]) for cell in (after, in_prompt)] == counted


@pytest.mark.parametrize("study", ["blocks", "h2o", "heads"])
def test_committed_rows_are_rows_of_the_engine(study: str) -> None:
    """Each is a sample of its own, with the cells of its rules, and counts as any other does."""
    rules = load_rules(evidence_pages.HOME / f"{study}.toml")
    with lzma.open(evidence_pages.HOME / f"{study}.jsonl.xz") as file:
        rows = [json.loads(line) for line in file]
    assert {row["rules"] for row in rows} == {rules.digest}
    assert len({study_unit(row) for row in rows}) == len(merged(rows)) == len(rows)
    counted = result_table(summary(rows))
    names = {*rules.policies, "fullcache", "random", "evidence"}
    assert set(counted["policy"]) == names
    assert counted[counted["policy"] == "fullcache"]["n"].sum() == len(rows)


def test_figures_in_sentences_are_those_of_the_rows() -> None:
    erratum = evidence_pages.PAGES[2].read_text(encoding="utf-8")
    paper, drawn = (right("rules", "after", name, "0.3") for name in ("crystalcache", "random"))
    assert f"CrystalCache answers {paper} and the random set {drawn} " in erratum
    nested, other = (right("rules", "after", f, "0.2") for f in ("nestedkv", "crystalcache(observed_layer=-1)"))
    assert f"{nested} and {other} of 243" in erratum
    heads, nested = (right("advice", "after", name, "0.3") for name in ("kvzip-heads", "nestedkv"))
    assert f"{heads} and {nested} of 82 answers" in erratum
