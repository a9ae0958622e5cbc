"""The study's tables, from its rows alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conformance.measure.studies.archive.rules import ARMS
from conformance.measure.studies.decode.report import holm
from models_integration.archive.pins import same_pins
from models_integration.pocket.training.talk import KINDS
from models_integration.studies.results import Row
from reference.statistics import Interval, bootstrap, cluster_bootstrap, draws, mcnemar, mcnemar_power, wilson
from spec.arrays import Bool, BoolVector, Float64, Int64, IntVector, Vector

__all__ = ["Comparison", "Outcomes", "compared", "detectable", "interaction", "markdown", "outcomes", "penalised"]

PRIMARY, CEILING = "full", "text, full"
PENALTY = 0.075
POWER = 0.8
_RESAMPLES, _SEED = 10_000, 2026
_DISCORDANCES = (0.05, 0.1, 0.2, 0.4)


class Outcomes(NamedTuple):
    """The questions of all rows, in their order."""

    right: dict[str, Float64[Vector, " n"]]
    """1 or 0 by arm."""
    conversations: Int64[IntVector, " n"]
    """Numbered from 0."""
    kinds: Sequence[str]
    organic: Bool[BoolVector, " n"]
    selected: Bool[BoolVector, " n"]


def outcomes(rows: Sequence[Row]) -> Outcomes:
    """Raises OtherPins: when rows were made under different selections."""
    for cut in rows[0]["pins"]:
        same_pins(row["pins"][cut] for row in rows)
    questions = [(at, question) for at, row in enumerate(rows) for question in row["questions"]]
    return Outcomes(
        {arm: np.array([float(one["right"][arm]) for _, one in questions]) for arm in rows[0]["arms"]},
        np.array([at for at, _ in questions]), [one["kind"] for _, one in questions],
        np.array([one["organic"] for _, one in questions]), np.array([one["selected"] for _, one in questions]),
    )


@dataclass(frozen=True)
class Comparison:
    """An arm against its base, question by question."""

    mean: float
    paired: Interval
    clustered: Interval
    lost: int
    won: int
    p: float
    """Exact, not corrected."""


def compared(found: Outcomes, arm: str, base: str) -> Comparison:
    """Intervals of the paired bootstrap, and of the one over conversations."""
    difference = found.right[arm] - found.right[base]
    lost, won = int((difference < 0).sum()), int((difference > 0).sum())
    paired = bootstrap(difference, draws(len(difference), _RESAMPLES, _SEED))
    clustered = _clustered(found, difference)
    return Comparison(float(difference.mean()), paired, clustered, lost, won, mcnemar(lost, won))


def _clustered(found: Outcomes, difference: Float64[Vector, " n"]) -> Interval:
    drawn = draws(int(found.conversations.max()) + 1, _RESAMPLES, _SEED)
    return cluster_bootstrap(difference, found.conversations, drawn)


def interaction(found: Outcomes) -> tuple[float, Interval]:
    """Of the 2 x 2: what markers add at sentence ends beyond what they add at arbitrary places."""
    A, B, C, D = (found.right[cell] for cell in "ABCD")
    difference = (D - C) - (B - A)
    return float(difference.mean()), _clustered(found, difference)


def detectable(n: int, discordance: float) -> float | None:
    """The smallest difference that the exact test of n pairs finds with a power of 0.8; None where there is none."""
    if mcnemar_power(n, discordance, discordance) < POWER:
        return None
    low, high = 0.0, discordance
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if mcnemar_power(n, discordance, middle) >= POWER else (middle, high)
    return high


def penalised(found: Outcomes, share: float) -> Outcomes:
    """The paper's penalty: a share of the synthetic questions loses its retrieval, and with it every arm's answer."""
    synthetic = np.flatnonzero(~found.organic)
    lost = np.random.default_rng(_SEED).choice(synthetic, round(share * len(synthetic)), replace=False)
    right = {arm: np.where(np.isin(np.arange(len(each)), lost), 0.0, each) for arm, each in found.right.items()}
    return found._replace(right=right)


def _only(found: Outcomes, chosen: Bool[BoolVector, " n"]) -> Outcomes:
    """The chosen questions; conversations are numbered anew."""
    return Outcomes(
        {arm: each[chosen] for arm, each in found.right.items()},
        np.unique(found.conversations[chosen], return_inverse=True)[1].astype(np.int64),
        [kind for kind, one in zip(found.kinds, chosen, strict=True) if one],
        found.organic[chosen], found.selected[chosen],
    )


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    found = outcomes(rows)
    tables: list[Callable[[Outcomes], str]] = [_answers, _kinds]
    if {"raw", "full"} <= set(found.right):
        tables.append(_slices)
    if set("ABCD") <= set(found.right):
        tables.append(_factorial)
    tables.append(_powers)
    head = (
        f"n = {len(found.kinds)} questions of {len(rows)} conversations; the true chunk is among the selected ones for"
        f" {found.selected.mean():.3f}."
    )
    if CEILING in found.right:
        head += f" Of these, `{CEILING}` answers {found.right[CEILING][found.selected].mean():.3f}."
    return f"{head}\n\n" + "\n\n".join(table(found) for table in tables)


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _answers(found: Outcomes) -> str:
    """Every arm; Holm's correction is over all comparisons but the primary one."""
    pairs = {arm: ARMS[arm].base for arm in found.right if ARMS[arm].base in found.right}
    results = {arm: compared(found, arm, base) for arm, base in pairs.items()}
    corrected = holm({arm: result.p for arm, result in results.items() if arm != PRIMARY})
    lines = []
    for arm, right in found.right.items():
        low, high = wilson(int(right.sum()), len(right))
        cells = [ARMS[arm].family, arm, f"{right.mean():.3f} [{low:.2f} {high:.2f}]"]
        if arm in results:
            one = results[arm]
            cells += [
                pairs[arm], f"{one.mean:+.3f}", f"[{one.paired.low:+.3f} {one.paired.high:+.3f}]",
                f"[{one.clustered.low:+.3f} {one.clustered.high:+.3f}]", f"{one.clustered.positive:.2f}",
                f"{one.lost}, {one.won}", f"{one.p:.2g}", "primary" if arm == PRIMARY else f"{corrected[arm]:.2g}",
            ]
        lines.append([*cells, *[""] * (11 - len(cells))])
    headings = [
        "family", "arm", "r@1 [Wilson]", "against", "difference", "paired", "over conversations", "Pr > 0", "lost, won",
        "exact p", "p (Holm)",
    ]
    return _table(headings, lines)


