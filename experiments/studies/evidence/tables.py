"""Tables and charts of a page about a study.

Tables show controls, cost, flagged cells, and at which stage a method loses evidence. Charts show results over kept
prompt tokens, paired differences, depths, and sweeps of a constant.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import log
from statistics import fmean, median
from typing import Any

import numpy as np

from experiments.studies.evidence.kept import BLIND, EVERY_CONTROL, EVIDENCE, FULL, RANDOM, RANDOMS
from experiments.studies.evidence.rules import AT_PROMPT, Stage
from experiments.studies.evidence.samples import ENDS, FLOOR, Samples
from experiments.studies.page import Curve, Html, forest, grid, note, panel, plots, section, shaded, table
from experiments.studies.report import SAME_CACHE, SIGNIFICANT, budget_tokens, format_p, title_of
from experiments.studies.results import Row
from models_integration.policies.methods import parse_policy
from reference.policies.names import is_built_in
from reference.statistics import holm
from spec.arrays import Int64, IntVector
from spec.errors import SpecError
from spec.parameters import PAPER

__all__ = [
    "budgets_of", "by_task", "controls", "curves_of", "depths", "differences", "failures", "flagged", "grouped",
    "lost_at", "off_budget", "policies_of", "seconds", "sizes", "stages", "sweeps", "swept",
]

def grouped(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Group rows with equal values in all named columns. Return the common values and the rows of each group."""
    result: dict[str, tuple[Row, list[Row]]] = {}
    for row in rows:
        about = {name: row.get(name) for name in names}
        result.setdefault(repr(about), (about, []))[1].append(row)
    return list(result.values())


def failures(rows: Sequence[Row]) -> Html:
    """Return a table of the samples whose last attempt failed."""
    lines = [[title_of(row["task"]), str(row["index"]), row["error"]] for row in rows]
    caption = "Failed samples. No result on this page includes them"
    return section("Failed", table(caption, ["task", "number", "error"], lines) if lines else "")


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
    result = dict[tuple[str, str], float]()
    for budget in budgets_of(samples):
        kept = {cell: samples.prompt_kept(cell) for cell in samples.cells if cell[1] == budget}
        result |= {cell: tokens / median(kept.values()) - 1 for cell, tokens in kept.items()}
    return {cell: part for cell, part in result.items() if abs(part) > SAME_CACHE and cell[0] not in (FULL, BLIND)}


def flagged(samples: Samples) -> str:
    """Return the table of the cells that are not compared, or "" if there are none."""
    lines = [[*cell, _kept(samples, cell), f"{part:+.1%}"] for cell, part in off_budget(samples).items()]
    caption = f"Kept prompt tokens more than {SAME_CACHE:.0%} off the median. These policies are never called best"
    headings = ["policy", "budget", "prompt tokens kept, of budget", "off the median by"]
    return table(caption, headings, lines) if lines else ""


def _kept(samples: Samples, cell: tuple[str, str]) -> str:
    """Return the mean of the kept prompt tokens with the smallest and the largest set, and the mean budget."""
    policy, budget = cell
    pairs = [(row, one) for row in samples.rows for one in row["cells"] if (one["policy"], one["budget"]) == cell]
    sizes = [int(size) for _, one in pairs for size in np.ravel(one["kept"])]
    if not sizes:
        return ""
    mean, least, most = f"{samples.prompt_kept(cell):.1f}", min(sizes), max(sizes)
    text = mean if least == most else f"{mean} ({least} to {most})"
    if policy in (FULL, BLIND):
        return text
    return f"{text} of {fmean(budget_tokens(budget, row) for row, _ in pairs):.1f}"


