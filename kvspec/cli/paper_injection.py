"""Implementation of `kvspec paper injection`: ask questions in sessions with archived chunks, and store the answers."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import pandas as pd
from rich.console import Console

from experiments.studies.page import Html, note, section, table
from experiments.studies.papers.costs import clock_of, timed
from experiments.studies.papers.injection import NEW_TOKENS, TEMPLATES, Scene, Session, template_of
from experiments.studies.papers.injection_tables import (
    LOCOMO,
    NOT_RUN,
    InjectionTable,
    filled_lines,
    interaction,
    tables_of,
)
from experiments.studies.papers.probes import Talk, draw_talk, read_locomo
from experiments.studies.report import fitting_tables, progress_bar, say
from experiments.studies.results import Row, append_row, load_rows
from experiments.studies.subject import Loading, Subject
from experiments.studies.workers import Launch
from kvspec.cli.checks import check_folder
from kvspec.cli.paper_runs import INJECTION, PaperOptions, page_names, publish_tables
from kvspec.cli.study_runs import finish
from spec import SPEC_VERSION
from spec.errors import SpecError
from spec.tables import csv_text
from spec.validate import check_choices

__all__ = ["run"]

ROWS = "injection.jsonl"
QUESTIONS, OF_LOCOMO, QUICK_QUESTIONS = 80, 200, 12
_IDENTITY = ("study", "model", "spec_version", "question", "talk", "session")
"""Columns that identify an answer."""


def run(asked: PaperOptions, loading: Loading, launch: Launch) -> None:
    """Ask the models all questions that have no stored answer, then print and write the tables.

    Raises:
        SpecError: if a part or an option is unknown, or if `out` is not a folder. Also if a model has no role markers,
            or if the file is not a file of LoCoMo. The error is raised before a question is asked.
        Exit: with exit code 130 if the run is interrupted. Stored answers are kept.
    """
    if launch.workers != 1 or len(asked.files) > 1:
        raise SpecError("NAME", asked.paper, "needs --workers 1 and accepts at most one --file: locomo10.json")
    console, rows = Console(), asked.out / ROWS
    names = [one.name for one in tables_of(next(iter(TEMPLATES.values())))]
    check_folder("out", asked.out, ROWS, page_names(names), asked.force)
    sections, frames, stopped = [note(NOT_RUN)], dict[str, list[pd.DataFrame]](), False
    for subject, tables, talks in _parts(asked, loading):
        if asked.dry_run:
            _plan(subject, tables, talks)
            continue
        stopped = stopped or _measure(subject, tables, talks, rows, console)
        for one in tables:
            sections.append(_shown(one, subject, _rows_of(subject, one, talks, rows), console, frames))
    if not asked.dry_run:
        publish_tables(asked.out, INJECTION, sections, _files(frames))
        say(NOT_RUN)
        finish(rows, False, stopped)


def _parts(asked: PaperOptions, loading: Loading) -> Iterator[tuple[Subject, Sequence[InjectionTable], Sequence[Talk]]]:
    """Yield the tables of each model with their conversations: first generated conversations, then those of a file."""
    most = (QUICK_QUESTIONS, QUICK_QUESTIONS) if asked.quick else (QUESTIONS, OF_LOCOMO)
    generated = [draw_talk(index) for index in range(most[0])]
    read = read_locomo(asked.files[0])[: most[1]] if asked.files else []
    for model in asked.models[1:]:  # the next loop checks the first model before a question is asked
        template_of(replace(loading, model=model).subject())
    for model in asked.models:
        subject = replace(loading, model=model).subject()
        every = tables_of(template_of(subject))
        if asked.part:
            check_choices("part", (asked.part,), [one.name for one in every])
        for of_file, talks in ((False, generated), (True, read)):
            some = [one for one in every if (one.name == LOCOMO) is of_file and asked.part in ("", one.name)]
            if some:
                yield subject, some, talks


def _files(frames: Mapping[str, Sequence[pd.DataFrame]]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of files: one CSV file of all tables, and a LaTeX file for each table."""
    every = [frame for each in frames.values() for frame in each] or [pd.DataFrame()]
    yield "tables.csv", csv_text(pd.concat(every))
    for name, each in frames.items():
        yield f"{name}.tex", pd.concat(each).to_latex(index=False, escape=True)


def _sessions(tables: Sequence[InjectionTable]) -> dict[str, Session]:
    """Return the sessions of all tables without duplicates, by the name that rows have."""
    return {session.name: session for one in tables for session in one.arms.values()}