def _kinds(found: Outcomes) -> str:
    """Shares by kind of question and by slice."""
    kinds = np.array(found.kinds)
    parts = [*(kinds == kind for kind in KINDS), found.organic, ~found.organic]
    lines = [[arm, *(f"{right[part].mean():.2f}" if part.any() else "" for part in parts)] for arm, right in
             found.right.items()]
    return _table(["arm", *KINDS, "organic", "synthetic"], lines)


def _slices(found: Outcomes) -> str:
    """The primary comparison in strata, and under the paper's penalty."""
    easier = float(found.selected[~found.organic].mean() - found.selected[found.organic].mean())
    kinds = np.array(found.kinds)
    slices = {
        "all": found, **{kind: _only(found, kinds == kind) for kind in KINDS if (kinds == kind).any()},
        "organic": _only(found, found.organic), "synthetic": _only(found, ~found.organic),
        f"synthetic, penalty {PENALTY}": _only(penalised(found, PENALTY), ~found.organic),
        f"all, penalty {PENALTY}": penalised(found, PENALTY),
        f"all, penalty {max(easier, 0):.3f} (measured)": penalised(found, max(easier, 0)),
    }
    lines = []
    for name, part in slices.items():
        one, n = compared(part, "full", "raw"), len(part.kinds)
        lines.append([
            name, str(n), f"{part.selected.mean():.3f}", f"{part.right['raw'].mean():.3f}",
            f"{part.right['full'].mean():.3f}", f"{one.mean:+.3f} [{one.clustered.low:+.3f} {one.clustered.high:+.3f}]",
            f"{one.lost}, {one.won}", f"{one.p:.2g}",
        ])
    return _table(["slice", "n", "selected", "raw", "full", "difference", "lost, won", "exact p"], lines)


def _factorial(found: Outcomes) -> str:
    mean, interval = interaction(found)
    cells = [[cell, *what, f"{found.right[cell].mean():.3f}"] for cell, what in zip(
        "ABCD", (("arbitrary", "none"), ("arbitrary", "full"), ("sentence", "none"), ("sentence", "full")), strict=True,
    )]
    table = _table(["cell", "cut", "markers", "r@1"], cells)
    return f"{table}\n\nInteraction (D - C) - (B - A): {mean:+.3f} [{interval.low:+.3f} {interval.high:+.3f}]."


def _powers(found: Outcomes) -> str:
    """What n can find, at some discordances."""
    n = len(found.kinds)
    shown = [(share, detectable(n, share)) for share in _DISCORDANCES]
    lines = [[f"{share}", "none" if least is None else f"{least:.3f}"] for share, least in shown]
    return _table([f"discordant share of n = {n}", "smallest difference at power 0.8"], lines)