def controls(samples: Samples) -> str:
    """Return the table of controls for each task and length."""
    lines, budgets = [], budgets_of(samples)
    drawn = [name for name in (*RANDOMS, EVIDENCE) if any(name == cell[0] for cell in samples.cells)]
    if not set(ENDS) & set(samples.cells):
        return ""
    for title, whole in by_task(samples).items():
        for length in sorted({row["length"] for row in whole.rows}):
            some = whole.where(length=(length,))
            measured = {cell: some.having(cell) for cell in ENDS}
            shares = [_figure(one.of(cell, "right").mean()) if one.rows else "" for cell, one in measured.items()]
            recovered = [some.recovery((name, budget)).value for name in drawn for budget in budgets]
            lines.append([title, length, len(some.rows), *shares, some.worth(), *map(_figure, recovered)])
    caption = (
        "'worth' is the log-likelihood of the answer with the full cache minus the log-likelihood without context, in"
        " nats."
    )
    if not samples.of_user:
        caption += (
            f" If the interval of 'worth' contains 0, there is no recovery. Accuracies count if the accuracy with the"
            f" full cache is at least {FLOOR}."
        )
    headings = [f"{name} at {budget}: recovery" for name in drawn for budget in budgets]
    return table(caption, ["task", "length", "n", "full", "blind", "worth", *headings], lines)


def _figure(value: float, digits: int = 2) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"


_KNOWN_MEDIAN = 3
"""Smallest number of prompts whose median time does not depend on the first prompt."""


def seconds(samples: Samples) -> str:
    """Return a table of the time of each policy's decisions about a prompt.

    The first use of a kernel compiles or loads the kernel. With _KNOWN_MEDIAN prompts, the median leaves this out.
    """
    if not samples.rows or "seconds" not in samples.rows[0]:
        return ""
    every = sorted({row["length"] for row in samples.rows})
    lengths, lines = {length: samples.where(length=(length,)).rows for length in every}, []
    backends = {cell["policy"]: cell["backend"] for row in samples.rows for cell in row["cells"] if "backend" in cell}
    for name in dict.fromkeys(name for row in samples.rows for name in row["seconds"]):
        line = [name]
        for rows in lengths.values():
            timed = [row["seconds"] for row in _prompts(rows) if {name, "prefill"} <= row["seconds"].keys()]
            spent, prefill = (median(each[what] for each in timed) if timed else np.nan for what in (name, "prefill"))
            line += [_figure(spent, 3), _figure(spent / prefill, 3)]
        lines.append([*line, *([backends.get(name, "")] if backends else [])])
    headings = [f"{text}{length}" for length in lengths for text in ("s at ", "share of prefill at ")]
    caption = (
        "Median seconds of a prompt: 'prefill' reads the prompt, each policy decides for all budgets, and 'reading'"
        " answers"
    )
    if min(len(_prompts(rows)) for rows in lengths.values()) < _KNOWN_MEDIAN:
        caption += ". The first prompt includes the first use of each kernel, which can take seconds"
    return table(caption, ["", *headings, *(["backend"] if backends else [])], lines)


def _prompts(rows: Sequence[Row]) -> list[Row]:
    """Return one row of each prompt. Questions about the same prompt have the same times."""
    return list({(row["context"], row["placement"]): row for row in reversed(rows)}.values())


def sizes(samples: Samples) -> str:
    """Return a table of all cells with cache bytes and losses other than answers."""
    lines = []
    for cell in samples.cells:
        some = samples.having(cell)
        mean, peak = (some.of(cell, name).mean() / 1e6 for name in ("mean_bytes", "peak_bytes"))
        others = [_figure(some.of(cell, name).mean(), 3) for name in ("divergence", "lost_attention")]
        figures = [_figure(samples.share(cell)), f"{mean:.2f}", f"{peak:.2f}", *others]
        answers = [samples.accuracy(cell), _kept(some, cell), _right_and_unlikely(samples, cell)]
        lines.append([*cell, *figures, len(some.rows), *answers])
    headings = [
        "policy", "budget", "share of the full cache", "mean MB", "peak MB", "KL, nats", "attention lost", "n",
        "accuracy", "prompt tokens kept, of budget", "right, but unlikely",
    ]
    caption = (
        "Cache size while answering, divergence from the full cache, attention to evicted keys, and right answers."
        " 'right, but unlikely' counts right answers with less than half the likelihood of the full cache"
    )
    return table(caption, headings, lines, folded=True)


def _right_and_unlikely(samples: Samples, cell: tuple[str, str]) -> str:
    """Return the number of right answers for which less than half of the gold answer's likelihood remains."""
    some = samples.having(cell, ENDS[0])
    if not some.rows or not some.worth().known:
        return ""
    lost = some.of(ENDS[0], "likelihood") - some.of(cell, "likelihood")
    return str(int(((some.of(cell, "right") == 1) & (lost > log(2))).sum()))


