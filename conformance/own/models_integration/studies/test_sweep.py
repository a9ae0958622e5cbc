"""The sweep: its grids, its rows, what it stores and what it draws."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the sweep drives transformers models")

from typer.testing import CliRunner

from models_integration.cli.app import app
from models_integration.studies.results import load_rows
from models_integration.studies.subject import Loading, Subject
from models_integration.studies.sweep.plan import BASE, GRIDS, Plan, run_plan
from models_integration.studies.sweep.report import against_base
from spec.errors import SpecError
from spec.parameters import ESSAY, PAPER

pytestmark = pytest.mark.law("figures-are-counted-right")

SMALL = Plan(grid="extensions", budget="0.9", tasks=("needle",), length=200, samples=1)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Loading("pocket", "numpy").subject()


@pytest.mark.law("as-it-is-described")
def test_the_grid_of_appendix_a_holds_its_values_one_at_a_time() -> None:
    """T_max in {16, 24, 32, 48}, s in {2, 5, 10}, alpha in {0.5, 1, 2} and beyond; each differs in one value."""
    grid = GRIDS["appendix-a"]
    swept = {name: {getattr(p, name) for p in grid.values()} for name in ("T_max", "s", "alpha")}
    assert swept["T_max"] == {16, 24, 32, 48}
    assert swept["s"] == {2.0, 5.0, 10.0}
    assert swept["alpha"] > {0.5, 1.0, 2.0}
    for name, p in grid.items():
        changed = [field for field in vars(p) if getattr(p, field) != getattr(PAPER, field)]
        assert len(changed) == int(name != BASE)


@pytest.mark.law("as-it-is-described")
def test_the_other_grid_holds_every_extension() -> None:
    grid = GRIDS["extensions"]
    assert grid["ESSAY"] == ESSAY
    for field in ("allocation", "coverage", "merge", "rarity"):
        assert any(getattr(p, field) != getattr(PAPER, field) for name, p in grid.items() if name != "ESSAY")


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"grid": "b"}, "grid"), ({"tasks": ("hay",)}, "task"), ({"budget": "2.0"}, "budget"),
        ({"samples": 0}, "samples"),
    ],
)
def test_a_plan_of_unknown_parts_is_refused(change: dict[str, object], argument: str) -> None:
    with pytest.raises(SpecError) as caught:
        Plan(**change)  # type: ignore[arg-type]
    assert caught.value.argument == argument


@pytest.mark.law("saved-is-what-was")
def test_a_second_run_reads_what_is_stored(subject: Subject, tmp_path: Path) -> None:
    """Each variant once, on the same budget; nothing kept beyond it but protected trunks; then from the file."""
    told: list[str] = []
    rows = list(run_plan(subject, SMALL, tmp_path / "sweep.jsonl", told.append))
    assert [row["variant"] for row in rows] == list(GRIDS["extensions"])
    assert all(row["most_kept"] <= row["budget"] == 180 for row in rows)
    assert all(row["low"] <= row["accuracy"] <= row["high"] for row in rows)
    again = list(run_plan(subject, SMALL, tmp_path / "sweep.jsonl", told.append))
    assert again == rows
    assert sum("(stored)" in what for what in told) == len(rows) == len(told) / 2


def test_won_and_lost_samples_are_counted_one_by_one() -> None:
    rows = [
        {"variant": BASE, "task": "needle", "outcomes": [1, 0, 1, 0]},
        {"variant": "x", "task": "needle", "outcomes": [0, 1, 1, 1]},
    ]
    assert against_base(rows) == [(0, 0), (2, 1)]


def test_the_command_writes_rows_and_a_page(tmp_path: Path) -> None:
    arguments = ["sweep", "--length", "160", "--budget", "0.95", "--samples", "1", "--tasks", "needle"]
    result = CliRunner().invoke(app, [*arguments, "--backend", "numpy", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "samples.jsonl", "sweep.jsonl"]
    assert [row["variant"] for row in load_rows(tmp_path / "sweep.jsonl")] == list(GRIDS["appendix-a"])


@pytest.mark.law("parts-equal-the-whole")
def test_the_batch_size_changes_no_row(subject: Subject, tmp_path: Path) -> None:
    plan = Plan(grid="extensions", budget="0.8", tasks=("needle",), length=180, samples=4)
    one, four = (
        list(run_plan(subject, plan, tmp_path / str(size) / "sweep.jsonl", lambda what: None, size)) for size in (1, 4)
    )
    assert one == four
