"""Files that the commands on studies write: the report, tables, figures and answers."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from experiments.studies.evidence.page import study_sections
from experiments.studies.evidence.rules import Rules, load_rules
from experiments.studies.evidence.run import ONE_STUDY, merged
from experiments.studies.evidence.samples import recoveries
from experiments.studies.evidence.tables import failures, grouped
from experiments.studies.own_texts import answer_table, user_question_rows
from experiments.studies.page import Html, page
from experiments.studies.report import TABLES, say, summary, write_table
from experiments.studies.results import STUDY, Row, load_study
from experiments.studies.workers import failed_samples
from models_integration.cache.atomic_file import publish_readable
from spec.errors import SpecError
from spec.files import check_output, check_results
from spec.tables import csv_text

__all__ = ["PAGE", "check_outputs", "write_outputs", "write_page", "write_report"]

PAGE = "report.html"
FIGURES = (".svg", ".pdf", ".png")
"""Suffixes that the file of a figure can have."""
ANSWERS = (".csv",)
"""Suffixes that the file of answers can have."""


def write_report(
    folder: Path, rules: list[Path], out: Path | None, table: Path | None, figure: Path | None, force: bool = False,
) -> None:
    """Write the report, the table and the figure of the results in a folder.

    Raises:
        SpecError: if the folder has no results, if no result was measured with a given rules file, or if a file cannot
            be read or written.
    """
    reads = (folder / STUDY, *rules)
    if out is None:
        check_results("out", folder, (PAGE,), STUDY, force)
    else:
        check_output("out", out, reads, force)
    check_outputs({"table": table, "figure": figure}, reads, force)
    write_page(folder, [load_rules(path) for path in rules], out)
    write_outputs(merged(load_study(folder / STUDY)), table, figure)


def check_outputs(outputs: Mapping[str, Path | None], reads: Sequence[Path], force: bool) -> None:
    """Check that the files (by option) have a suffix of their option and can be written, as in `check_output`.

    Raises:
        SpecError: if a suffix is unknown, if a file cannot be written, if two options have the same file, or if a
            figure needs matplotlib.
    """
    forms = {"table": TABLES, "figure": FIGURES, "answers": ANSWERS}
    options = dict[Path, str]()
    for option, path in outputs.items():
        if path is not None:
            if path.suffix not in forms[option]:
                raise SpecError(option, str(path), f"must end in {' or '.join(forms[option])}")
            check_output(option, path, reads, force)
            if (other := options.setdefault(path.resolve(), option)) != option:
                raise SpecError(option, str(path), f"is also the file of --{other}; choose a different file")
    if outputs.get("figure") is not None and find_spec("matplotlib") is None:
        raise SpecError("figure", str(outputs["figure"]), "needs matplotlib: pip install 'kvspec[plots]'")


def write_outputs(
    rows: Sequence[Row], table: Path | None, figure: Path | None, answers: Path | None = None,
) -> None:
    """Write the table and the figure of rows, and the answers to your own questions. Skip a path that is None.

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
        counted = summary(rows)
        write_table(counted, recoveries(rows, counted), table)
        say(str(table))
    if figure is not None:
        from experiments.studies.page.figures import write_figure

        write_figure(rows, figure)
        say(str(figure))
    if answers is not None:
        publish_readable(answers, csv_text(answer_table(user_question_rows(rows))).encode())
        say(str(answers))


def write_page(folder: Path, rules: list[Rules], out: Path | None = None) -> None:
    """Write the report of all results in a folder, and print the path. Default path: report.html in the folder."""
    path, sections = out or folder / PAGE, list(filter(None, _sections(folder, {one.digest: one for one in rules})))
    if not sections:
        reason = f"must contain results in {STUDY}; give the --out folder of kvspec compare or study"
        raise SpecError("FOLDER", str(folder), reason)
    publish_readable(path, page(f"kvspec: {folder.resolve().name}", sections).encode())
    say(str(path))


def _sections(folder: Path, rules: dict[str, Rules]) -> Iterator[Html]:
    study = load_study(folder / STUDY)
    if unused := [digest for digest in rules if digest not in {row["rules"] for row in study}]:
        raise SpecError("rules", unused[0][:8], f"no result in {folder / STUDY} was measured with this rules file")
    for about, rows in grouped(study, ONE_STUDY):
        yield from study_sections(rows, rules.get(about["rules"]))
    yield failures(failed_samples(folder / STUDY))
