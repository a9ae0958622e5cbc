"""`kvspec study`."""

from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from models_integration.cli.checks import check_counts, check_folder
from models_integration.cli.report import write_page
from models_integration.studies.evidence.rules import PARTS, load_rules
from models_integration.studies.evidence.run import check_windows, items, leases, methods, run_part
from models_integration.studies.report import progress_bar
from models_integration.studies.results import STUDY, load_rows
from models_integration.studies.status import first_failure
from models_integration.studies.subject import Loading
from models_integration.tasks.prose import read_prose
from spec.validate import check_choices

__all__ = ["ALL", "run"]

ALL = "all"
"""Both parts: for a sweep, which claims nothing."""
_STOPPED = 130
"""The exit code of a command that Ctrl-C has ended."""


def run(rules_file: Path, part: str, out: Path, batch_size: int, loading: Loading, again: bool) -> None:
    """Measure a part's samples that are not stored yet; then write the page of all that is. The rules name the model.

    Raises:
        SpecError: before any sample is measured, for what cannot be.
        Exit: with 130, when it is interrupted; what was measured is stored. With 1, where a sample failed.
    """
    console, results = Console(), out / STUDY
    check_choices("part", (part,), (*PARTS, ALL))
    check_counts(batch_size=batch_size)
    rules = load_rules(rules_file)
    check_folder("out", out, STUDY)
    load_rows(results)
    calibration = rules.calibrated(rules_file.parent)
    subject = replace(replace(loading, model=rules.model).subject(), calibration=calibration)
    policies, prose = methods(rules, subject), read_prose(subject.tokenizer)
    check_windows(rules, prose)
    wanted = items(rules, subject, prose, PARTS if part == ALL else (part,))
    every = {item.unit(rules, subject): item for item in wanted}
    stopped = False
    try:
        with leases(results) as own:
            own.plan(every)
            if again:
                own.again(every)
            left = {unit: item for unit, item in every.items() if unit not in own.stored()}
            console.print(
                f"{rules.title}: {part}, model {subject.name}, rules {rules.digest[:8]}; {len(every)} samples,"
                f" {len(every) - len(left)} of them stored in {results}", highlight=False, soft_wrap=True,
            )
            with progress_bar(console, len(left)) as progress:
                run_part(subject, rules, policies, left, own, batch_size, progress)
    except KeyboardInterrupt:
        stopped = True
        console.print("stopped; the same command goes on from here")
    if any(row["rules"] == rules.digest for row in load_rows(results)):
        write_page(out, [rules])
    if own.failed.keys() & every:
        console.print(first_failure(results), highlight=False, soft_wrap=True)
    if stopped or own.failed.keys() & every:
        raise typer.Exit(_STOPPED if stopped else 1)
