"""A page as a reader's parser sees it, and results files that are written by hand."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from random import Random
from typing import Any

from models_integration.studies.results import Row

VOID = {"meta", "input", "br"}
SAID = {"th", "td", "caption", "summary", "figcaption", "text", "title", "p", "h2", "h3"}
POLICIES = ("snapkv", "knorm", 'crystalcache(graph="zero")')
BUDGETS = ("0.5", "0.3")
PLACEMENTS = ("after", "in_prompt")
TASKS = ("needle_in_prose", "keys_in_prose_2")
RULES = "a" * 64


@dataclass
class Table:
    caption: str = ""
    lines: list[list[str]] = field(default_factory=list)

    def line(self, *first: str) -> list[str]:
        (found,) = (line for line in self.lines if line[: len(first)] == list(first))
        return found


@dataclass
class Panel:
    """A picture: what its marks are called and where they stand, and its words with their places."""

    marks: list[tuple[str, float, float]] = field(default_factory=list)
    words: list[tuple[float, float, str]] = field(default_factory=list)


class Page(HTMLParser):
    """Fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.tables, self.notes = text, list[str](), list[Table](), list[str]()
        self.panels, self.attributes, self.titles = dict[str, Panel](), list[tuple[str, str, str]](), list[str]()
        self._said, self._place, self._caption, self._panel = "", (0.0, 0.0), "", Panel()
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
        elif tag in SAID and not (tag == "p" and {"th", "td"} & set(self.open)):
            self._said = ""
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
        self._said += data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())
        if tag in ("th", "td"):
            self.tables[-1].lines[-1].append(self._said)
        elif tag == "caption":
            self.tables[-1].caption = self._said
        elif tag in ("summary", "figcaption"):
            self._caption = self._said
        elif tag == "table" and not self.tables[-1].caption:
            self.tables[-1].caption = self._caption
        elif tag == "p":
            self.notes.append(self._said)
        elif tag in ("h2", "h3"):
            self.titles.append(self._said)
        elif tag == "title" and "svg" in self.open:
            self._panel.marks.append((self._said, *self._place))
        elif tag == "text" and self.panels and "figure" in self.open and "table" not in self.open:
            self._panel.words.append((*self._place, self._said))

    def table(self, caption: str) -> Table:
        (found,) = (table for table in self.tables if table.caption.startswith(caption))
        return found


def study_rows(contexts: int = 12, part: str = "confirm") -> list[Row]:
    """Two questions on each context, two tasks, placements and lengths; every number is drawn."""
    draw, rows = Random(7), list[Row]()
    for context in range(contexts):
        for task in TASKS:
            for placement in PLACEMENTS:
                for question in range(2):
                    row = {
                        "rules": RULES, "model": "m@0", "backend": "numpy", "spec_version": "0.3.0", "seed": 0,
                        "part": part, "task": task, "sample": f"{part}{context}{task}{question}",
                        "length": (1024, 2048)[context % 2], "placement": placement, "context": f"{task}{context}",
                        "question": question, "evidence_tokens": 4, "metadata": {"depth": draw.random()},
                        "seconds": {name: draw.uniform(0.1, 2) for name in ("prefill", *POLICIES, "random", "reading")},
                    }
                    rows.append({**row, "cells": list(cells(draw))})
    return rows


def cells(draw: Random) -> list[Row]:
    """Of one sample: the full cache is right nine times of ten, and no other likelihood is above its own."""
    found = [cell("fullcache", "1.0", -draw.random(), draw.random() < 0.9, 1.0, 1000.0)]
    found.append(cell("blind", "0", -8 - draw.random(), False, 0.0, 20.0))
    for budget in BUDGETS:
        for at, policy in enumerate((*POLICIES, "random", "evidence")):
            likelihood = -draw.uniform(0, 9 - 2 * at)
            kept = [draw.randrange(5) for _ in range(3)]
            size = 1000 * float(budget) * (1.02 if policy == "knorm" and budget == "0.3" else 1)
            found.append(cell(policy, budget, likelihood, likelihood > -3, kept, size))
    return found


def cell(policy: str, budget: str, likelihood: float, right: bool, kept: Any, size: float) -> Row:
    return {
        "policy": policy, "budget": budget, "likelihood": likelihood, "right": right, "exact": right,
        "evidence_kept": 4 * kept if isinstance(kept, float) else kept, "kept": size, "mean_cache": size + 20 * right,
        "peak_cache": 1000,
        "mean_bytes": size * 1000, "peak_bytes": 10**6, "divergence": 0.25, "lost_attention": 0.5,
    }
