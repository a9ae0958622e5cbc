"""Tables of a study's page: controls, cost, flagged cells, and at which stage a method loses evidence."""

from collections.abc import Sequence
from math import log
from statistics import fmean, median

import numpy as np

from models_integration.studies.estimate import SAME_CACHE
from models_integration.studies.evidence.claims import ENDS, FLOOR, Samples
from models_integration.studies.evidence.controls import BLIND, EVERY_CONTROL, EVIDENCE, FULL, RANDOMS
from models_integration.studies.evidence.rules import Stage
from models_integration.studies.page import Html, note, section, table
from models_integration.studies.report import title_of
from models_integration.studies.results import Row
from spec.arrays import Int64, IntVector

__all__ = [
    "budgets_of", "by_task", "controls", "failures", "flagged", "grouped", "lost_at", "off_budget", "policies_of",
    "seconds", "sizes", "stages",
]


def grouped(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Group rows with equal values in all named columns. Return the common values and the rows of each group."""
    found: dict[str, tuple[Row, list[Row]]] = {}
    for row in rows:
        about = {name: row.get(name) for name in names}
        found.setdefault(repr(about), (about, []))[1].append(row)
    return list(found.values())


def failures(rows: Sequence[Row]) -> Html:
    """Return a table of the samples whose last attempt failed."""
    lines = [[title_of(row["task"]), str(row["index"]), row["error"]] for row in rows]
    return section("Failed", table("Left out of all figures", ["task", "number", "error"], lines) if lines else "")


def by_task(samples: Samples) -> dict[str, Samples]:
    """Return the samples of each task, by the task's title."""
    return {title_of(task): samples.where(task=(task,)) for task in dict.fromkeys(row["task"] for row in samples.rows)}


def policies_of(samples: Samples) -> list[str]:
    """Return the policies and controls with budgets, controls last."""
    names = dict.fromkeys(name for name, _ in samples.cells if name not in (FULL, BLIND))
    return sorted(names, key=lambda name: name in EVERY_CONTROL)


def budgets_of(samples: Samples) -> list[str]:
    """Return the budgets in the order of measurement."""
    return list(dict.fromkeys(budget for name, budget in samples.cells if name not in (FULL, BLIND)))


def off_budget(samples: Samples) -> dict[tuple[str, str], float]:
    """Return the relative difference of cells whose number of kept prompt tokens differs from the budget's median."""
    found = dict[tuple[str, str], float]()
    for budget in budgets_of(samples):
        kept = {cell: samples.prompt_kept(cell) for cell in samples.cells if cell[1] == budget}
        found |= {cell: tokens / median(kept.values()) - 1 for cell, tokens in kept.items()}
    return {cell: part for cell, part in found.items() if abs(part) > SAME_CACHE and cell[0] not in (FULL, BLIND)}


def flagged(samples: Samples) -> str:
    """Return a note about cells that are not compared."""
    lines = [[*cell, f"{samples.prompt_kept(cell):.1f}", f"{part:+.1%}"] for cell, part in off_budget(samples).items()]
    caption = f"More than {SAME_CACHE:.0%} off the middle number of prompt tokens kept; never called best"
    return table(caption, ["policy", "budget", "prompt tokens kept", "off by"], lines) if lines else note("None.")


def controls(samples: Samples) -> str:
    """Return the table of controls for each task and length."""
    lines, budgets = [], budgets_of(samples)
    drawn = [name for name in (*RANDOMS, EVIDENCE) if any(name == cell[0] for cell in samples.cells)]
    if not set(ENDS) & set(samples.cells):
        return ""
    for title, whole in by_task(samples).items():
        for length in sorted({row["length"] for row in whole.rows}):
            some = whole.where(length=(length,))
            measured = [some.having(cell) for cell in ENDS]
            shares = [
                _two(own.of(cell, "right").mean()) if own.rows else "" for own, cell in zip(measured, ENDS, strict=True)
            ]
            recovered = [some.recovery((name, budget)).value for name in drawn for budget in budgets]
            lines.append([title, length, len(some.rows), *shares, some.worth(), *map(_two, recovered)])
    caption = (
        f"Accuracies count where the full cache reaches {FLOOR}. Worth: log-likelihood of the answer with the full"
        " cache above that without context, nats; where its interval holds 0, there is no recovery."
    )
    headings = [f"{name} at {budget}: recovery" for name in drawn for budget in budgets]
    return table(caption, ["task", "length", "n", "full", "blind", "worth", *headings], lines)


def _two(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"


def _three(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"


def seconds(samples: Samples) -> str:
    """Return a table of the time of each policy's decisions about a prompt."""
    if not samples.rows or "seconds" not in samples.rows[0]:
        return ""
    every = sorted({row["length"] for row in samples.rows})
    lengths, lines = {length: samples.where(length=(length,)).rows for length in every}, []
    for name in dict.fromkeys(name for row in samples.rows for name in row["seconds"]):
        line = [name]
        for rows in lengths.values():
            own = [row["seconds"] for row in rows if name in row["seconds"]] or [{name: np.nan, "prefill": np.nan}]
            spent, prefill = (fmean(each[what] for each in own) for what in (name, "prefill"))
            line += [_three(spent), _three(spent / prefill)]
        lines.append(line)
    headings = [f"{text}{length}" for length in lengths for text in ("s at ", "part of prefill at ")]
    caption = "Mean seconds: a prefill; scoring and selecting at all budgets; reading of all cells together."
    return table(caption, ["", *headings], lines)


def sizes(samples: Samples) -> str:
    """Return a table of all cells with cache bytes and losses other than answers."""
    lines = []
    for cell in samples.cells:
        some = samples.having(cell)
        mean, peak = (some.of(cell, name).mean() / 1e6 for name in ("mean_bytes", "peak_bytes"))
        others = [_three(some.of(cell, name).mean()) for name in ("divergence", "lost_attention")]
        figures = [_two(samples.share(cell)), f"{mean:.2f}", f"{peak:.2f}", *others]
        answers = [samples.accuracy(cell), f"{some.prompt_kept(cell):.1f}", _right_and_unlikely(samples, cell)]
        lines.append([*cell, *figures, len(some.rows), *answers])
    headings = [
        "policy", "budget", "part of the full cache", "mean MB", "peak MB", "KL, nats", "attention lost", "n",
        "accuracy", "prompt tokens kept", "right, but unlikely",
    ]
    caption = (
        "Cache while answering, divergence from the full cache, attention on evicted keys, right answers. Right, but"
        " unlikely: the answer is right and has less than half the full cache's likelihood."
    )
    return table(caption, headings, lines, folded=True)


def _right_and_unlikely(samples: Samples, cell: tuple[str, str]) -> str:
    """Return how many answers are right although less than half of the gold answer's likelihood remains."""
    some = samples.having(cell, ENDS[0])
    if not some.rows or not some.worth().known:
        return ""
    lost = some.of(ENDS[0], "likelihood") - some.of(cell, "likelihood")
    return str(int(((some.of(cell, "right") == 1) & (lost > log(2))).sum()))


def lost_at(samples: Samples, stages: Sequence[Stage], budget: str) -> Int64[IntVector, " n"]:
    """For each sample with evidence the stage that loses it: from there on less than half of its tokens is kept.

    The number of stages stands for none: the last one keeps it.
    """
    some = samples.with_evidence()
    tokens = np.array([row["evidence_tokens"] for row in some.rows])
    lost = np.zeros(len(some.rows), dtype=np.int64)
    for at, stage in enumerate(stages, 1):
        lost[some.kept((stage.policy, budget)) >= tokens / 2] = at
    return lost


def stages(named: Sequence[Stage], samples: Samples) -> str:
    """Return a table of how many samples lose the evidence at each stage, by budget."""
    lines = []
    for budget in budgets_of(samples):
        if not named or any((stage.policy, budget) not in samples.cells for stage in named):
            continue
        counts = np.bincount(lost_at(samples, named, budget), minlength=len(named) + 1)
        for stage, lost in zip(named, counts, strict=False):
            cell = stage.policy, budget
            lines.append([budget, stage.name, samples.survival(cell), samples.accuracy(cell), lost])
        lines.append([budget, "kept to the end", "", "", counts[-1]])
    caption = "A sample's evidence is lost at the stage from which on less than half of its tokens is kept."
    return table(caption, ["budget", "stage", "evidence kept", "accuracy", "lost here"], lines) if lines else ""
