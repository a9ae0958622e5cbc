"""Helpers for tests of studies: a sample in a separate context, a small study and its processes, invented rows."""

import os
import re
import runpy
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from math import ceil
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from conformance.paths import ROOT
from experiments.studies import leases
from experiments.studies.evidence import measure as measures
from experiments.studies.evidence import run as of_study
from experiments.studies.evidence.rules import load_rules
from experiments.studies.leases import holder_of
from experiments.studies.results import Row, load_rows
from experiments.studies.subject import Loading
from experiments.tasks import Placement
from kvspec.cli.study_runs import Running, run
from models_integration.policies.methods import RetentionPolicy


class Answer(NamedTuple):
    """Answer of the model under a policy, and the number of stored slots of a layer and head during the answer."""

    token_ids: list[int]
    mean_cache: float
    peak_cache: int


@torch.no_grad()
def answer(
    model: PreTrainedModel, policy: RetentionPolicy, placement: Placement, max_new_tokens: int,
    stop_ids: frozenset[int],
) -> tuple[Answer, list[list[int]]]:
    """Return the answer, and the kept set of each group of the prompt. A policy with steps reads token by token."""
    method = policy.on(model)
    steps = method.decode
    if steps and placement.dropped_slots:
        placement = replace(placement, prompt_ids=placement.prompt_ids[:-1], dropped_slots=0)
    stored: list[float] = []
    with policy(model) as run:
        logits = model(input_ids=torch.tensor([placement.prompt_ids])).logits
        cache, (retention,) = run.cache, run.retentions
        assert cache is not None
        kept = ceil(cache.mean_length)
        if placement.dropped_slots:
            cache.crop(-placement.dropped_slots)

        def read(tokens: list[int]) -> Any:
            with nullcontext() if steps else run.reading():
                return model(input_ids=torch.tensor([tokens]), past_key_values=cache).logits

        fed, answer_ids = list(placement.fed_ids), list[int]()
        for piece in [[token] for token in fed] if steps else [fed] if fed else []:
            logits = read(piece)
            stored.append(cache.mean_length)
        while not answer_ids or (answer_ids[-1] not in stop_ids and len(answer_ids) < max_new_tokens):
            if answer_ids:
                logits = read(answer_ids[-1:])
                stored.append(cache.mean_length)
            answer_ids.append(int(logits[0, -1].argmax()))
    mean = sum(stored) / len(stored) if stored else float(kept)
    peak = max([len(placement.prompt_ids), *map(ceil, stored)])
    return Answer(answer_ids, mean, peak), [retention.group(at).tolist() for at in range(retention.groups)]


