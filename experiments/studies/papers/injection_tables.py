"""Tables of the paper on cross-session injection: sessions of the arms, and numbers from rows."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import median

import numpy as np

from experiments.studies.papers.injection import Session, Template
from experiments.studies.report import SEED, format_p, mean_of, share_of
from experiments.studies.results import Row
from reference.statistics import bootstrap, draws, mcnemar
from spec.arrays import Float64, Vector

__all__ = ["CACHEBLEND", "LOCOMO", "NOT_RUN", "InjectionTable", "filled_lines", "interaction", "tables_of"]

_HEADINGS = (
    "arm", "r@1 or F1 [95 %]", "difference from the first arm", "bootstrap 95 %", "McNemar exact p", "Pr > 0",
    "discordant (first arm / arm)", "ms to the first token", "published", "difference (published)",
)
_PROBES = {
    "attention": {"entropy": "entropy in nats", "sinks": "attention to positions 0 to 3"},
    "keys": {"cosine": "cosine", "unrotated": "cosine without rotation"},
}
"""Names of a layer's numbers in rows of probes, and headings in tables, by measure."""
NOT_RUN = (
    "Not run: eager attention of Table 1 (give --attn eager), Table 3 (give a base model with --model), Appendix C"
    " (potion), Appendix F (DeepSeek)."
)
LOCOMO = "locomo"
"""Name of the table for questions from a file."""
CACHEBLEND = "cacheblend"
"""Name of the table that the paper does not have."""
_RESAMPLES = 10_000
_FILE = Path(__file__).with_name("data") / "injection.toml"


@dataclass(frozen=True)
class InjectionTable:
    """Table of the paper.

    Attributes:
        name: name for the option `--part`.
        arms: sessions by name in the paper. Differences are relative to the first session.
        published: published numbers, by arm.
        measure: "right" (fraction), "f1" (mean), or for probes by layer "attention" or "keys".
    """

    name: str
    title: str
    arms: Mapping[str, Session]
    published: Mapping[str, float]
    note: str = ""
    measure: str = "right"

    @property
    def headings(self) -> Sequence[str]:
        """Return the headings of the columns."""
        if self.measure not in _PROBES:
            return _HEADINGS
        return "arm", "layer", *(f"{name} [95 %]" for name in _PROBES[self.measure].values())


def tables_of(template: Template) -> Sequence[InjectionTable]:
    """Return the tables for a model with this chat template."""
    wrappers = {name: {"wrapper": name} for name in template.wrappers}
    return [
        InjectionTable(**{
            "published": {}, **row,
            "arms": {name: Session(**fields) for name, fields in row.get("arms", wrappers).items()},
        })
        for row in tomllib.loads(_FILE.read_text(encoding="utf-8"))["table"]
    ]


def filled_lines(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> Iterator[list[str]]:
    """Yield the lines of a table. `rows` has the rows of each session, in the order of the questions."""
    if table.measure in _PROBES:
        yield from _layers(table, rows)
        return
    (first, base), *_ = table.arms.items()
    reference = _figures(rows[base.name], table.measure)
    for name, session in table.arms.items():
        figures, n = _figures(rows[session.name], table.measure), len(reference)
        share = share_of(int(figures.sum()), n) if table.measure == "right" else mean_of(figures, _RESAMPLES)
        published, before = table.published.get(name, nan), table.published.get(first, nan)
        line = [name, share.text(".3f")]
        line += ["", "", "", "", ""] if name == first else _compared(figures - reference, table.measure)
        line += [
            f"{1000 * median(row['seconds'] for row in rows[session.name]):.1f}",
            "" if isnan(published) else f"{published:g}",
            "" if name == first or isnan(published - before) else f"{published - before:+.3f}",
        ]
        yield line


def _layers(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> Iterator[list[str]]:
    """Yield a line with the mean over layers for each arm, and a line for each layer."""
    for arm, session in table.arms.items():
        each = [np.array([row[name] for row in rows[session.name]]) for name in _PROBES[table.measure]]
        each = [np.hstack([one.mean(1, keepdims=True), one]) for one in each]
        for at in range(each[0].shape[1]):
            name = str(at - 1) if at else "all"
            yield [arm, name, *(mean_of(one[:, at], _RESAMPLES).text(".3f") for one in each)]


def _figures(rows: Sequence[Row], measure: str = "right") -> Float64[Vector, " n"]:
    return np.array([float(row[measure]) for row in rows])


def _bootstrap(figures: Float64[Vector, " n"]) -> tuple[float, float, float]:
    return bootstrap(figures, draws(len(figures), _RESAMPLES, SEED))


def _compared(difference: Float64[Vector, " n"], measure: str) -> list[str]:
    lost, won = int((difference < 0).sum()), int((difference > 0).sum())
    low, high, positive = _bootstrap(difference)
    return [
        f"{difference.mean():+.3f}", f"[{low:+.3f}, {high:+.3f}]",
        format_p(mcnemar(lost, won)) if measure == "right" else "", f"{positive:.2f}", f"{lost} / {won}",
    ]


def interaction(table: InjectionTable, rows: Mapping[str, Sequence[Row]]) -> str:
    """Return a sentence about the additional effect of markers at sentence ends, or "" for different tables."""
    if table.name != "table-2":
        return ""
    A, B, C, D = (_figures(rows[session.name]) for session in table.arms.values())
    difference = (D - C) - (B - A)
    low, high, _ = _bootstrap(difference)
    return f"Interaction (D - C) - (B - A): {difference.mean():+.3f} [{low:+.3f}, {high:+.3f}]."
