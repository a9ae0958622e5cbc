"""A study whose policies go by statistics says over which contexts these were taken."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the study drives transformers models")

from typer.testing import CliRunner

from conformance.own.models_integration.studies.test_study import RULES, rules_file, study
from models_integration.cli.app import app
from models_integration.studies.evidence.rules import PARTS
from models_integration.studies.results import load_rows
from models_integration.tasks.samples import part_of
from reference.calibration import load_calibration, save_calibration

pytestmark = pytest.mark.law("figures-are-counted-right")


def test_a_calibration_says_over_which_contexts_it_was_taken(tmp_path: Path, one_thread: None) -> None:
    """Made of the rules it lists a dev context; a list with a confirming one is refused; without a list, it is said."""
    text = RULES[RULES.index("[study]") :].replace('["streamingllm"]', '["triattention@prompt"]')
    rules, file = rules_file(tmp_path, text.replace("contexts = 4", "contexts = 12")), tmp_path / "mine.npz"
    made = CliRunner().invoke(app, ["calibrate", str(rules), "--out", str(file), "--tokens", "90"])
    assert made.exit_code == 0, made.output
    calibration = load_calibration(file)
    assert calibration.samples is not None
    assert [part_of(context) for context in calibration.samples] == ["dev"]
    text = text.replace("[1024]", "[300]").replace(', "prose_continuation"', "").replace(', "in_prompt"', "")
    rules_file(tmp_path, text.replace("contexts = 4", "contexts = 1") + 'calibration = "mine.npz"')
    for part, (samples, controlled) in product(PARTS, ((calibration.samples, True), (None, False))):
        save_calibration(replace(calibration, samples=samples), file)
        folder = tmp_path / str(controlled)
        found = CliRunner().invoke(app, ["study", "--rules", str(rules), "--out", str(folder), "--part", part])
        assert found.exit_code == 0, found.output
        pages = [path.read_text(encoding="utf-8") for path in folder.glob("*.md")]
        assert all(("Uncontrolled" in page) is not controlled for page in pages)
        for row in load_rows(folder / "study.jsonl"):
            assert row["calibration"] == {"digest": calibration.digest, "controlled": controlled}
    confirms = next(f"{digit}" * 64 for digit in "0123456789abcdef" if part_of(f"{digit}" * 64) == "confirm")
    save_calibration(replace(calibration, samples=(*calibration.samples, confirms)), file)
    assert confirms in str(study(tmp_path, "dev").exception)