def lost_at(samples: Samples, stages: Sequence[Stage], budget: str) -> Int64[IntVector, " n"]:
    """Return the index of the stage that loses the evidence, for each sample with evidence.

    Evidence is lost if less than half of its tokens is kept from this stage on. If the last stage keeps the evidence,
    the index is the number of stages.
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
    caption = "A sample loses the evidence at a stage if this and all later stages keep less than half of the evidence"
    return table(caption, ["budget", "stage", "evidence kept", "accuracy", "lost here"], lines) if lines else ""


FULL_CELL = FULL, "1.0"
_FEWEST = 5
"""Number of values from which a constant has a separate chart."""
_BINS = ("0\u2011¼", "¼\u2011½", "½\u2011¾", "¾\u20111")
"""Names of the quarters of the context in which the evidence can be; their hyphens do not break."""
_MEASURES = {
    "Accuracy": (Samples.accuracy, f"Share of right answers, for tasks with at least {FLOOR} with the full cache"),
    "Recovery": (
        Samples.recovery, "Recovery is (L - blind) / (full cache - blind). L, blind and full cache are mean"
        " log-likelihoods of the expected answer: with the policy, without the context, and with the full cache. Points"
        " of one budget are drawn slightly apart. Intervals end at the edge of the chart, but not in the tables."
    ),
    "Evidence kept": (Samples.survival, "Share of the evidence that the policy keeps, mean over layers and KV heads"),
}


def curves_of(placements: Mapping[str, Samples]) -> str:
    """Return a chart for each measure, task and placement, with one curve per policy over the kept prompt tokens."""
    every = [name for some in placements.values() for name in policies_of(some)]
    alone = {name for values in swept(every).values() for name in values.values()}
    names = [name for name in dict.fromkeys(every) if name not in alone]
    groups = []
    for title, (measure, about) in _MEASURES.items():
        grids = [
            grid([
                panel(f"{task}, {placement.lower()}, n = {len(some.rows)}", [
                    Curve(name, key, [
                        (budget, some.prompt_kept((name, budget)), measure(some, (name, budget)))
                        for budget in budgets_of(some)
                    ], name in EVERY_CONTROL) for key, name in enumerate(names)
                ], "prompt tokens kept", title.lower()) for task, some in by_task(whole).items()
            ]) for placement, whole in placements.items()
        ]
        if any(grids):
            user = measure is Samples.accuracy and all(some.of_user for some in placements.values())
            groups.append(section(title, note("Share of right answers." if user else about), *grids, level=3))
    return plots(names, groups, EVERY_CONTROL)


def swept(policies: Iterable[str]) -> dict[tuple[str, str], dict[float, str]]:
    """Return the policies that differ only in one numeric constant, by name and constant, then by value."""
    result: dict[tuple[str, str], dict[float, str]] = {}
    for policy in policies:
        name, constants = _spelled(policy)
        if len(constants) == 1 and isinstance(value := next(iter(constants.values())), int | float):
            result.setdefault((name, next(iter(constants))), {})[value] = policy
    return {each: dict(sorted(values.items())) for each, values in result.items() if len(values) >= _FEWEST}


def _spelled(policy: str) -> tuple[str, dict[str, Any]]:
    """Parse a policy's text. A control or a user's policy has no constants. No module is imported."""
    text = policy.removesuffix(AT_PROMPT)
    try:
        return parse_policy(text) if policy not in EVERY_CONTROL and is_built_in(text) else (policy, {})
    except SpecError:
        return policy, {}


def sweeps(samples: Samples) -> str:
    """Return a chart for each measure, task and swept constant, with one curve per budget over the values."""
    groups, budgets = [], budgets_of(samples)
    for (name, constant), values in swept(policies_of(samples)).items():
        if name == "crystalcache" and name in policies_of(samples):
            values = dict(sorted({**values, getattr(PAPER, constant): name}.items()))
        for title, (measure, _) in _MEASURES.items():
            groups.append(grid([
                panel(f"{task}: {name}", [
                    Curve(f"budget {budget}", key, [
                        (policy, value, measure(some, (policy, budget)))
                        for value, policy in values.items()
                    ]) for key, budget in enumerate(budgets)
                ], constant, title.lower()) for task, some in by_task(samples).items()
            ]))
    return plots([f"budget {budget}" for budget in budgets], filter(None, groups))


def differences(samples: Samples) -> str:
    """Return each policy's gain over the random control of equal granularity with equally many kept prompt tokens.
    All worthy tasks count together. If this control was not run, the control is `random`."""
    some, result = samples.worthy(), []
    off = off_budget(some)
    for budget in budgets_of(some):
        lines = []
        for name in (name for name in policies_of(some) if name not in RANDOMS):
            control = some.control((name, budget))
            control = control if (control, budget) in some.cells else RANDOM
            if ((control, budget) in off) is ((name, budget) in off):
                lines.append(([name, control], some.over((name, budget), (control, budget)), None))
        if any(one.known for _, one, _ in lines):
            result.append(forest(f"Budget {budget}", ["policy", "over"], lines))
    if not result:
        return right_answers(samples)
    tasks = ", ".join(by_task(some)).lower()
    about = f"Recovery minus the recovery of a random control. Tasks: {tasks}. n = {len(some.rows)}."
    return note(about) + grid(result, "grid broad") + right_answers(samples)


def right_answers(samples: Samples) -> Html:
    """Compare right answers in tasks without likelihoods with the full cache or the first policy (McNemar's test)."""
    result = []
    for title, some in by_task(samples).items():
        cells = [cell for cell in some.cells if cell[0] != BLIND and not some.worth().known]
        base = FULL_CELL if FULL_CELL in cells else next(iter(cells), FULL_CELL)
        pairs = {cell: pair for cell in cells if cell != base and (pair := some.pairs(cell, base))}
        corrected = holm({str(cell): pair.p for cell, pair in pairs.items()}) if pairs else {}
        if not pairs:
            continue
        n = min(pair.difference.n for pair in pairs.values())
        if (least := 2.0 ** (1 - n)) > SIGNIFICANT:
            about = f"{n} samples are too few for a significant difference: the smallest possible p is {least:g}."
            result.append(note(about, "warning"))
        result.append(forest(
            f"{title}, n = {n}. Compared with {' '.join(base)}: {some.answered(base)}. Exact McNemar test, Holm's"
            " correction",
            ["policy", "budget", "accuracy", "won", "lost", "p"], [
                (
                    [*cell, some.answered(cell), pair.won, pair.lost, format_p(corrected[str(cell)])],
                    pair.difference, None,
                ) for cell, pair in pairs.items()
            ],
        ))
    return Html("".join(result))


def depths(samples: Samples) -> str:
    """Return a heat map for each budget: evidence kept by each policy, by length and depth."""
    some = Samples([row for row in samples.with_evidence().rows if "depth" in row["metadata"]])
    if not some.rows:
        return ""
    at = np.minimum(len(_BINS) * np.array([row["metadata"]["depth"] for row in some.rows]), len(_BINS) - 1).astype(int)
    lengths, tokens = (np.array([row[name] for row in some.rows]) for name in ("length", "evidence_tokens"))
    places = {
        f"{length}: {name}": np.flatnonzero((lengths == length) & (at == number))
        for length in np.unique(lengths) for number, name in enumerate(_BINS)
    }
    maps = []
    for budget in budgets_of(some):
        kept = {name: some.kept((name, budget)) / tokens for name in policies_of(some) if (name, budget) in some.cells}
        shares = {name: [values[rows] for rows in places.values()] for name, values in kept.items()}
        lines = [[name, *(shaded(each[~np.isnan(each)]) for each in values)] for name, values in shares.items()]
        maps.append(table(f"Budget {budget}", ["", *places], lines, kind="heat"))
    counts = ", ".join(f"{len(rows)} at {place}" for place, rows in places.items())
    about = f"Mean share of the evidence that is kept, by prompt length and depth of the evidence. Samples: {counts}."
    return note(about) + grid(maps, "grid broad")
