"""`kvspec report`, and the page at the end of every study, comparison and sweep."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import check_file
from models_integration.studies.answers import SAMPLES
from models_integration.studies.compare.report import comparison_sections
from models_integration.studies.evidence.page import study_sections
from models_integration.studies.evidence.rules import Rules, load_rules
from models_integration.studies.evidence.run import ONE_STUDY
from models_integration.studies.page.elements import Html, page
from models_integration.studies.page.shares import failures, grouped
from models_integration.studies.results import COMPARISON, STUDY, SWEEP, load_rows
from models_integration.studies.status import failed_samples
from models_integration.studies.sweep.report import sweep_sections
from spec.errors import SpecError

__all__ = ["PAGE", "run", "write_page"]

PAGE = "report.html"


def run(folder: Path, rules: list[Path], out: Path | None) -> None:
    """Write the page of a folder.

    Raises:
        SpecError: where there is nothing to show, for rules that no row was run under, and for a file that cannot be
            read or written.
    """
    if out is not None:
        check_file("out", out)
    write_page(folder, [load_rules(path) for path in rules], out)


def write_page(folder: Path, rules: list[Rules], out: Path | None = None) -> None:
    """Write the page of all results in a folder, by default beside them, and say where."""
    path, sections = out or folder / PAGE, list(filter(None, _sections(folder, {one.digest: one for one in rules})))
    if not sections:
        raise SpecError("FOLDER", str(folder), f"must hold rows in {STUDY}, {COMPARISON} or {SWEEP}")
    publish_readable(path, page(f"kvspec: {folder.resolve().name}", sections).encode())
    Console().print(str(path), highlight=False, soft_wrap=True)


def _sections(folder: Path, rules: dict[str, Rules]) -> Iterator[Html]:
    study, comparison, sweep = (load_rows(folder / name) for name in (STUDY, COMPARISON, SWEEP))
    if unused := [digest for digest in rules if digest not in {row["rules"] for row in study}]:
        raise SpecError("rules", unused[0][:8], f"no row of {folder / STUDY} was run under rules with this digest")
    for about, rows in grouped(study, ONE_STUDY):
        yield from study_sections(rows, rules.get(about["rules"]))
    yield failures([row for name in (STUDY, SAMPLES) for row in failed_samples(folder / name)])
    yield from comparison_sections(comparison, load_rows(folder / SAMPLES))
    yield from sweep_sections(sweep)
