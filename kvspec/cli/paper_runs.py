"""Implementation of `kvspec paper`: run each part of a paper as a study, then fill in the tables of the paper."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from experiments.studies.evidence.kept import read_prompt
from experiments.studies.evidence.measure import measure
from experiments.studies.evidence.rules import Rules
from experiments.studies.evidence.run import Item
from experiments.studies.page import Html, note, page, section, table
from experiments.studies.papers import COSTS, INJECTION, Paper, Part, load_paper, rules_of_part
from experiments.studies.papers.costs import FILE, PASSES, TOKENS, Costs, clock_of, timed
from experiments.studies.papers.tables import Filled, Measured, fill, shaped, write_tables
from experiments.studies.report import fits, fitting_tables, say, table_of
from experiments.studies.results import STUDY
from experiments.studies.subject import Loading, Subject
from experiments.studies.workers import Launch
from experiments.tasks import place
from experiments.tasks.context import read_prose
from experiments.tasks.needle import MAX_NEW_TOKENS
from kvspec.cli.checks import check_counts, check_folder
from kvspec.cli.study_runs import Running, Work, finish
from models_integration.cache.atomic_file import publish_readable
from models_integration.policies.calibration import calibrate
from models_integration.policies.methods import constants_of, parse_policy
from reference.calibration import load_calibration, save_calibration
from spec.errors import SpecError

__all__ = ["INJECTION", "PaperOptions", "publish_tables", "run"]

_ACROSS = 7
"""Number of columns of results that a screen of 1280 pixels shows without scrolling."""
_PAGE = "paper.html"
_CALIBRATED = 1024
"""Number of tokens of the shipped text that a calibration uses."""
_BEHIND = 4 * MAX_NEW_TOKENS
"""Number of positions that are reserved for a question and an answer."""


@dataclass(frozen=True)
class PaperOptions:
    """Options of `kvspec paper`.

    Attributes:
        paper: name of the paper, or path of a .toml file.
        models: models. Every table has separate results for each model.
        part: name of the table to fill in. Empty: all tables.
        quick: if True, use the short contexts and the few samples of a quick run.
        files: benchmark files.
        out: folder for the rows and tables.
        batch_size: number of compacted caches that share a forward pass.
        again: if True, run failed samples again.
        dry_run: if True, only print the size of the run.
        force: if True, the written files may replace files that kvspec did not make.
    """

    paper: str
    models: tuple[str, ...]
    part: str
    quick: bool
    files: tuple[Path, ...]
    out: Path
    batch_size: int = 12
    again: bool = False
    dry_run: bool = False
    force: bool = False


class _Study(NamedTuple):
    """Part of a paper on one model: the rules of the paper, and the samples that the model can run, or None."""

    part: Part
    rules: Rules
    work: Work | Costs | None
    note: str
    """Sentence about the lengths that the model does not support. Empty if all lengths are supported."""


def run(asked: PaperOptions, loading: Loading, launch: Launch) -> None:
    """Measure the samples without a stored result, then print and write the tables. A dry run stores nothing.

    Raises:
        SpecError: if an option, a file or a model is invalid. The error is raised before a sample is measured.
        Exit: with exit code 130 if the run is interrupted, or with exit code 1 if a sample failed. Results are kept.
    """
    if asked.dry_run:
        _plan(asked, loading)
        return
    with launch.started(asked.out, loading.device):
        _run(asked, loading)


def _run(asked: PaperOptions, loading: Loading) -> None:
    console, paper = Console(), _checked(asked)
    result, missing, stopped, failed = list[tuple[Part, Measured]](), _missing(paper, asked), False, False
    for model in asked.models[1:]:  # the next loop loads the first model before a sample is measured
        replace(loading, model=model).subject()
    for model in asked.models:
        subject = _subject(paper, asked, replace(loading, model=model), save=True)
        for part, rules, work, reason in list(_studies(paper, asked, subject, model)):
            if work is not None and not stopped:
                stopped = work.measure(console)
                failed |= work.failed
            result.append((part, Measured(rules, subject.label, work.rows() if work else ())))
            missing.setdefault(part.name, []).extend(filter(None, [reason]))
    filled = [
        fill(one, paper, [some for part, some in result if part.name in one.parts], [
            reason for name in one.parts for reason in dict.fromkeys(missing.get(name, ()))
        ]) for one in paper.tables
    ]
    for one in filled:
        _print(one, console)
    _write(paper, filled, asked)
    finish(asked.out / STUDY, failed, stopped)


def _checked(asked: PaperOptions) -> Paper:
    paper = load_paper(asked.paper).of(asked.part)
    check_counts(batch_size=asked.batch_size)
    known = {name for part in paper.parts for name in part.files}
    for path in asked.files:
        if path.stem not in known:
            names = ", ".join(sorted(known)) or "no file"
            raise SpecError("file", str(path), f"is not a file of this evaluation; use {names}")
    check_folder("out", asked.out, STUDY, page_names([one.name for one in paper.tables]), asked.force)
    return paper


def _missing(paper: Paper, asked: PaperOptions) -> dict[str, list[str]]:
    """Return a sentence about the missing benchmark files of each part, by the name of the part."""
    given, result = {path.stem for path in asked.files}, dict[str, list[str]]()
    for part in paper.parts:
        if part.needs_files and (absent := [name for name in part.files if name not in given]):
            result[part.name] = [f"Not run: give --file for {', '.join(absent)} ({part.kind})."]
    return result


def _subject(paper: Paper, asked: PaperOptions, loading: Loading, *, save: bool) -> Subject:
    """Load the model, and a calibration if a policy needs one. If `save` is True, store a new calibration."""
    subject = loading.subject()
    policies = [name for part in paper.parts for name in part.study.get("policies", paper.study.get("policies", ()))]
    if not any("calibration" in constants_of(parse_policy(name)[0]) for name in policies):
        return subject
    path = asked.out / f"calibration-{subject.name}.npz"
    if path.exists():
        return replace(subject, calibration=load_calibration(path))
    say(f"measures a calibration on {_CALIBRATED} tokens")
    ids = torch.tensor([read_prose(subject.tokenizer).tokens[:_CALIBRATED]], device=subject.model.device)
    result = calibrate(subject.model, ids, subject.identity)
    if save:
        file = BytesIO()
        save_calibration(result, file)
        publish_readable(path, file.getvalue())
    return replace(subject, calibration=result)


def _studies(paper: Paper, asked: PaperOptions, subject: Subject, model: str) -> Iterator[_Study]:
    running = Running(asked.out, batch_size=asked.batch_size, again=asked.again)
    for part in paper.parts:
        rules = rules_of_part(paper, part, [model], asked.files, asked.quick)
        if rules is None:
            continue
        lengths, message = tuple(length for length in rules.lengths if _has_positions(subject, length)), ""
        if left := [str(length) for length in rules.lengths if length not in lengths]:
            message = f"Not run on {subject.label}: {', '.join(left)} tokens, more than the positions of the model."
        work = _work(part, replace(rules, lengths=lengths), subject, running) if lengths else None
        yield _Study(part, rules, work, message)


def _work(part: Part, rules: Rules, subject: Subject, running: Running) -> Work | Costs:
    return Costs(rules, subject, running.out / FILE) if part.kind == COSTS else Work(rules, subject, running)


def _has_positions(subject: Subject, length: int) -> bool:
    try:
        subject.check_positions("lengths", length, _BEHIND)
    except SpecError:
        return False
    return True


def _print(filled: Filled, console: Console) -> None:
    """Print a table with as many columns as fit the terminal."""
    if not filled.ours:
        say(f"{filled.table.title}: not run. {filled.note}\n", console)
        return
    title, left = f"{filled.table.title}{_counts(filled)}", dict[str, bool]()
    for less in ({}, {"published": False}, {"intervals": False}, {"differences": False}):
        left |= less
        headings, lines = shaped(filled, **left)
        if fits(table_of(title, headings, lines), console.width):
            break
    for piece in fitting_tables(title, headings, lines, console.width):
        console.print(piece)
    if filled.note:
        say(filled.note + "\n", console)


def _counts(filled: Filled) -> str:
    if not filled.n:
        return ": not run"
    return f", n = {' to '.join(map(str, dict.fromkeys((filled.n[0], filled.n[-1]))))} in each cell"


def _write(paper: Paper, filled: Sequence[Filled], asked: PaperOptions) -> None:
    about = note(
        "Each cell is the mean of the samples with a 95 % interval. A column 'over NAME' shows the paired difference"
        " from NAME, such as the best baseline or the full cache. 'exact' is the share of answers whose first number is"
        " right, shown if the paper's metric gives a different share. Published results are from different models."
    )
    quick = note("This is a quick run. The samples are too few to compare policies.", "warning") if asked.quick else ""
    sections = [section("How to read the tables", about, quick)]
    for one in filled:
        shown = _pieces(f"{one.table.title}{_counts(one)}", *shaped(one)) if one.columns else []
        sections.append(section(one.table.title, *shown, note(one.note or ("" if one.columns else "Not run."))))
    publish_tables(asked.out, paper.title, sections, write_tables(filled))


def page_names(tables: Iterable[str]) -> list[str]:
    """Return the names of the files that `publish_tables` writes for tables with these names."""
    return [_PAGE, "tables.csv", *(f"{name}.tex" for name in tables)]


def _pieces(caption: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[Html]:
    """Return a table of a page in pieces that fit a screen of 1280 pixels. Each piece has the first column."""
    starts = range(1, max(2, len(headings)), _ACROSS)
    return [
        table(
            caption + f" (part {part} of {len(starts)})" * (len(starts) > 1),
            [headings[0], *headings[first : first + _ACROSS]],
            [[line[0], *line[first : first + _ACROSS]] for line in lines],
        ) for part, first in enumerate(starts, 1)
    ]


def publish_tables(out: Path, title: str, sections: Sequence[Html], tables: Iterable[tuple[str, str]]) -> None:
    """Write the page of a paper and the files of the tables (name and text), and print the path of the page."""
    publish_readable(out / _PAGE, page(f"kvspec paper: {title}", sections).encode())
    for name, text in tables:
        publish_readable(out / name, text.encode())
    say(f"{out / _PAGE}, tables.csv and a LaTeX file for each table")


def _plan(asked: PaperOptions, loading: Loading) -> None:
    """Print the samples, tokens, memory and hours of a run. Measure one sample of each part, and store nothing.

    Raises:
        SpecError: as in `run`.
    """
    console, paper = Console(), _checked(asked)
    for model in asked.models:
        say(f"loads {model}", console)
        subject, lines = _subject(paper, asked, replace(loading, model=model), save=False), list[list[str]]()
        hours, most = [0.0, 0.0], 0.0
        for number, each in enumerate(paper.parts, 1):
            say(f"part {number} of {len(paper.parts)}: {each.name}", console)
            for part, _, work, message in _studies(replace(paper, parts=(each,)), asked, subject, model):
                numbers, (low, high, cached) = _planned(work, again=not any(hours))
                hours, most = [hours[0] + low, hours[1] + high], max(most, cached)
                lines.append([part.name, *(f"{number:,}" for number in numbers), message])
        headings = ["part", "samples", "cells", "prompt tokens", "answer tokens at most", "longest prompt", "not run"]
        console.print(table_of(f"{paper.title} on {subject.label}", headings, lines))
        weights, clock = sum(one.nbytes for one in subject.model.parameters()), clock_of(subject.model.device)
        say(
            f"memory: weights {weights / 2**20:,.0f} MiB, the longest prompt's cache {most / 2**20:,.0f} MiB, and up to"
            f" {asked.batch_size} compacted copies of that\n"
            f"time: {hours[0] / 3600:.2f} to {hours[1] / 3600:.2f} {clock} hours; one sample of each part was measured,"
            " and time grows with the prompt tokens or with their square"
        )
    for name, missing in _missing(paper, asked).items():
        say(f"{name}: {' '.join(missing)}")


def _planned(work: Work | Costs | None, again: bool) -> tuple[Sequence[int], tuple[float, float, float]]:
    """Return the numbers of samples, cells, prompt tokens, answer tokens and longest-prompt tokens, and the cost."""
    if work is None:
        return (0,) * 5, (0.0, 0.0, 0.0)
    if isinstance(work, Costs):
        lengths = work.rules.lengths
        numbers = len(lengths), 2 * len(lengths), PASSES * sum(lengths), PASSES * TOKENS * len(lengths), max(lengths)
        return numbers, _cost(
            work.subject.model.device, lengths, lambda at: work.row(lengths[at])["memory"]["cache, full cache"], again
        )
    sizes = [len(place(item.sample, item.placement).prompt_ids) for item in work.items]
    cells = [len(item.cells(work.rules)) for item in work.items]
    answers = sum(each * item.sample.max_new_tokens for each, item in zip(cells, work.items, strict=True))
    return (len(sizes), sum(cells), sum(sizes), answers, max(sizes)), _cost(
        work.subject.model.device, sizes, lambda at: _cached(work, work.items[at]), again
    )


def _cost(
    device: torch.device, sizes: Sequence[int], measured: Callable[[int], float], again: bool,
) -> tuple[float, float, float]:
    """Return the linear and the quadratic estimate of the seconds of a part, and the bytes of the largest cache.

    `sizes` are the prompt lengths of the samples. `measured` runs the sample with a given index, and returns the bytes
    of the prompt's cache. If `again` is True, the sample runs twice, because the first run includes compilation.
    """
    at = min(range(len(sizes)), key=sizes.__getitem__)
    if again:
        measured(at)
    spent, cached = timed(device, lambda: measured(at))
    ratios = [size / sizes[at] for size in sizes]
    return sum(ratios) * spent, sum(ratio**2 for ratio in ratios) * spent, max(ratios) * cached


def _cached(work: Work, item: Item) -> float:
    """Measure a sample, and return the bytes of the full cache of the prompt."""
    placement, cells = place(item.sample, item.placement), item.cells(work.rules)
    prompt = read_prompt(work.subject, work.policies, work.rules.budgets, placement)
    row = measure(work.subject, item.sample, prompt, cells, work.running.batch_size)
    slot = max(float(cell["mean_bytes"] / cell["mean_cache"]) for cell in row["cells"])
    return slot * len(placement.prompt_ids)
