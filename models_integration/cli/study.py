"""`kvspec study`."""

from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from models_integration.cli.checks import check_counts, check_folder
from models_integration.cli.report import STUDY, write_page
from models_integration.studies.evidence.rules import PARTS, load_rules
from models_integration.studies.evidence.run import check_windows, items, leases, methods, run_part
from models_integration.studies.report import progress_bar
from models_integration.studies.results import load_rows
from models_integration.studies.subject import Loading
from models_integration.studies.workers import beside
from models_integration.tasks.prose import read_prose
from spec.validate import check_choices

__all__ = ["run"]

_STOPPED = 130
"""The exit code of a command that Ctrl-C has ended."""


def run(rules_file: Path, part: str, out: Path, batch_size: int, loading: Loading, workers: int) -> None:
    """Measure a part's samples that are not stored yet; then write the page of all that is. The rules name the model.

    Raises:
        SpecError: before any sample is measured, for what cannot be.
        Exit: with 130, when it is interrupted; what was measured is stored.
    """
    console, results = Console(), out / STUDY
    check_choices("part", (part,), PARTS)
    check_counts(batch_size=batch_size, workers=workers)
    rules = load_rules(rules_file)
    check_folder("out", out, STUDY)
    load_rows(results)
    calibration = rules.calibrated(rules_file.parent)
    subject = replace(replace(loading, model=rules.model).subject(), calibration=calibration)
    policies, prose = methods(rules, subject), read_prose(subject.tokenizer)
    check_windows(rules, prose)
    every = {item.unit(rules, subject.name): item for item in items(rules, subject, prose, part)}
    stopped = False
    try:
        with leases(results) as own:
            left = {unit: item for unit, item in every.items() if unit not in own.stored()}
            console.print(
                f"{rules.title}: {part}, model {subject.name}, rules {rules.digest[:8]}; {len(every)} samples,"
                f" {len(every) - len(left)} of them stored in {results}", highlight=False, soft_wrap=True,
            )
            with beside(workers, out, console), progress_bar(console, len(left)) as progress:
                run_part(subject, rules, policies, part, left, own, batch_size, progress)
    except KeyboardInterrupt:
        stopped = True
        console.print("stopped; the same command goes on from here")
    if any(row["rules"] == rules.digest for row in load_rows(results)):
        write_page(out, [rules])
    if stopped:
        raise typer.Exit(_STOPPED)
