"""The study's tables, from its rows alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conformance.measure.studies.archive.pins import same_pins
from conformance.measure.studies.archive.rules import ARMS
from models_integration.pocket.training.talk import KINDS
from models_integration.studies.results import Row
from reference.statistics import Interval, bootstrap, cluster_bootstrap, draws, holm, mcnemar, mcnemar_power, wilson
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
    questions = [question for row in rows for question in row["questions"]]
    conversations = np.repeat(np.arange(len(rows)), [len(row["questions"]) for row in rows])
    return Outcomes(
        {arm: np.array([float(asked["right"][arm]) for asked in questions]) for arm in rows[0]["arms"]},
        conversations, [asked["kind"] for asked in questions],
        np.array([asked["organic"] for asked in questions]), np.array([asked["selected"] for asked in questions]),
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


def compared(answers: Outcomes, arm: str, base: str) -> Comparison:
    """Intervals of the paired bootstrap, and of the one over conversations."""
    difference = answers.right[arm] - answers.right[base]
    lost, won = int((difference < 0).sum()), int((difference > 0).sum())
    paired = bootstrap(difference, draws(len(difference), _RESAMPLES, _SEED))
    clustered = _clustered(answers, difference)
    return Comparison(float(difference.mean()), paired, clustered, lost, won, mcnemar(lost, won))


def _clustered(answers: Outcomes, difference: Float64[Vector, " n"]) -> Interval:
    drawn = draws(int(answers.conversations.max()) + 1, _RESAMPLES, _SEED)
    return cluster_bootstrap(difference, answers.conversations, drawn)


def interaction(answers: Outcomes) -> tuple[float, Interval]:
    """Of the 2 x 2: what markers add at sentence ends beyond what they add at arbitrary places."""
    A, B, C, D = (answers.right[cell] for cell in "ABCD")
    difference = (D - C) - (B - A)
    return float(difference.mean()), _clustered(answers, difference)


def detectable(n: int, discordance: float) -> float | None:
    """The smallest difference that the exact test of n pairs finds with a power of 0.8; None where there is none."""
    if mcnemar_power(n, discordance, discordance) < POWER:
        return None
    low, high = 0.0, discordance
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if mcnemar_power(n, discordance, middle) >= POWER else (middle, high)
    return high


def penalised(answers: Outcomes, share: float) -> Outcomes:
    """The paper's penalty: a share of the synthetic questions loses its retrieval, and with it every arm's answer."""
    synthetic = np.flatnonzero(~answers.organic)
    lost = np.random.default_rng(_SEED).choice(synthetic, round(share * len(synthetic)), replace=False)
    right = {arm: np.where(np.isin(np.arange(len(each)), lost), 0.0, each) for arm, each in answers.right.items()}
    return answers._replace(right=right)


def _only(answers: Outcomes, chosen: Bool[BoolVector, " n"]) -> Outcomes:
    """The chosen questions; conversations are numbered anew."""
    return Outcomes(
        {arm: each[chosen] for arm, each in answers.right.items()},
        np.unique(answers.conversations[chosen], return_inverse=True)[1].astype(np.int64),
        [kind for kind, taken in zip(answers.kinds, chosen, strict=True) if taken],
        answers.organic[chosen], answers.selected[chosen],
    )


def markdown(rows: Sequence[Row]) -> str:
    """All tables."""
    answers = outcomes(rows)
    tables: list[Callable[[Outcomes], str]] = [_answers, _kinds]
    if {"raw", "full"} <= set(answers.right):
        tables.append(_slices)
    if set("ABCD") <= set(answers.right):
        tables.append(_factorial)
    tables.append(_powers)
    head = (
        f"n = {len(answers.kinds)} questions of {len(rows)} conversations; the true chunk is among the selected ones"
        f" for {answers.selected.mean():.3f}."
    )
    if CEILING in answers.right:
        head += f" Of these, `{CEILING}` answers {answers.right[CEILING][answers.selected].mean():.3f}."
    return f"{head}\n\n" + "\n\n".join(table(answers) for table in tables)


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _answers(answers: Outcomes) -> str:
    """Every arm; Holm's correction is over all comparisons but the primary one."""
    pairs = {arm: ARMS[arm].base for arm in answers.right if ARMS[arm].base in answers.right}
    results = {arm: compared(answers, arm, base) for arm, base in pairs.items()}
    corrected = holm({arm: result.p for arm, result in results.items() if arm != PRIMARY})
    lines = []
    for arm, right in answers.right.items():
        low, high = wilson(int(right.sum()), len(right))
        cells = [ARMS[arm].family, arm, f"{right.mean():.3f} [{low:.2f} {high:.2f}]"]
        if arm in results:
            result = results[arm]
            cells += [
                pairs[arm], f"{result.mean:+.3f}", f"[{result.paired.low:+.3f} {result.paired.high:+.3f}]",
                f"[{result.clustered.low:+.3f} {result.clustered.high:+.3f}]", f"{result.clustered.positive:.2f}",
                f"{result.lost}, {result.won}", f"{result.p:.2g}",
                "primary" if arm == PRIMARY else f"{corrected[arm]:.2g}",
            ]
        lines.append([*cells, *[""] * (11 - len(cells))])
    headings = [
        "family", "arm", "r@1 [Wilson]", "against", "difference", "paired", "over conversations", "Pr > 0", "lost, won",
        "exact p", "p (Holm)",
    ]
    return _table(headings, lines)


