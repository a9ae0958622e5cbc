"""The study's tables: shares with intervals, differences with exact tests, what was stored, what breaths did."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conformance.measure.studies.decode.plan import CONTROL, STRATA
from conformance.measure.studies.decode.rules import BASES
from models_integration.studies.results import Row
from reference.statistics import Interval, bootstrap, draws, holm, mcnemar
from spec.arrays import Float64, Vector

__all__ = ["Difference", "differences", "markdown", "scores"]

_RESAMPLES, _SEED = 10_000, 2026


@dataclass(frozen=True)
class Difference:
    """An arm against the base of its setting, conversation by conversation."""

    mean: float
    interval: Interval
    better: int
    worse: int
    p: float
    """Exact sign test, not corrected."""


def scores(rows: Sequence[Row], arm: str) -> Float64[Vector, " n"]:
    """Each conversation's share of right answers outside the control."""
    by_stratum = [row["found"][arm]["right"] for row in rows]
    return np.array([np.mean([right[name] for name in STRATA if name != CONTROL]) for right in by_stratum])


def differences(rows: Sequence[Row], arms: Sequence[str]) -> dict[str, Difference]:
    """Every arm that has a base among `arms` other than itself."""
    drawn = draws(len(rows), _RESAMPLES, _SEED)
    by_arm = {}
    for arm in arms:
        base = BASES.get(arm, arm)
        if base != arm and base in arms:
            difference = scores(rows, arm) - scores(rows, base)
            better, worse = int((difference > 1e-9).sum()), int((difference < -1e-9).sum())
            interval = bootstrap(difference, drawn)
            by_arm[arm] = Difference(float(difference.mean()), interval, better, worse, mcnemar(worse, better))
    return by_arm


def markdown(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """Four tables: answers, strata, stored slots and breaths."""
    tables = (_answers, _strata, _stored, _breaths)
    return "\n\n".join(table(rows, arms) for table in tables)


def _answers(rows: Sequence[Row], arms: Sequence[str]) -> str:
    drawn, by_arm = draws(len(rows), _RESAMPLES, _SEED), differences(rows, arms)
    corrected = holm({arm: difference.p for arm, difference in by_arm.items()})
    lines = ["| arm | right | difference to on | better, worse | p | p (Holm) |", "|" + " --- |" * 6]
    for arm in arms:
        share = scores(rows, arm)
        low, high, _ = bootstrap(share, drawn)
        cells = [arm, f"{share.mean():.3f} [{low:.3f} {high:.3f}]"]
        if arm in by_arm:
            d = by_arm[arm]
            cells += [
                f"{d.mean:+.3f} [{d.interval.low:+.3f} {d.interval.high:+.3f}]", f"{d.better}, {d.worse}",
                f"{d.p:.2g}", f"{corrected[arm]:.2g}",
            ]
        lines.append("| " + " | ".join(cells + [""] * (6 - len(cells))) + " |")
    return "\n".join(lines)


def _strata(rows: Sequence[Row], arms: Sequence[str]) -> str:
    lines = [f"| arm | {' | '.join(STRATA)} |", "| --- |" + " --- |" * len(STRATA)]
    for arm in arms:
        shares = [np.mean([row["found"][arm]["right"][name] for row in rows]) for name in STRATA]
        lines.append(f"| {arm} | {' | '.join(f'{share:.2f}' for share in shares)} |")
    return "\n".join(lines)


def _stored(rows: Sequence[Row], arms: Sequence[str]) -> str:
    lines = ["| arm | mean slots (least, most) | peak | end |", "| --- | --- | --- | --- |"]
    for arm in arms:
        runs = [row["found"][arm] for row in rows]
        means = [each["mean"] for each in runs]
        lines.append(
            f"| {arm} | {np.mean(means):.1f} ({min(means):.1f}, {max(means):.1f}) | "
            f"{max(each['peak'] for each in runs)} | {np.mean([each['end'] for each in runs]):.1f} |"
        )
    return "\n".join(lines)


def _breaths(rows: Sequence[Row], arms: Sequence[str]) -> str:
    headings = ("arm", "flags changed", "active", "D decides", "prompt's trunks", "their impact", "their D")
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for arm in arms:
        runs = [row["found"][arm] for row in rows if "trunks" in row["found"][arm]]
        if runs:
            trunks = [each["trunks"] for each in runs]
            changed, common = (sum(each["changed"][i] for each in runs) for i in (0, 1))
            of = {name: sum(each[name] for each in trunks) for name in ("live", "active", "free", "D_decides")}
            impact = np.concatenate([each["prompt_impact"] for each in trunks])
            D = np.concatenate([each["prompt_D"] for each in trunks])
            cells = [arm, f"{changed / common:.4f}", f"{of['active'] / of['live']:.2f}"]
            cells += [f"{of['D_decides'] / max(1, of['free']):.2f}", f"{len(D) / len(runs):.1f}"]
            lines.append("| " + " | ".join([*cells, _spread(impact), _spread(D)]) + " |")
    return "\n".join(lines)


def _spread(values: Float64[Vector, " n"]) -> str:
    """Median and most."""
    return f"{np.median(values):.2f}, {values.max():.2f}" if len(values) else ""
