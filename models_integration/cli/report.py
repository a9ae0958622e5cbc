"""Implementation of `kvspec report`, and functions that write the report, table and figure at the end of each run."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import check_file
from models_integration.studies.evidence.page import study_sections
from models_integration.studies.evidence.rules import Rules, load_rules
from models_integration.studies.evidence.run import ONE_STUDY, merged
from models_integration.studies.evidence.summary import TABLES, summary, write_table
from models_integration.studies.evidence.tables import failures, grouped
from models_integration.studies.page.elements import Html, page
from models_integration.studies.results import STUDY, Row, load_rows
from models_integration.studies.status import failed_samples
from spec.errors import SpecError

__all__ = ["PAGE", "check_outputs", "run", "write_outputs", "write_page"]

PAGE = "report.html"
FIGURES = (".svg", ".pdf", ".png")
"""Suffixes that the file of a figure can have."""


def run(folder: Path, rules: list[Path], out: Path | None, table: Path | None, figure: Path | None) -> None:
    """Write the report, the table and the figure of the results in a folder.

    Raises:
        SpecError: if the folder has no results, if no result was measured with a given rules file, or if a file cannot
            be read or written.
    """
    if out is not None:
        check_file("out", out)
    check_outputs(table, figure)
    write_page(folder, [load_rules(path) for path in rules], out)
    write_outputs(merged(load_rows(folder / STUDY)), table, figure)


def check_outputs(table: Path | None, figure: Path | None) -> None:
    """Check that the files of the table and the figure have a known suffix and can be written.

    Raises:
        SpecError: if a suffix is unknown, if a file cannot be written, or if a figure needs matplotlib.
    """
    for option, path, forms in (("table", table, TABLES), ("figure", figure, FIGURES)):
        if path is not None:
            if path.suffix not in forms:
                raise SpecError(option, str(path), f"must end in {' or '.join(forms)}")
            check_file(option, path)
    if figure is not None and find_spec("matplotlib") is None:
        raise SpecError("figure", str(figure), "needs matplotlib: pip install 'kvspec[plots]'")


def write_outputs(rows: Sequence[Row], table: Path | None, figure: Path | None) -> None:
    """Write the table and the figure of rows to the given paths, and print the paths. Skip a path that is None.

    Raises:
        SpecError: if the rows belong to different runs, because rows of different runs must not be averaged.
    """
    models = {row["model"] for row in rows}
    kinds = {name: {(row["model"], repr(row.get(name))) for row in rows} for name in ONE_STUDY}
    mixed = [name for name, kind in kinds.items() if len(kind) > len(models)]
    if mixed and (table or figure):
        reason = f"contains results with different {', '.join(mixed)}: write each run to a separate folder"
        raise SpecError("FOLDER", f"{len(rows)} rows", reason)
    if table is not None:
        write_table(summary(rows), table)
        _print_path(table)
    if figure is not None:
        from models_integration.studies.page.figures import write_figure

        write_figure(rows, figure)
        _print_path(figure)


def _print_path(path: Path) -> None:
    Console().print(str(path), highlight=False, soft_wrap=True)


def write_page(folder: Path, rules: list[Rules], out: Path | None = None) -> None:
    """Write the report of all results in a folder, and print the path. Default path: report.html in the folder."""
    path, sections = out or folder / PAGE, list(filter(None, _sections(folder, {one.digest: one for one in rules})))
    if not sections:
        raise SpecError("FOLDER", str(folder), f"must contain results in {STUDY}")
    publish_readable(path, page(f"kvspec: {folder.resolve().name}", sections).encode())
    _print_path(path)


def _sections(folder: Path, rules: dict[str, Rules]) -> Iterator[Html]:
    study = load_rows(folder / STUDY)
    if unused := [digest for digest in rules if digest not in {row["rules"] for row in study}]:
        raise SpecError("rules", unused[0][:8], f"no result in {folder / STUDY} was measured with this rules file")
    for about, rows in grouped(study, ONE_STUDY):
        yield from study_sections(rows, rules.get(about["rules"]))
    yield failures(failed_samples(folder / STUDY))
