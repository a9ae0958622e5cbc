"""Implementation of `kvspec paper injection`: ask questions in sessions with archived chunks, and store the answers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import typer
from rich.console import Console

from models_integration.cache.atomic_file import publish_readable
from models_integration.cli.checks import check_folder
from models_integration.cli.study import STOPPED
from models_integration.studies.page.elements import Html, note, page, section, table
from models_integration.studies.papers.conversations import Talk, draw_talk, read_locomo
from models_integration.studies.papers.costs import clock_of, timed
from models_integration.studies.papers.injection import NEW_TOKENS, Scene, Session, template_of
from models_integration.studies.papers.injection_tables import (
    LOCOMO,
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
QUESTIONS, OF_LOCOMO, QUICK_QUESTIONS = 80, 200, 12


def run_injection(
    models: Sequence[str], part: str, quick: bool, dry_run: bool, loading: Loading, out: Path, locomo: Path | None,
) -> None:
    """Let the models answer the questions without a stored answer, then print and write the tables.

    Raises:
        SpecError: if `part` is unknown, if `out` is not a folder, if a model has no role markers, or if `locomo` is not
            a file of LoCoMo. The error is raised before a question is asked.
        Exit: with exit code 130 if the run is interrupted. Stored answers are kept.
    """
    console, most = Console(), (QUICK_QUESTIONS, QUICK_QUESTIONS) if quick else (QUESTIONS, OF_LOCOMO)
    check_folder("out", out, ROWS)
    generated = [draw_talk(index) for index in range(most[0])]
    asked = read_locomo(locomo)[: most[1]] if locomo else []
    sections, frames, stopped = [note(NOT_RUN)], dict[str, list[pd.DataFrame]](), False
    for model in models:
        subject = replace(loading, model=model).subject()
        for of_file, talks in ((False, generated), (True, asked)):
            tables = [one for one in _tables(subject, part) if (one.name == LOCOMO) is of_file]
            if not tables:
                continue
            if dry_run:
                _plan(subject, tables, talks, console)
                continue
            if not stopped:
                stopped = _measure(subject, tables, talks, out / ROWS, console)
            for one in tables:
                rows = _rows_of(subject, one, talks, out / ROWS)
                sections.append(_shown(one, subject, rows, console, frames))
    if dry_run:
        return
    publish_readable(out / PAGE, page("kvspec paper injection", sections).encode())
    every = [frame for each in frames.values() for frame in each] or [pd.DataFrame()]
    publish_readable(out / "tables.csv", pd.concat(every).to_csv(index=False).encode())
    for name, each in frames.items():
        publish_readable(out / f"{name}.tex", pd.concat(each).to_latex(index=False, escape=True).encode())
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
    """Return the sessions of all tables without duplicates, by the name that rows have."""
    return {session.name: session for one in tables for session in one.arms.values()}


def _identity(subject: Subject, index: int, talk: Talk, session: str) -> Row:
    digest = hashlib.sha256(json.dumps(asdict(talk)).encode()).hexdigest()
    return {
        "study": "injection", "model": subject.name, "spec_version": SPEC_VERSION, "question": index, "talk": digest,
        "session": session,
    }


def _stored(path: Path) -> Mapping[str, Row]:
    keys = ("study", "model", "spec_version", "question", "talk", "session")
    return {json.dumps([row[key] for key in keys]): row for row in load_rows(path)}


def _measure(
    subject: Subject, tables: Sequence[InjectionTable], talks: Sequence[Talk], path: Path, console: Console,
) -> bool:
    """Ask the questions without a stored answer, and store the answers. Return True if Ctrl-C stopped the run."""
    sessions, stored = _sessions(tables), _stored(path)
    wanted = [
        (index, talk, [
            one for one in sessions if json.dumps([*_identity(subject, index, talk, one).values()]) not in stored
        ])
        for index, talk in enumerate(talks)
    ]
    n, left = len(talks), sum(len(names) for _, _, names in wanted)
    console.print(
        f"injection: model {subject.name}; {n} questions in {len(sessions)} sessions each, {n * len(sessions) - left}"
        f" answers stored in {path}", highlight=False, soft_wrap=True,
    )
    try:
        with progress_bar(console, left) as progress:
            for index, talk, names in wanted:
                if not names:
                    continue
                scene = Scene(subject, talk)
                for name in names:
                    append_row(path, {**_identity(subject, index, talk, name), **scene.measure(sessions[name])})
                    progress(f"question {index + 1}")
    except KeyboardInterrupt:
        return True
    return False


def _rows_of(
    subject: Subject, one: InjectionTable, talks: Sequence[Talk], path: Path,
) -> dict[str, list[Row]]:
    """Return the rows of each session of a table. Skip questions that a session has not answered."""
    stored, found = _stored(path), {name: list[Row]() for name in _sessions([one])}
    for index, talk in enumerate(talks):
        keys = {name: json.dumps([*_identity(subject, index, talk, name).values()]) for name in found}
        if set(keys.values()) <= stored.keys():
            for name, key in keys.items():
                found[name].append(stored[key])
    return found


def _shown(
    one: InjectionTable, subject: Subject, rows: Mapping[str, Sequence[Row]], console: Console,
    frames: dict[str, list[pd.DataFrame]],
) -> Html:
    """Print a table, add the table to `frames`, and return the section of the page with the table."""
    n = len(next(iter(rows.values())))
    title = f"{one.title} on {subject.label}, n = {n}"
    if not n:
        said = "not run: give --file locomo10.json" if one.name == LOCOMO else "not run"
        console.print(f"{title}: {said}\n", highlight=False, markup=False)
        return section(title, note(said))
    own = list(filled_lines(one, rows))
    about = " ".join(filter(None, [interaction(one, rows), one.note]))
    frame = pd.DataFrame([[subject.label, one.name, str(n), *line] for line in own])
    frames.setdefault(one.name, []).append(frame.set_axis(["model", "table", "n", *one.headings], axis=1))
    console.print(table_of(title, one.headings, own))
    console.print(about + "\n", highlight=False, markup=False)
    return section(title, table(title, one.headings, own), note(about))


def _plan(subject: Subject, tables: Sequence[InjectionTable], talks: Sequence[Talk], console: Console) -> None:
    """Print the number of answers and tokens, the memory, and the hours, estimated from the time of one question."""
    n, sessions = len(talks), _sessions(tables).values()
    if not talks:
        console.print(f"{tables[0].title}: not run without --file locomo10.json", highlight=False, soft_wrap=True)
        return
    scenes = [Scene(subject, talk) for talk in talks]
    seconds, _ = timed(subject.model.device, lambda: [scenes[0].measure(session) for session in sessions])
    tokens = [scene.tokens(session) for scene in scenes for session in sessions]
    weights = sum(one.nbytes for one in subject.model.parameters())
    console.print(
        f"injection on {subject.label}: {n} questions in {len(sessions)} sessions each, {sum(tokens):,} prompt tokens,"
        f" at most {len(tokens) * NEW_TOKENS:,} answer tokens\nmemory: weights {weights / 2**20:,.0f} MiB, the longest"
        f" session's cache {max(tokens) * scenes[0].token_bytes() / 2**20:,.1f} MiB\n"
        f"time: {n * seconds / 3600:.2f} {clock_of(subject.model.device)} hours; one question was measured",
        highlight=False, soft_wrap=True,
    )
