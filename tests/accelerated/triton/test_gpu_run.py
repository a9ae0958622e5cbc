"""Test of `lab.measure.gpu` on a CPU, with tiny sizes."""

# ruff: noqa: E402 - the imports below need what is asked for first

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.accelerated.triton import require_runtime

require_runtime()

from accelerated.triton_gpu.device import INTERPRETED
from conformance.paths import ROOT
from conformance.strategies.prompts import random_prompt
from lab.measure.gpu import __main__ as command
from lab.measure.gpu import generation, measure, speed
from lab.measure.gpu.generation import coattention_complaints
from lab.measure.gpu.measure import Figure, Report
from lab.measure.gpu.models import DRY, FULL
from spec.parameters import TINY
from tests.conformance.float32 import BACKEND as FLOAT32

pytestmark = [
    pytest.mark.judges("triton"),
    pytest.mark.skipif(not INTERPRETED, reason="where there is a GPU, the run itself is the test"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.spec("CC-PREFILL")
def test_the_dry_run_is_done_with_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each part of the dry run completes and is on the page. The part that runs the suite is skipped."""
    monkeypatch.setattr(generation, "conformance", lambda *_: None)
    assert command.main(["--dry-run", "--out", str(tmp_path)]) == 0
    (page,) = tmp_path.glob("*.md")
    record = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert set(record["parts"].values()) == {"done"}
    assert "Dry run" in page.read_text(encoding="utf-8")
    captions = " ".join(figure["what"] for figure in record["figures"])
    assert all(part in captions for part in (
        "exponentials", "generation", "eager torch", "share of S1", "per head, group as rows", "h2o", "spliced",
    ))
    titles = [table["title"] for table in record["tables"]]
    assert titles[0] == "Sessions of 254 tokens beside the CPU's, 4 layers"
    assert titles[-4:] == [
        "Overhead, seconds (the paper's Table 12)", "Decoding behind 96 tokens, batch 1",
        "Other caches, 24 tokens, CrystalCache at 0.25", "Decoding behind 96 tokens, batch 8",
    ]
    assert any("accepts the kept set" in note for note in record["notes"])


@pytest.mark.spec("CC-COATTENTION")
def test_the_box_over_whole_arrays_takes_float32_and_no_other_list() -> None:
    prompt = random_prompt(np.random.default_rng(5), replace(TINY, C=16, tau_cross=0.01), 48)
    inputs = prompt.inputs
    q, k = inputs.q.astype(np.float64), inputs.k.astype(np.float64)
    stages = FLOAT32.require_crystal()
    actual = stages.coattention(inputs.q, inputs.k, inputs.positions, inputs.parameters, inputs.scaling, None)

    def complaints(**changes: object) -> list[str]:
        changed = replace(actual, **changes)  # type: ignore[arg-type]
        return list(coattention_complaints(changed, q, k, inputs.parameters, inputs.scaling, None, "float32"))

    assert (actual.cross >= 0).any()
    assert complaints() == []
    assert complaints(salience=actual.salience * 1.01)
    for name in ("intra", "cross"):
        index, weight = getattr(actual, name), getattr(actual, f"{name}_weight")
        row = int(np.flatnonzero((index >= 0).sum(axis=1) > 1)[-1])
        swapped, gone, elsewhere, heavier = index.copy(), index.copy(), index.copy(), weight.copy()
        swapped[row, :2] = index[row, 1::-1]
        gone[row] = -1
        elsewhere[row, 0] = min(set(range(16)) - set(index[row].tolist()))
        heavier[row, 0] *= 1.01
        assert complaints(**{name: swapped})
        assert complaints(**{name: gone, f"{name}_weight": np.where(gone >= 0, weight, 0.0)})
        assert complaints(**{name: elsewhere})
        assert complaints(**{f"{name}_weight": heavier})


def test_a_part_that_takes_too_long_is_stopped_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endless(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(speed, "ceilings", endless)
    monkeypatch.setitem(command.LIMITS, "ceilings", 1)
    assert command.main(["--dry-run", "--out", str(tmp_path), "--parts", "ceilings"]) == 1
    (page,) = tmp_path.glob("*.md")
    assert "| ceilings | failed: PartTimeout: stopped at its limit of 1 s |" in page.read_text(encoding="utf-8")
    assert "| speed | not run |" in page.read_text(encoding="utf-8")


def test_a_part_whose_packages_are_missing_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lab.measure.gpu.decoding", None)
    assert command.main(["--dry-run", "--out", str(tmp_path), "--parts", "ceilings,ragged"]) == 1
    (page,) = tmp_path.glob("*.md")
    text = page.read_text(encoding="utf-8")
    assert "| ceilings | done |" in text
    assert "| ragged | failed: ModuleNotFoundError: " in text


def test_nothing_is_measured_unless_conformance_is_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.measure.gpu.models.DRY", replace(DRY, tests=(("no_such_file.py",),)))
    assert command.main(["--dry-run", "--out", str(tmp_path), "--parts", "conformance,speed"]) == 1
    (page,) = tmp_path.glob("*.md")
    text = page.read_text(encoding="utf-8")
    assert "| conformance | failed: AssertionError: conformance is not green" in text
    assert "| speed | not run |" in text


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(report: Report, *_: object) -> None:
        report.add("one thing", 1.0, "ms")
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "s1", interrupted)
    assert command.main(["--dry-run", "--out", str(tmp_path), "--parts", "speed"]) == 1
    (page,) = tmp_path.glob("*.md")
    text = page.read_text(encoding="utf-8")
    assert "| one thing | 1 ms |" in text
    assert "| speed | interrupted |" in text


def test_a_dry_run_stays_out_of_the_results() -> None:
    with pytest.raises(SystemExit):
        command.main(["--dry-run"])


def test_figures_say_whether_they_meet_their_goal() -> None:
    assert Figure("S1", 14.0, "ms", 15.0, 10.0).cells() == ("S1", "14 ms", "<= 15 (aim 10)", "met")
    assert Figure("S1", 16.0, "ms", 15.0).cells() == ("S1", "16 ms", "<= 15", "**missed**")
    assert Figure("ratio", 7.0, "times", 8.0, at_least=True).cells() == ("ratio", "7 times", ">= 8", "**missed**")
    assert Figure("memory", None, "GB", 28.0).verdict == "not measured"


def test_each_command_of_the_page_fits_in_ten_minutes_and_together_they_are_the_run() -> None:
    page = (ROOT / "docs" / "results" / "gpu.md").read_text(encoding="utf-8")
    runs = [parts.split(",") for parts in re.findall(r"lab\.measure\.gpu --parts (\S+)", page)]
    assert [part for parts in runs for part in parts] == list(command.LIMITS)
    assert all(sum(command.LIMITS[part] for part in parts) < 600 - 40 for parts in runs)
    assert set(FULL.lengths) == set(speed.GOALS)
    assert set(FULL.profiled) == set(speed.PAPER)
    assert measure.START > 0
