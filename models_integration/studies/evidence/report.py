"""A study's page: its claims, what the full cache can do, and every policy against its mean cache; with pictures."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from models_integration.cache.atomic_file import publish_readable
from models_integration.studies.evidence.claims import FLOOR, SAME_CACHE, Estimate, Samples, Verdict, verdicts
from models_integration.studies.evidence.kept import BLIND, FULL
from models_integration.studies.evidence.rules import PARTS, Rules
from models_integration.studies.report import markdown_text, new_figure, save, title_of
from models_integration.studies.results import Row

__all__ = ["page", "write_report"]

_MEASURES = ("accuracy", "recovery", "survival")
_MARKERS = "osv^<>DPX*dph"


def write_report(rules: Rules, rows: Sequence[Row], out: Path) -> list[Path]:
    """The page of the rules' rows, and a picture of each placement; the names carry the rules' digest.

    It is about the confirming samples, where there are any, and otherwise about the dev samples, which decide nothing.
    """
    dev, confirm = (Samples([row for row in rows if row["part"] == part]) for part in PARTS)
    shown, part = (confirm, PARTS[1]) if confirm.rows else (dev, PARTS[0])
    stem = f"study-{rules.digest[:8]}-{part}"
    written = [out / f"{stem}.md"]
    publish_readable(written[0], page(rules, dev, confirm).encode())
    for placement in rules.placements:
        some = shown.where(placement=(placement,))
        if some.rows and rules.budgets:
            written.append(_draw(rules, some, placement, out / f"{stem}-{placement}.png"))
    return written


def page(rules: Rules, dev: Samples, confirm: Samples) -> str:
    """The page as Markdown."""
    shown, part = (confirm, PARTS[1]) if confirm.rows else (dev, PARTS[0])
    first = shown.rows[0]
    head = (
        f"# {rules.title}\n\nPart: {part}. {first['model']}, backend {first['backend']}, {len(shown.rows)} rows of"
        f" {int(shown.clusters.max()) + 1} contexts. Rules {rules.digest}.\n"
    )
    tables = [_ceilings(rules, shown)]
    if rules.claims and confirm.rows:
        tables.insert(0, _claims(verdicts(rules.claims, dev, confirm)))
    for placement in rules.placements:
        tables.append(_policies(shown.where(placement=(placement,)), placement))
    return "\n".join([head, *filter(None, tables)])


def _claims(decided: Sequence[Verdict]) -> str:
    lines = [
        [
            one.claim.name, one.kind, one.claim.measure, f"{one.claim.difference:g}", _estimate(one.difference),
            *map(_p, (one.p, one.mid_p, one.corrected)), f"{one.power:.2f}", one.flag,
        ]
        for one in decided
    ]
    headings = ["claim", "kind", "of", "smallest", "difference", "p", "mid-p", "p (Holm)", "power", "outside"]
    note = f"Policies whose mean caches differ by more than {SAME_CACHE:.0%} are not compared."
    return markdown_text(f"## Claims\n\n{note}", headings, lines)


def _ceilings(rules: Rules, samples: Samples) -> str:
    lines = []
    for task in rules.tasks:
        for length in rules.lengths:
            for placement in rules.placements:
                some = samples.where(task=(task,), length=(length,), placement=(placement,))
                if some.rows:
                    lines.append([title_of(task), str(length), placement, *_ends(some)])
    headings = ["task", "length", "question", "n", "full", "blind", "worth of the context, nats"]
    note = (
        f"Accuracies count where the full cache reaches {FLOOR}. A context's worth is the answer's log-likelihood with"
        " the full cache above that without context; where its interval holds 0, there is no recovery."
    )
    return markdown_text(f"## Full cache and no context\n\n{note}", headings, lines)


def _ends(some: Samples) -> list[str]:
    full, blind = (FULL, "1.0"), (BLIND, "0")
    right = [some.of(cell, "right").mean() for cell in (full, blind)]
    return [str(len(some.rows)), *("" if math.isnan(x) else f"{x:.2f}" for x in right), _estimate(some.worth())]


def _policies(samples: Samples, placement: str) -> str:
    lines = []
    tasks = {task: samples.where(task=(task,)) for task in dict.fromkeys(row["task"] for row in samples.rows)}
    for cell in samples.cells:
        estimates = samples.accuracy(cell), samples.survival(cell), *(one.recovery(cell) for one in tasks.values())
        means = [samples.of(cell, name).mean() for name in ("divergence", "lost_attention")]
        lines.append([
            *cell, f"{samples.share(cell):.3f}", *map(_estimate, estimates), *(f"{mean:.3f}" for mean in means)
        ])
    recovered = [f"recovery: {title_of(task).lower()}" for task in tasks]
    headings = ["policy", "budget", "mean cache", "accuracy", "evidence kept", *recovered, "KL", "attention lost"]
    return markdown_text(f"## Question {placement.replace('_', ' ')}", headings, lines) if lines else ""


def _estimate(one: Estimate) -> str:
    return "" if math.isnan(one.value) else f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"


def _p(p: float | None) -> str:
    return "" if p is None else f"{p:.4f}"


def _draw(rules: Rules, samples: Samples, placement: str, path: Path) -> Path:
    """A panel for each measure and task: a line per policy over its mean cache, with 95 % intervals."""
    tasks = [task for task in rules.tasks if samples.where(task=(task,)).rows]
    figure = new_figure(2.2 + 2.4 * len(tasks), 7.5, f"{rules.title}: question {placement.replace('_', ' ')}")
    panels = figure.subplots(len(_MEASURES), len(tasks), sharex=True, squeeze=False)
    for row, measure in zip(panels, _MEASURES, strict=True):
        for panel, task in zip(row, tasks, strict=True):
            _lines(panel, samples.where(task=(task,)), measure)
        row[0].set_ylabel("evidence kept" if measure == "survival" else measure, fontsize=8)
    for panel, task in zip(panels[0], tasks, strict=True):
        panel.set_title(title_of(task), fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("mean cache, part of the full one", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=7)
    return save(figure, path)


def _lines(panel: Axes, samples: Samples, measure: str) -> None:
    limited = [cell for cell in samples.cells if cell[0] not in (FULL, BLIND)]
    for at, policy in enumerate(dict.fromkeys(name for name, _ in limited)):
        cells = [cell for cell in limited if cell[0] == policy]
        each = [getattr(samples, measure)(cell) for cell in cells]
        ends = [[abs(one.low - one.value) for one in each], [abs(one.high - one.value) for one in each]]
        panel.errorbar(
            [samples.share(cell) for cell in cells], [one.value for one in each], yerr=ends, label=policy,
            marker=_MARKERS[at % len(_MARKERS)], color=f"C{at % 10}", ls="-" if at < 10 else ":", ms=3, lw=1,
            elinewidth=0.5,
        )
    panel.tick_params(labelsize=7)
    panel.grid(color="0.9", lw=0.6)
    panel.spines[["top", "right"]].set_visible(False)