def commit_all(folder: Path) -> str:
    """Commit all files of a folder in a new repository, and return the commit."""
    author = ["-c", "user.name=kvspec", "-c", "user.email=tests@kvspec.invalid"]
    for arguments in (["init", "-q"], ["add", "--all"], [*author, "commit", "-q", "--allow-empty", "-m", "files"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)
    completed = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return completed.stdout.strip()


RULES = """
[study]
title = "Small"
model = "pocket"
contexts = 8
questions = 1
seed = 3
lengths = [1024]
placements = ["after"]
tasks = ["needle_in_prose"]
policies = ["snapkv", "streamingllm"]
budgets = ["0.5", "0.8"]
"""
ROWS = 8
SLOW = """
import time
from pathlib import Path

import numpy as np

from experiments.studies import leases
from reference.policies import policy_from_score
from spec.policy import Needs

leases._PAUSE = 0.05

def newest(observation):
    while Path("wait").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    return np.tile(np.arange(observation.seen, dtype=np.float64), (observation.groups, 1))

POLICY = policy_from_score(newest, needs=Needs())
"""
"""Source of a module with a slow policy, for commands. Their workers use short waiting times too."""


def sweep(rules: Path, out: Path) -> None:
    """Run the study of a rules file.

    The file `most` contains the number of samples that all processes together begin.
    """
    torch.set_num_threads(1)
    leases._PAUSE = 0.05

    def begun() -> bool:
        """Return whether this process created one of the allowed folders `begun-N`."""
        for at in range(int(rules.with_name("most").read_text(encoding="ascii"))):
            with suppress(FileExistsError):
                rules.with_name(f"begun-{at}").mkdir()
                return True
        return False

    def slowly(*arguments: Any) -> Any:
        while not begun():
            time.sleep(0.02)
        return {**measures.measure(*arguments), "pid": os.getpid()}

    setattr(of_study, "measure", slowly)  # noqa: B010  # For mypy, this name does not belong to the module.
    run(load_rules(rules), Loading(), Running(out))


def command(folder: Path, *words: str) -> None:
    """Run `kvspec WORDS` in a folder."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.path.insert(0, str(folder))
    sys.argv = ["kvspec", *words]
    runpy.run_module("kvspec", run_name="__main__")


def measured(out: Path) -> dict[str, Row]:
    """Return the row of each sample without its duration and process. No sample is measured twice."""
    rows = load_rows(out / "study.jsonl")
    actual = {row["sample"]: {k: v for k, v in row.items() if k not in ("seconds", "pid")} for row in rows}
    assert len(actual) == len(rows)
    return actual


def holders(out: Path) -> set[int]:
    """Return the ids of processes that hold a sample."""
    actual = [holder_of(lease).get("pid") for lease in out.glob(".study.jsonl-*.lease")]
    return {pid for pid in actual if pid is not None}


VOID = {"meta", "input", "br", "wbr"}
TEXT_TAGS = {"th", "td", "caption", "summary", "figcaption", "text", "title", "p", "h2", "h3"}
POLICIES = ("snapkv", "knorm", 'crystalcache(graph="zero")')
BUDGETS = ("0.5", "0.3")
PLACEMENTS = ("after", "in_prompt")
TASKS = ("needle_in_prose", "keys_in_prose_2")
DIGEST = "a" * 64


@dataclass
class Table:
    caption: str = ""
    lines: list[list[str]] = field(default_factory=list)

    def line(self, *first: str) -> list[str]:
        (actual,) = (line for line in self.lines if line[: len(first)] == list(first))
        return actual


@dataclass
class Panel:
    """Picture: names and positions of its marks, and its words with their positions."""

    marks: list[tuple[str, float, float]] = field(default_factory=list)
    words: list[tuple[float, float, str]] = field(default_factory=list)


class Page(HTMLParser):
    """Parser of a page. Tags that do not close raise an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.tables, self.notes = text, list[str](), list[Table](), list[str]()
        self.panels, self.attributes, self.titles = dict[str, Panel](), list[tuple[str, str, str]](), list[str]()
        self._text, self._place, self._caption, self._panel = "", (0.0, 0.0), "", Panel()
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr":
            self.tables[-1].lines.append([])
        elif tag in TEXT_TAGS and not (tag == "p" and {"th", "td"} & set(self.open)):
            self._text = ""
        if tag == "svg" and given.get("class") == "panel":
            self._panel = self.panels[given["aria-label"].partition(";")[0]] = Panel()
        if tag == "text" and "x" in given:
            self._place = float(given["x"]), float(given["y"])
        if tag == "path" and given.get("class") == "mark":
            x, y = re.findall(r"[-\d.]+", given["transform"])
            self._place = float(x), float(y)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())
        if tag in ("th", "td"):
            self.tables[-1].lines[-1].append(self._text)
        elif tag == "caption":
            self.tables[-1].caption = self._text
        elif tag in ("summary", "figcaption"):
            self._caption = self._text
        elif tag == "table" and not self.tables[-1].caption:
            self.tables[-1].caption = self._caption
        elif tag == "p":
            self.notes.append(self._text)
        elif tag in ("h2", "h3"):
            self.titles.append(self._text)
        elif tag == "title" and "svg" in self.open:
            self._panel.marks.append((self._text, *self._place))
        elif tag == "text" and self.panels and "figure" in self.open and "table" not in self.open:
            self._panel.words.append((*self._place, self._text))

    def table(self, caption: str) -> Table:
        (actual,) = (table for table in self.tables if table.caption.startswith(caption))
        return actual


def study_rows(contexts: int = 12, part: str = "confirm") -> list[Row]:
    """Return rows with random numbers: two questions for each context, and two tasks, placements and lengths."""
    draw, rows = Random(7), list[Row]()
    for context in range(contexts):
        for task in TASKS:
            for placement in PLACEMENTS:
                for question in range(2):
                    row = {
                        "rules": DIGEST, "model": "m@0", "backend": "numpy", "spec_version": "0.3.0", "seed": 0,
                        "part": part, "task": task, "sample": f"{part}{context}{task}{question}",
                        "length": (1024, 2048)[context % 2], "placement": placement, "context": f"{task}{context}",
                        "question": question, "evidence_tokens": 4, "metadata": {"depth": draw.random()},
                        "seconds": {name: draw.uniform(0.1, 2) for name in ("prefill", *POLICIES, "random", "reading")},
                    }
                    rows.append({**row, "cells": list(cells(draw))})
    return rows


def cells(draw: Random) -> list[Row]:
    """Return the cells of one sample.

    The full cache is right with probability 0.9, and no other likelihood is above the likelihood of the full cache.
    """
    actual = [cell("fullcache", "1.0", -draw.random(), draw.random() < 0.9, 1.0, 1000.0)]
    actual.append(cell("blind", "0", -8 - draw.random(), False, 0.0, 20.0))
    for budget in BUDGETS:
        for at, policy in enumerate((*POLICIES, "random", "evidence")):
            likelihood = -draw.uniform(0, 9 - 2 * at)
            kept = [draw.randrange(5) for _ in range(3)]
            size = 1000 * float(budget) * (1.02 if policy == "knorm" and budget == "0.3" else 1)
            actual.append(cell(policy, budget, likelihood, likelihood > -3, kept, size))
    return actual


def cell(policy: str, budget: str, likelihood: float, right: bool, kept: Any, size: float) -> Row:
    return {
        "policy": policy, "budget": budget, "likelihood": likelihood, "right": right, "exact": right,
        "evidence_kept": 4 * kept if isinstance(kept, float) else kept, "kept": size, "mean_cache": size + 20 * right,
        "peak_cache": 1000,
        "mean_bytes": size * 1000, "peak_bytes": 10**6, "divergence": 0.25, "lost_attention": 0.5,
    }
