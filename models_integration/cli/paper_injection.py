"""The run of `kvspec paper injection`: questions in sessions of archived chunks, one stored row for each answer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import pandas as pd
import typer
from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import check_folder
from models_integration.cli.study import STOPPED
from models_integration.studies.page.elements import Html, note, page, section, table
from models_integration.studies.papers.injection import Scene, Session, draw_talk, template_of
from models_integration.studies.papers.injection_tables import (
    HEADINGS,
    NOT_RUN,
    InjectionTable,
    filled_lines,
    interaction,
    tables_of,
)
from models_integration.studies.report import progress_bar, table_of
from models_integration.studies.results import Row, append_row, load_rows
from models_integration.studies.subject import Loading, Subject
from spec import SPEC_VERSION
from spec.validate import check_choices

__all__ = ["ROWS", "run_injection"]

ROWS, PAGE = "injection.jsonl", "paper.html"
QUESTIONS, QUICK_QUESTIONS = 80, 12


def run_injection(
    models: Sequence[str], part: str, quick: bool, dry_run: bool, loading: Loading, out: Path,
) -> None:
    """Answer what is not stored, then print and write the tables.

    Raises:
        SpecError: before any question, for an unknown part, a folder that is a file, or a model without markers.
        Exit: with 130, if it is interrupted. Stored answers are kept.
    """
    console, n = Console(), QUICK_QUESTIONS if quick else QUESTIONS
    check_folder("out", out, ROWS)
    sections, lines, stopped = [note(NOT_RUN)], list[list[str]](), False
    for model in models:
        subject = replace(loading, model=model).subject()
        tables = _tables(subject, part)
        if dry_run:
            _plan(subject, tables, n, console)
            continue
        if not stopped:
            stopped = _measure(subject, tables, n, out / ROWS, console)
        for one in tables:
            rows = _rows_of(subject, one, n, out / ROWS)
            sections.append(_shown(one, subject, rows, console, lines))
    if dry_run:
        return
    publish_readable(out / PAGE, page("kvspec paper injection", sections).encode())
    frame = pd.DataFrame(lines, columns=["model", "table", "n", *HEADINGS])
    publish_readable(out / "tables.csv", frame.to_csv(index=False).encode())
    for name, own in frame.groupby("table"):
        publish_readable(out / f"{name}.tex", own.to_latex(index=False, escape=True).encode())
    said = f"{out / PAGE}, tables.csv and a LaTeX file for each table\n{NOT_RUN}"
    console.print(said, highlight=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(STOPPED)


def _tables(subject: Subject, part: str) -> list[InjectionTable]:
    every = tables_of(template_of(subject))
    if part:
        check_choices("part", (part,), [one.name for one in every])
    return [one for one in every if part in ("", one.name)]


def _sessions(tables: Sequence[InjectionTable]) -> dict[str, Session]:
    """Each session once, by its name in rows."""
    return {session.name: session for one in tables for session in one.arms.values()}


def _identity(subject: Subject, index: int, session: str) -> Row:
    digest = hashlib.sha256(json.dumps(asdict(draw_talk(index))).encode()).hexdigest()
    return {
        "study": "injection", "model": subject.name, "spec_version": SPEC_VERSION, "question": index, "talk": digest,
        "session": session,
    }


def _stored(path: Path) -> Mapping[str, Row]:
    keys = ("study", "model", "spec_version", "question", "talk", "session")
    return {json.dumps([row[key] for key in keys]): row for row in load_rows(path)}


def _measure(
    subject: Subject, tables: Sequence[InjectionTable], n: int, path: Path, console: Console,
) -> bool:
    """Store the answers that are missing; whether somebody has stopped it."""
    sessions, stored = _sessions(tables), _stored(path)
    wanted = [
        (index, [one for one in sessions if json.dumps([*_identity(subject, index, one).values()]) not in stored])
        for index in range(n)
    ]
    left = sum(len(names) for _, names in wanted)
    console.print(
        f"injection: model {subject.name}; {n} questions in {len(sessions)} sessions each, {n * len(sessions) - left}"
        f" answers stored in {path}", highlight=False, soft_wrap=True,
    )
    try:
        with progress_bar(console, left) as progress:
            for index, names in wanted:
                if not names:
                    continue
                scene = Scene(subject, draw_talk(index))
                for name in names:
                    append_row(path, {**_identity(subject, index, name), **asdict(scene.answer(sessions[name]))})
                    progress(f"question {index + 1}")
    except KeyboardInterrupt:
        return True
    return False


def _rows_of(subject: Subject, one: InjectionTable, n: int, path: Path) -> dict[str, list[Row]]:
    """Rows of each session of a table, of the questions that all its sessions have answered."""
    stored, found = _stored(path), {name: list[Row]() for name in _sessions([one])}
    for index in range(n):
        keys = {name: json.dumps([*_identity(subject, index, name).values()]) for name in found}
        if set(keys.values()) <= stored.keys():
            for name, key in keys.items():
                found[name].append(stored[key])
    return found


def _shown(
    one: InjectionTable, subject: Subject, rows: Mapping[str, Sequence[Row]], console: Console, lines: list[list[str]],
) -> Html:
    """Print a table, add its lines, and return its section of the page."""
    n = len(next(iter(rows.values())))
    title = f"{one.title} on {subject.label}, n = {n}"
    if not n:
        console.print(f"{title}: not run\n", highlight=False, markup=False)
        return section(title, note("Not run."))
    own = list(filled_lines(one, rows))
    about = " ".join(filter(None, [interaction(one, rows), one.note]))
    lines += [[subject.label, one.name, str(n), *line] for line in own]
    console.print(table_of(title, HEADINGS, own))
    console.print(about + "\n", highlight=False, markup=False)
    return section(title, table(title, HEADINGS, own), note(about))


def _plan(subject: Subject, tables: Sequence[InjectionTable], n: int, console: Console) -> None:
    """Print how many answers there are, and the hours by the time of one question."""
    sessions, scene, start = _sessions(tables), Scene(subject, draw_talk(0)), perf_counter()
    for session in sessions.values():
        scene.answer(session)
    hours = n * (perf_counter() - start) / 3600
    console.print(
        f"injection on {subject.label}: {n} questions in {len(sessions)} sessions each, {hours:.2f} hours; one question"
        " was measured", highlight=False, soft_wrap=True,
    )
