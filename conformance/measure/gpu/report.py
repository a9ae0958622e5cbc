"""What was measured, as a page and as JSON: figures beside their goals, and what was not run."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number and what it should be; `at_least` turns the goal round."""

    what: str
    value: float | None
    unit: str
    goal: float | None = None
    aim: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        if self.goal is None:
            return ""
        if self.value is None:
            return "not measured"
        met = self.value >= self.goal if self.at_least else self.value <= self.goal
        return "met" if met else "**missed**"

    def line(self) -> str:
        """A row of the page."""
        sign = ">=" if self.at_least else "<="
        aim = "" if self.aim is None else f" (aim {self.aim:g})"
        goal = "" if self.goal is None else f"{sign} {self.goal:g}{aim}"
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        return f"| {self.what} | {value} | {goal} | {self.verdict} |"


@dataclass(frozen=True)
class Table:
    """A table of its own, under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """As the page has it."""
        body = [self.columns, ("---",) * len(self.columns), *self.rows]
        return [f"## {self.title}", "", *(f"| {' | '.join(row)} |" for row in body), ""]


@dataclass
class Report:
    """Filled part by part; it can be written at any time."""

    header: dict[str, str]
    dry: bool
    parts: dict[str, str] = field(default_factory=dict)
    """What became of each part."""
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, what: str, value: float | None, unit: str, goal: float | None = None, aim: float | None = None,
        at_least: bool = False,
    ) -> None:
        """Note a figure; a dry run has no goals."""
        figure = Figure(what, value, unit, *((None, None) if self.dry else (goal, aim)), at_least)
        print(f"    {figure.line()}", flush=True)
        self.figures.append(figure)

    def page(self) -> str:
        """Markdown."""
        title = "# Dry run: sizes are tiny, the figures say nothing" if self.dry else f"# {self.header['device']}"
        lines = [title, "", *(f"- {name}: {value}" for name, value in self.header.items()), ""]
        lines += ["| part | outcome |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in self.parts.items()), ""]
        if self.figures:
            lines += ["## Figures", "", "| what | measured | goal | |", "| --- | --- | --- | --- |"]
            lines += [*(figure.line() for figure in self.figures), ""]
        for table in self.tables:
            lines += table.lines()
        return "\n".join([*lines, *(f"- {note}" for note in self.notes), ""])

    def record(self) -> dict[str, Any]:
        """The same for programs."""
        figures = [{**asdict(figure), "verdict": figure.verdict.strip("*")} for figure in self.figures]
        return {**asdict(self), "figures": figures}

    def write(self, folder: Path, name: str) -> Path:
        """Both files; returns the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
        page = folder / f"{name}.md"
        page.write_text(self.page(), encoding="utf-8")
        return page