def _digest(talk: Talk) -> str:
    """Return the hash of a conversation. The default metric is left out, because older rows have no metric."""
    held = {key: value for key, value in asdict(talk).items() if (key, value) != ("metric", Talk.metric)}
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()


def _identities(subject: Subject, talks: Sequence[Talk], sessions: Iterable[str]) -> dict[tuple[int, str], Row]:
    """Return the columns that identify the answer to each question in each session."""
    digests = [_digest(talk) for talk in talks]
    return {
        (index, session): dict(zip(
            _IDENTITY, ("injection", subject.name, SPEC_VERSION, index, digest, session), strict=True
        )) for index, digest in enumerate(digests) for session in sessions
    }


def _key(row: Row) -> str:
    return json.dumps([row[name] for name in _IDENTITY])


def _measure(
    subject: Subject, tables: Sequence[InjectionTable], talks: Sequence[Talk], path: Path, console: Console,
) -> bool:
    """Ask the questions that have no stored answer, and store the answers. Return True if Ctrl-C stopped the run."""
    sessions, stored = _sessions(tables), set(map(_key, load_rows(path)))
    every = _identities(subject, talks, sessions)
    left = {at: row for at, row in every.items() if _key(row) not in stored}
    say(
        f"injection: model {subject.name}; {len(talks)} questions in {len(sessions)} sessions each,"
        f" {len(every) - len(left)} answers stored in {path}", console
    )
    try:
        with progress_bar(console, len(left)) as progress:
            for index, rows in groupby(left.items(), lambda item: item[0][0]):
                scene = Scene(subject, talks[index])
                for (_, session), row in rows:
                    append_row(path, {**row, **scene.measure(sessions[session])})
                    progress(f"question {index + 1}")
    except KeyboardInterrupt:
        return True
    return False


def _rows_of(
    subject: Subject, one: InjectionTable, talks: Sequence[Talk], path: Path,
) -> dict[str, list[Row]]:
    """Return the rows of each session of a table. Skip questions that a session has not answered."""
    stored, result = {_key(row): row for row in load_rows(path)}, {name: list[Row]() for name in _sessions([one])}
    every = _identities(subject, talks, result)
    for index in range(len(talks)):
        keys = {name: _key(every[index, name]) for name in result}
        if set(keys.values()) <= stored.keys():
            for name, key in keys.items():
                result[name].append(stored[key])
    return result


def _shown(
    one: InjectionTable, subject: Subject, rows: Mapping[str, Sequence[Row]], console: Console,
    frames: dict[str, list[pd.DataFrame]],
) -> Html:
    """Print a table, add the table to `frames`, and return the section of the page with the table."""
    n = len(next(iter(rows.values())))
    title = f"{one.title} on {subject.label}, n = {n}"
    if not n:
        message = "not run: give --file locomo10.json" if one.name == LOCOMO else "not run"
        say(f"{title}: {message}\n", console)
        return section(title, note(message))
    lines = list(filled_lines(one, rows))
    about = " ".join(filter(None, [interaction(one, rows), one.note]))
    frame = pd.DataFrame([[subject.label, one.name, str(n), *line] for line in lines])
    frames.setdefault(one.name, []).append(frame.set_axis(["model", "table", "n", *one.headings], axis=1))
    for piece in fitting_tables(title, one.headings, lines, console.width):
        console.print(piece)
    say(about + "\n", console)
    return section(title, table(title, one.headings, lines), note(about))


def _plan(subject: Subject, tables: Sequence[InjectionTable], talks: Sequence[Talk]) -> None:
    """Print the number of answers and tokens, the memory, and the hours, estimated from the time of one question."""
    n, sessions = len(talks), _sessions(tables).values()
    if not talks:
        say(f"{tables[0].title}: not run without --file locomo10.json")
        return
    scenes = [Scene(subject, talk) for talk in talks]
    seconds, _ = timed(subject.model.device, lambda: [scenes[0].measure(session) for session in sessions])
    tokens = [scene.tokens(session) for scene in scenes for session in sessions]
    weights = sum(one.nbytes for one in subject.model.parameters())
    say(
        f"injection on {subject.label}: {n} questions in {len(sessions)} sessions each, {sum(tokens):,} prompt tokens,"
        f" at most {len(tokens) * NEW_TOKENS:,} answer tokens\nmemory: weights {weights / 2**20:,.0f} MiB, the longest"
        f" session's cache {max(tokens) * scenes[0].token_bytes() / 2**20:,.1f} MiB\n"
        f"time: {n * seconds / 3600:.2f} {clock_of(subject.model.device)} hours; one question was measured"
    )
