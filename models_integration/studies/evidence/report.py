"""A study's page: its claims, what the full cache can do, and every policy against its mean cache; with pictures."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models_integration.cache.atomic_file import publish_readable
from models_integration.studies.evidence.claims import FLOOR, SAME_CACHE, Estimate, Samples, Verdict, verdicts
from models_integration.studies.evidence.kept import BLIND, FULL
from models_integration.studies.evidence.pictures import draw_policies, draw_swept, swept
from models_integration.studies.evidence.rules import PARTS, Rules
from models_integration.studies.evidence.stages import lost_at
from models_integration.studies.report import markdown_text, title_of
from models_integration.studies.results import Row

__all__ = ["page", "write_report"]


def write_report(rules: Rules, rows: Sequence[Row], out: Path) -> list[Path]:
    """The page of the rules' rows, and pictures of each placement; the names carry the rules' digest.

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
            title = f"{rules.title}: question {placement.replace('_', ' ')}"
            written.append(draw_policies(some, title, out / f"{stem}-{placement}.png"))
            for (name, constant), values in swept(rules.policies).items():
                path = out / f"{stem}-{placement}-{name}-{constant}.png"
                written.append(draw_swept(some, name, constant, values, title, path))
    return written


def page(rules: Rules, dev: Samples, confirm: Samples) -> str:
    """The page as Markdown."""
    shown, part = (confirm, PARTS[1]) if confirm.rows else (dev, PARTS[0])
    first = shown.rows[0]
    head = (
        f"# {rules.title}\n\nPart: {part}. {first['model']}, backend {first['backend']}, {len(shown.rows)} rows of"
        f" {int(shown.clusters.max()) + 1} contexts. Rules {rules.digest}.{_uncontrolled(first)}\n"
    )
    tables = [_ceilings(rules, shown)]
    if rules.claims and confirm.rows:
        tables.insert(0, _claims(verdicts(rules.claims, dev, confirm)))
    for placement in rules.placements:
        some = shown.where(placement=(placement,))
        tables += [_policies(some, placement), _stages(rules, some, placement)]
    return "\n".join([head, *filter(None, tables)])


def _uncontrolled(row: Row) -> str:
    used = row.get("calibration")
    if used is None or used["controlled"]:
        return ""
    return f" **Uncontrolled**: calibration {used['digest']} does not say over which text it was taken."


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


def _stages(rules: Rules, samples: Samples, placement: str) -> str:
    """How many samples lose their evidence at each stage, by budget."""
    lines = []
    for budget in rules.budgets if rules.stages and samples.rows else ():
        counts = np.bincount(lost_at(samples, rules.stages, budget), minlength=len(rules.stages) + 1)
        for stage, count in zip(rules.stages, counts, strict=False):
            estimates = [measure((stage.policy, budget)) for measure in (samples.survival, samples.accuracy)]
            lines.append([budget, stage.name, *map(_estimate, estimates), str(count)])
        lines.append([budget, "kept to the end", "", "", str(counts[-1])])
    note = "A sample's evidence is lost at the stage from which on less than half of its tokens is kept."
    title = f"## Stages, question {placement.replace('_', ' ')}\n\n{note}"
    return markdown_text(title, ["budget", "stage", "evidence kept", "accuracy", "lost here"], lines) if lines else ""


def _estimate(one: Estimate) -> str:
    return "" if math.isnan(one.value) else f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"


def _p(p: float | None) -> str:
    return "" if p is None else f"{p:.4f}"
