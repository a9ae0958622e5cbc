"""Charts of a run: results over kept prompt tokens, paired differences, depths, and sweeps of a constant."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from models_integration.policies.methods import spelled
from models_integration.studies.estimate import SIGNIFICANT, format_p
from models_integration.studies.evidence.claims import FLOOR, Samples
from models_integration.studies.evidence.controls import BLIND, EVERY_CONTROL, FULL, RANDOM, RANDOMS
from models_integration.studies.evidence.rules import AT_PROMPT
from models_integration.studies.evidence.tables import budgets_of, by_task, off_budget, policies_of
from models_integration.studies.page import Curve, Html, forest, grid, note, panel, plots, section, shaded, table
from reference.statistics import holm
from spec.errors import SpecError
from spec.parameters import PAPER

__all__ = ["curves_of", "depths", "differences", "sweeps", "swept"]

FULL_CELL = FULL, "1.0"
_FEWEST = 5
"""Number of values from which a constant has a separate chart."""
_BINS = ("0\u2011¼", "¼\u2011½", "½\u2011¾", "¾\u20111")
"""Names of the quarters of the context in which the evidence can be; their hyphens do not break."""
_MEASURES = {
    "Accuracy": (Samples.accuracy, f"Right answers, where the full cache reaches {FLOOR}"),
    "Recovery": (
        Samples.recovery, "(log-likelihood of the gold answer - blind) / (full cache - blind), a ratio of means. Points"
        " of one budget are drawn a little apart, intervals cut at the picture's edge; the tables have them whole."
    ),
    "Evidence kept": (Samples.survival, "Share of the evidence's tokens, mean over layers and KV heads"),
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
            groups.append(section(title, note(about), *grids, level=3))
    return plots(names, groups, EVERY_CONTROL)


def swept(policies: Iterable[str]) -> dict[tuple[str, str], dict[float, str]]:
    """Return the policies that differ only in one numeric constant, by name and constant, then by value."""
    found: dict[tuple[str, str], dict[float, str]] = {}
    for policy in policies:
        name, constants = _spelled(policy)
        if len(constants) == 1 and isinstance(value := next(iter(constants.values())), int | float):
            found.setdefault((name, next(iter(constants))), {})[value] = policy
    return {each: dict(sorted(values.items())) for each, values in found.items() if len(values) >= _FEWEST}


def _spelled(policy: str) -> tuple[str, dict[str, Any]]:
    """Parse a policy's text. A control, or a user's policy that cannot be loaded, has no constants."""
    try:
        return (policy, {}) if policy in EVERY_CONTROL else spelled(policy.removesuffix(AT_PROMPT))
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
    some, found = samples.worthy(), []
    off = off_budget(some)
    for budget in budgets_of(some):
        lines = []
        for name in (name for name in policies_of(some) if name not in RANDOMS):
            control = some.control((name, budget))
            control = control if (control, budget) in some.cells else RANDOM
            if ((control, budget) in off) is ((name, budget) in off):
                lines.append(([name, control], some.over((name, budget), (control, budget)), None))
        if any(one.known for _, one, _ in lines):
            found.append(forest(f"Budget {budget}", ["policy", "over"], lines))
    if not found:
        return right_answers(samples)
    about = f"Recovery over that of a random control, paired; {', '.join(by_task(some)).lower()}; n = {len(some.rows)}."
    return note(about) + grid(found, "grid broad") + right_answers(samples)


def right_answers(samples: Samples) -> Html:
    """Compare right answers in tasks without likelihoods with the full cache or the first policy (McNemar's test)."""
    found = []
    for title, some in by_task(samples).items():
        cells = [cell for cell in some.cells if cell[0] != BLIND and not some.worth().known]
        base = FULL_CELL if FULL_CELL in cells else next(iter(cells), FULL_CELL)
        pairs = {cell: pair for cell in cells if cell != base and (pair := some.pairs(cell, base))}
        corrected = holm({str(cell): pair.p for cell, pair in pairs.items()}) if pairs else {}
        if not pairs:
            continue
        n = min(pair.difference.n for pair in pairs.values())
        if (least := 2.0 ** (1 - n)) > SIGNIFICANT:
            found.append(note(f"{n} samples cannot tell two policies apart: the smallest p is {least:g}.", "warning"))
        found.append(forest(
            f"{title}, n = {n}; {' '.join(base)}: {some.accuracy(base)}; p: McNemar's exact, by Holm",
            ["policy", "budget", "accuracy", "won", "lost", "p"], [
                (
                    [*cell, some.accuracy(cell), pair.won, pair.lost, format_p(corrected[str(cell)])],
                    pair.difference, None,
                ) for cell, pair in pairs.items()
            ],
        ))
    return Html("".join(found))


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
        shares = {name: [own[rows] for rows in places.values()] for name, own in kept.items()}
        lines = [[name, *(shaded(each[~np.isnan(each)]) for each in own)] for name, own in shares.items()]
        maps.append(table(f"Budget {budget}", ["", *places], lines, kind="heat"))
    counts = ", ".join(f"{len(rows)} at {place}" for place, rows in places.items())
    about = f"Mean share of evidence kept, by length and depth of the evidence. Samples: {counts}."
    return note(about) + grid(maps, "grid broad")
