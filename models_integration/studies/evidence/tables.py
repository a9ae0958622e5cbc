"""Tables of a study's page: controls, cost, flagged cells, and where a method loses evidence."""

from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from models_integration.studies.estimate import SAME_CACHE
from models_integration.studies.evidence.claims import ENDS, FLOOR, Samples
from models_integration.studies.evidence.kept import BLIND, CONTROLS, EVIDENCE, FULL, RANDOM
from models_integration.studies.evidence.rules import Stage
from models_integration.studies.evidence.stages import lost_at
from models_integration.studies.page.elements import note, table
from models_integration.studies.report import title_of

__all__ = [
    "budgets_of", "by_task", "controls", "flagged", "off_budget", "policies_of", "seconds", "sizes", "stages",
]


def by_task(samples: Samples) -> dict[str, Samples]:
    """The samples of each task, by its title."""
    return {title_of(task): samples.where(task=(task,)) for task in dict.fromkeys(row["task"] for row in samples.rows)}


def policies_of(samples: Samples) -> list[str]:
    """Those that have budgets, controls last."""
    names = dict.fromkeys(name for name, _ in samples.cells if name not in (FULL, BLIND))
    return sorted(names, key=lambda name: name in CONTROLS)


def budgets_of(samples: Samples) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(budget for name, budget in samples.cells if name not in (FULL, BLIND)))


def off_budget(samples: Samples) -> dict[tuple[str, str], float]:
    """Cells that keep more or fewer prompt tokens than the middle cell of their budget, and by what part."""
    found = dict[tuple[str, str], float]()
    for budget in budgets_of(samples):
        kept = {cell: samples.prompt_kept(cell) for cell in samples.cells if cell[1] == budget}
        found |= {cell: tokens / median(kept.values()) - 1 for cell, tokens in kept.items()}
    return {cell: part for cell, part in found.items() if abs(part) > SAME_CACHE and cell[0] not in (FULL, BLIND)}


def flagged(samples: Samples) -> str:
    """What is not compared."""
    lines = [[*cell, f"{samples.prompt_kept(cell):.1f}", f"{part:+.1%}"] for cell, part in off_budget(samples).items()]
    caption = f"More than {SAME_CACHE:.0%} off the middle number of prompt tokens kept; never called best"
    return table(caption, ["policy", "budget", "prompt tokens kept", "off by"], lines) if lines else note("None.")


def controls(samples: Samples) -> str:
    """What the ceilings and floors of each task and length are."""
    lines, budgets = [], budgets_of(samples)
    for title, whole in by_task(samples).items():
        for length in sorted({row["length"] for row in whole.rows}):
            some = whole.where(length=(length,))
            right = [some.of(cell, "right") if cell in some.cells else np.array([np.nan]) for cell in ENDS]
            shares = [_two(float(each.mean())) for each in right]
            recovered = [some.recovery((name, budget)).value for name in (RANDOM, EVIDENCE) for budget in budgets]
            lines.append([title, length, len(some.rows), *shares, some.worth(), *map(_two, recovered)])
    caption = (
        f"Accuracies count where the full cache reaches {FLOOR}. Worth: log-likelihood of the answer with the full"
        " cache above that without context, nats; where its interval holds 0, there is no recovery."
    )
    headings = [f"{name} at {budget}: recovery" for name in (RANDOM, EVIDENCE) for budget in budgets]
    return table(caption, ["task", "length", "n", "full", "blind", "worth", *headings], lines)


def _two(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"


def seconds(samples: Samples) -> str:
    """What each policy's decisions take of a prompt."""
    if not samples.rows or "seconds" not in samples.rows[0]:
        return ""
    every = sorted({row["length"] for row in samples.rows})
    lengths, lines = {length: samples.where(length=(length,)).rows for length in every}, []
    for name in samples.rows[0]["seconds"]:
        line = [name]
        for rows in lengths.values():
            spent, prefill = (fmean(row["seconds"][what] for row in rows) for what in (name, "prefill"))
            line += [f"{spent:.3f}", f"{spent / prefill:.3f}"]
        lines.append(line)
    headings = [f"{text}{length}" for length in lengths for text in ("s at ", "part of prefill at ")]
    caption = "Mean seconds: a prefill; scoring and selecting at all budgets; reading of all cells together."
    return table(caption, ["", *headings], lines)


def sizes(samples: Samples) -> str:
    """Bytes, and what is lost beside the answer: every cell."""
    lines = []
    for cell in samples.cells:
        mean, peak = (samples.of(cell, name).mean() / 1e6 for name in ("mean_bytes", "peak_bytes"))
        others = [f"{samples.of(cell, name).mean():.3f}" for name in ("divergence", "lost_attention")]
        lines.append([*cell, _two(samples.share(cell)), f"{mean:.2f}", f"{peak:.2f}", *others])
    headings = ["policy", "budget", "part of the full cache", "mean MB", "peak MB", "KL, nats", "attention lost"]
    caption = "Cache while answering, divergence from the full cache, attention on evicted keys"
    return table(caption, headings, lines, folded=True)


def stages(named: Sequence[Stage], samples: Samples) -> str:
    """How many samples lose their evidence at each stage, by budget."""
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