def _kinds(answers: Outcomes) -> str:
    """Shares by kind of question and by slice."""
    kinds = np.array(answers.kinds)
    parts = [*(kinds == kind for kind in KINDS), answers.organic, ~answers.organic]
    lines = [[arm, *(f"{right[part].mean():.2f}" if part.any() else "" for part in parts)] for arm, right in
             answers.right.items()]
    return _table(["arm", *KINDS, "organic", "synthetic"], lines)


def _slices(answers: Outcomes) -> str:
    """The primary comparison in strata, and under the paper's penalty."""
    easier = float(answers.selected[~answers.organic].mean() - answers.selected[answers.organic].mean())
    kinds = np.array(answers.kinds)
    slices = {
        "all": answers, **{kind: _only(answers, kinds == kind) for kind in KINDS if (kinds == kind).any()},
        "organic": _only(answers, answers.organic), "synthetic": _only(answers, ~answers.organic),
        f"synthetic, penalty {PENALTY}": _only(penalised(answers, PENALTY), ~answers.organic),
        f"all, penalty {PENALTY}": penalised(answers, PENALTY),
        f"all, penalty {max(easier, 0):.3f} (measured)": penalised(answers, max(easier, 0)),
    }
    lines = []
    for name, part in slices.items():
        result, n = compared(part, "full", "raw"), len(part.kinds)
        lines.append([
            name, str(n), f"{part.selected.mean():.3f}", f"{part.right['raw'].mean():.3f}",
            f"{part.right['full'].mean():.3f}",
            f"{result.mean:+.3f} [{result.clustered.low:+.3f} {result.clustered.high:+.3f}]",
            f"{result.lost}, {result.won}", f"{result.p:.2g}",
        ])
    return _table(["slice", "n", "selected", "raw", "full", "difference", "lost, won", "exact p"], lines)


def _factorial(answers: Outcomes) -> str:
    mean, interval = interaction(answers)
    cells = [[cell, *what, f"{answers.right[cell].mean():.3f}"] for cell, what in zip(
        "ABCD", (("arbitrary", "none"), ("arbitrary", "full"), ("sentence", "none"), ("sentence", "full")), strict=True,
    )]
    table = _table(["cell", "cut", "markers", "r@1"], cells)
    return f"{table}\n\nInteraction (D - C) - (B - A): {mean:+.3f} [{interval.low:+.3f} {interval.high:+.3f}]."


def _powers(answers: Outcomes) -> str:
    """What n can find, at some discordances."""
    n = len(answers.kinds)
    shown = [(share, detectable(n, share)) for share in _DISCORDANCES]
    lines = [[f"{share}", "none" if least is None else f"{least:.3f}"] for share, least in shown]
    return _table([f"discordant share of n = {n}", "smallest difference at power 0.8"], lines)
