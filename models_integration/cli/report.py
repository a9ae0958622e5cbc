"""`kvspec report`, and what every run ends with: its page, and the table and figure that were asked for."""

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
"""How the name of a figure's file ends."""


def run(folder: Path, rules: list[Path], out: Path | None, table: Path | None, figure: Path | None) -> None:
    """Write the page of a folder.

    Raises:
        SpecError: where there is nothing to show, for rules that no row was run under, and for a file that cannot be
            read or written.
    """
    if out is not None:
        check_file("out", out)
    check_outputs(table, figure)
    write_page(folder, [load_rules(path) for path in rules], out)
    write_outputs(merged(load_rows(folder / STUDY)), table, figure)


def check_outputs(table: Path | None, figure: Path | None) -> None:
    """The files can be written, and say by their names in which form.

    Raises:
        SpecError: otherwise, or where a figure's library is not installed.
    """
    for option, path, forms in (("table", table, TABLES), ("figure", figure, FIGURES)):
        if path is not None:
            if path.suffix not in forms:
                raise SpecError(option, str(path), f"must end in {' or '.join(forms)}")
            check_file(option, path)
    if figure is not None and find_spec("matplotlib") is None:
        raise SpecError("figure", str(figure), "needs matplotlib: pip install 'kvspec[plots]'")


def write_outputs(rows: Sequence[Row], table: Path | None, figure: Path | None) -> None:
    """Write the table and the figure of rows, where they are asked for, and print where.

    Raises:
        SpecError: for rows of several runs, which would be counted together.
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
    """Write the page of all results in a folder, by default beside them, and say where."""
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
