"""Evaluation of the rows of a study: accuracy, recovery, kept evidence, and claims.

Recovery is (ll - ll_blind) / (ll_full - ll_blind), where numerator and denominator are means over samples. If several
tasks are combined, each task is first divided by its mean difference between full cache and blind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from models_integration.studies.evidence.kept import BLIND, CONTROL_BOUNDS, EVIDENCE, FULL, control_of
from models_integration.studies.evidence.rules import Claim
from models_integration.studies.report import (
    NOTHING,
    RESAMPLES,
    SAME_CACHE,
    SEED,
    SIGNIFICANT,
    Estimate,
    Pairs,
    format_p,
    pairs_of,
    share_of,
)
from models_integration.studies.results import Row
from reference.statistics import (
    Interval,
    holm,
    mcnemar,
    mcnemar_power,
    ratio_bootstrap,
    sign_flip,
    stratified_draws,
)
from spec.arrays import Float64, Int64, IntMatrix, IntVector, Vector
from spec.retention import Granularity

__all__ = ["ENDS", "FLOOR", "GATE", "Samples", "Verdict", "gate", "verdicts"]

FLOOR = 0.7
"""Smallest accuracy of the full cache with which a task at a length and placement is included in accuracies."""
GATE: tuple[tuple[str, str, float], ...] = ((FULL, ">=", FLOOR), (BLIND, "<=", 0.05), (EVIDENCE, ">=", 0.9))
"""Required fractions of right dev answers of the controls. Otherwise a task supports no claim."""
_POWER, _DEV_CONTEXTS = 0.8, 30
_EXACT_CONTEXTS = 16
"""Largest number of contexts for the exact sign-flip test."""
_STRATUM = 5
"""Smallest number of contexts per depth for resampling by depth. A single context would have no variance."""
_LEAST = 2 / RESAMPLES
"""Smallest p value that the bootstrap can give."""
ENDS = (FULL, "1.0"), (BLIND, "0")
"""Cells that define recovery 1 and recovery 0."""


class Samples:
    """Rows of one part of a study, with each cell as vectors over samples. Controls with a bound are excluded."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._cells = [
            {(cell["policy"], cell["budget"]): cell for cell in row["cells"] if cell["policy"] not in CONTROL_BOUNDS}
            for row in rows
        ]
        last = {_context_of(row): at for at, row in enumerate(rows)}
        firsts, clusters = np.unique([last[_context_of(row)] for row in rows], return_inverse=True)
        self.clusters: IntVector = clusters.astype(np.int64)
        depths = [_depth_of(rows[int(at)]) for at in firsts]
        self._strata: IntVector = np.unique(depths, return_inverse=True)[1].astype(np.int64)

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Policies and budgets that at least one sample has, in the order of measurement."""
        return list(dict.fromkeys(cell for cells in self._cells for cell in cells))

    @property
    def contexts(self) -> int:
        """Number of different contexts."""
        return int(self.clusters.max()) + 1 if self.rows else 0

    def where(self, **wanted: Sequence[object]) -> "Samples":
        """Return the samples of these tasks, placements, ..."""
        return Samples([row for row in self.rows if all(row[name] in some for name, some in wanted.items())])

    def having(self, *cells: tuple[str, str]) -> "Samples":
        """Return the samples with all of these cells. An interrupted run, or policies added later, can leave gaps."""
        if all(cell in own for cell in cells for own in self._cells):
            return self
        return Samples([row for row, own in zip(self.rows, self._cells, strict=True) if set(cells) <= own.keys()])

    def able(self) -> "Samples":
        """Return the samples that count in accuracies: tasks, lengths and placements with a high accuracy of the full
        cache, or all scored samples if the full cache was not run."""
        floor = FLOOR if ENDS[0] in self.cells else 0.0
        groups: dict[tuple[object, ...], list[int]] = {}
        for at, row in enumerate(self.rows):
            groups.setdefault((row["task"], row["length"], row["placement"]), []).append(at)
        judges = [cells.get(ENDS[0], {}) if floor else next(iter(cells.values()), {}) for cells in self._cells]
        right = [cell.get("right") for cell in judges]
        counted = [
            at for group in groups.values() for at in group
            if None not in (some := [right[one] for one in group]) and sum(some) >= floor * len(some)
        ]
        return Samples([self.rows[at] for at in sorted(counted)])

    def of(self, cell: tuple[str, str], name: str) -> Float64[Vector, " n"]:
        """Return a number of one cell for every sample. A number that was not measured is NaN."""
        return np.array([cells[cell].get(name) for cells in self._cells], dtype=np.float64)

    def control(self, cell: tuple[str, str]) -> str:
        """Return the random control with a policy's granularity. Rows before version 0.4 may lack the granularity."""
        granularities = (cells[cell].get("granularity") for cells in self._cells if cell in cells)
        return control_of(cell[0], next(filter(None, granularities), Granularity.HEAD.value))

    def prompt_kept(self, cell: tuple[str, str]) -> float:
        """Return the number of prompt tokens that a cell keeps: the mean over samples, layers and KV heads."""
        each = [np.mean(cells[cell]["kept"]) for cells in self._cells if cell in cells]
        return float(np.mean(each)) if each else math.nan

    def drawn(self) -> Int64[IntMatrix, "resamples contexts"]:
        """Contexts of every bootstrap resample, drawn separately for each depth if each depth has enough contexts."""
        few = len(self._strata) == 0 or np.bincount(self._strata).min() < _STRATUM
        return stratified_draws(np.zeros_like(self._strata) if few else self._strata, RESAMPLES, SEED)

    def share(self, cell: tuple[str, str]) -> float:
        """Return `prompt_kept` divided by the full cache's number, or NaN if the full cache was not run."""
        some = self.having(cell, ENDS[0])
        if not some.rows:
            return math.nan
        return float((some.of(cell, "mean_cache") / some.of(ENDS[0], "mean_cache")).mean())

    def accuracy(self, cell: tuple[str, str]) -> Estimate:
        """Return the fraction of right answers with Wilson's interval, or the mean of a metric with partial scores."""
        able = self.able().having(cell)
        if not able.rows:
            return NOTHING
        right = able.of(cell, "right")
        if set(right) <= {0.0, 1.0}:
            return share_of(int(right.sum()), len(right))
        return able.ratio(right, np.ones(len(right)))

    def survival(self, cell: tuple[str, str]) -> Estimate:
        """Return the fraction of evidence tokens that are kept, averaged over layers and KV heads."""
        some = self.with_evidence().having(cell)
        if not some.rows:
            return NOTHING
        return some.ratio(some.kept(cell) / [row["evidence_tokens"] for row in some.rows], np.ones(len(some.rows)))

    def with_evidence(self) -> "Samples":
        """Return the samples with evidence."""
        return Samples([row for row in self.rows if row["evidence_tokens"]])

    def kept(self, cell: tuple[str, str]) -> Float64[Vector, " n"]:
        """Return the number of evidence tokens that a cell keeps of each sample, averaged over layers and KV heads."""
        return np.array([np.mean(cells[cell]["evidence_kept"]) if cell in cells else np.nan for cells in self._cells])

    def recovery(self, cell: tuple[str, str]) -> Estimate:
        """Return the recovery. If the context has no clear effect on the likelihood, the result is NaN."""
        if not self.worth().low > 0:
            return NOTHING
        return self.over(cell, ENDS[1])

    def over(self, first: tuple[str, str], second: tuple[str, str]) -> Estimate:
        """Return the paired difference of the recoveries of two cells."""
        some = self.having(first, second, *ENDS)
        return some.ratio(some.gained(first, second), some.gained(*ENDS)) if some.rows else NOTHING

    def worth(self) -> Estimate:
        """Gain in log-likelihood (nats) of the full cache over no context, or NaN if one of the two was not run."""
        some = self.having(*ENDS)
        gaps = some._gaps() if some.rows else np.array([math.nan])
        return NOTHING if np.isnan(gaps).any() else some.ratio(gaps, np.ones(len(gaps)))

    def pairs(self, first: tuple[str, str], second: tuple[str, str]) -> Pairs | None:
        """Compare right answers of two cells on the same samples. None without samples or with partial scores."""
        some = self.having(first, second)
        each = some.of(first, "right"), some.of(second, "right")
        judged = bool(some.rows) and all(set(one) <= {0.0, 1.0} for one in each)
        return pairs_of(*(one.tolist() for one in each)) if judged else None

    def worthy(self) -> "Samples":
        """Return the samples of tasks in which the context clearly increases the likelihood."""
        tasks = dict.fromkeys(row["task"] for row in self.rows)
        return self.where(task=[task for task in tasks if self.where(task=(task,)).worth().low > 0])

    def _gaps(self) -> Float64[Vector, " n"]:
        full, blind = (self.of(cell, "likelihood") for cell in ENDS)
        return full - blind

    def gained(self, cell: tuple[str, str], over: tuple[str, str]) -> Float64[Vector, " n"]:
        """Return a cell's log-likelihood gain over a second cell, in units of the task's mean full-cache gain."""
        gaps = self._gaps()
        tasks = np.array([row["task"] for row in self.rows])
        units = np.array([gaps[tasks == task].mean() for task in tasks])
        gained: Vector = (self.of(cell, "likelihood") - self.of(over, "likelihood")) / units
        return gained

    def ratio(self, above: Float64[Vector, " n"], below: Float64[Vector, " n"]) -> Estimate:
        """Return a ratio of means. The bootstrap draws whole contexts. A single context gives no interval."""
        if not self.rows:
            return NOTHING
        value = float(above.sum() / below.sum())
        if not self.clusters.any():
            return Estimate(value, math.nan, math.nan, len(above))
        interval = ratio_bootstrap(above, below, self.clusters, self.drawn())
        return Estimate(value, interval.low, interval.high, len(above))


def _window_of(row: Row) -> int | None:
    """Return the window of running text that a sample uses, or None."""
    window: int | None = row["metadata"].get("window")
    return window


def _depth_of(row: Row) -> float:
    """Return the depth of a window's samples (equal for all samples of a window), or 0 for different contexts."""
    return 0.0 if _window_of(row) is None else float(row["metadata"].get("depth", 0.0))


def _context_of(row: Row) -> object:
    """Return the key of a sample's cluster: the window of running text, or the whole context."""
    window = _window_of(row)
    return row["context"] if window is None else (row["length"], window)


@dataclass(frozen=True)
class Verdict:
    """Result of a claim on the confirming samples.

    Attributes:
        difference: estimated difference of `first` minus `second`.
        p: two-sided p value, or None if nothing is decided. Accuracies use McNemar's exact test. Recoveries use the
            exact sign-flip test over contexts, or the bootstrap above 16 contexts. Non-inferiority uses the bootstrap.
        corrected: p value after Holm's correction over all decided claims of the file.
        power: power to find the claimed difference at Bonferroni's level, computed from the variance of dev samples.
        flag: reason why nothing is decided, or "".
        bound: True if p is the smallest value that the bootstrap can give. The true p is then at most this value.
        dev_contexts: number of dev contexts from which the power is computed.
        registered: True if every confirming row has the commit of the rules.
    """

    claim: Claim
    difference: Estimate
    p: float | None
    corrected: float | None
    power: float
    flag: str
    bound: bool = False
    dev_contexts: int = 0
    registered: bool = False

    @property
    def kind(self) -> str:
        """Exploratory if a row does not name the commit of its rules. Otherwise confirmatory if the power is at least
        0.8 and rests on at least 30 dev contexts, or else screening."""
        if not self.registered:
            return "exploratory"
        return "confirmatory" if self.power >= _POWER and self.dev_contexts >= _DEV_CONTEXTS else "screening"

    @property
    def outcome(self) -> str:
        """Outcome as text, from the corrected p value and the claimed difference."""
        if self.corrected is None:
            return "not compared"
        if self.corrected > SIGNIFICANT:
            return "open"
        if self.claim.difference < 0:
            return "holds"
        if self.difference.value < 0:
            return "the opposite holds"
        return "holds" if self.difference.value >= self.claim.difference else "smaller than claimed"

    @property
    def corrected_text(self) -> str:
        """Corrected p value as text, or "" if nothing is decided."""
        return "" if self.corrected is None else format_p(self.corrected, self.bound)


def verdicts(claims: Sequence[Claim], dev: Samples, confirm: Samples) -> list[Verdict]:
    """Return the results of all claims of a study, in the order of the file."""
    level = SIGNIFICANT / max(1, len(claims))
    found = [_verdict(claim, dev, confirm, level) for claim in claims]
    corrected = holm({one.claim.name: one.p for one in found if one.p is not None})
    return [replace(one, corrected=corrected.get(one.claim.name)) for one in found]


def _verdict(claim: Claim, dev: Samples, confirm: Samples, level: float) -> Verdict:
    some, tried = (_about(claim, samples) for samples in (confirm, dev))
    first, second = _cells_of(claim)
    registered = bool(some.rows) and all(row.get("commit") for row in some.rows)
    undecided = Verdict(claim, NOTHING, None, None, 0.0, "", registered=registered)
    if not {first, second} <= set(some.cells or [first, second]):
        return replace(undecided, flag="not measured")
    if not some.rows:
        return replace(undecided, flag="no samples that count")
    if claim.measure == "recovery" and not some.worth().low > 0:
        return replace(undecided, flag="the context is not clearly worth anything")
    if ENDS[0] in some.cells and not some.of(ENDS[0], "right").any():
        return replace(undecided, flag=f"the full cache answers none of {len(some.rows)}")
    if registered and (failed := gate(claim, dev)):
        return replace(undecided, flag=failed)
    above, below = _pairs(claim, some)
    power = _power(claim, tried, some, level)
    found = replace(undecided, difference=some.ratio(above, below), power=power, dev_contexts=tried.contexts)
    kept = some.prompt_kept(first), some.prompt_kept(second)
    if claim.second != FULL and abs(kept[0] - kept[1]) > SAME_CACHE * min(kept):
        return replace(found, flag=f"prompt tokens kept: {kept[0]:.1f} and {kept[1]:.1f}")
    if claim.measure == "accuracy" and claim.difference > 0:
        wins, losses = int((above > 0).sum()), int((above < 0).sum())
        return replace(found, p=mcnemar(losses, wins))
    if some.contexts <= _EXACT_CONTEXTS and claim.difference > 0:
        return replace(found, p=sign_flip(np.bincount(some.clusters, weights=above).astype(np.float64)))
    margin = min(claim.difference, 0.0)
    p = _two_sided(ratio_bootstrap(above - margin * below, below, some.clusters, some.drawn()), margin < 0)
    return replace(found, p=p, bound=p == _LEAST)


def gate(claim: Claim, dev: Samples) -> str:
    """Return the control of GATE that fails on the dev samples of a claim's tasks, with the length, or ""."""
    for task in claim.tasks:
        whole = dev.where(task=(task,), placement=(claim.placement,))
        for length in sorted({row["length"] for row in whole.rows}):
            some = whole.where(length=(length,))
            for (name, relation, bound), cell in zip(GATE, (*ENDS, (EVIDENCE, claim.budget)), strict=True):
                right = some.having(cell).of(cell, "right")
                share = float(right.mean()) if len(right) else math.nan
                if share < bound if relation == ">=" else share > bound:
                    return f"{task} at {length}: {name} answers {share:.2f} of dev, must be {relation} {bound}"
    return ""


def _two_sided(interval: Interval, above_alone: bool) -> float:
    """Return twice the smaller fraction of resamples on one side of 0 (or twice the fraction below 0), never 0."""
    below = 1 - interval.positive
    return min(1.0, max(2 * (below if above_alone else min(interval.positive, below)), _LEAST))


def _cells_of(claim: Claim) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the policies of a claim with budgets. The full cache has a separate budget."""
    return (claim.first, claim.budget), ENDS[0] if claim.second == FULL else (claim.second, claim.budget)


def _about(claim: Claim, samples: Samples) -> Samples:
    some = samples.where(task=claim.tasks, placement=(claim.placement,))
    return some.able() if claim.measure == "accuracy" else some


def _pairs(claim: Claim, samples: Samples) -> tuple[Float64[Vector, " n"], Float64[Vector, " n"]]:
    """Return the differences of the two policies, and the denominators of the differences."""
    first, second = _cells_of(claim)
    if claim.measure == "accuracy":
        return samples.of(first, "right") - samples.of(second, "right"), np.ones(len(samples.rows))
    return samples.gained(first, second), samples.gained(*ENDS)


def _power(claim: Claim, dev: Samples, confirm: Samples, level: float) -> float:
    """Return the power to find the claimed difference. The power is 0 with fewer than two dev samples."""
    if len(dev.rows) < 2:
        return 0.0
    above, below = _pairs(claim, dev)
    if claim.measure == "accuracy":
        discordance = max(float((above != 0).mean()), abs(claim.difference))
        return mcnemar_power(len(confirm.rows), discordance, abs(claim.difference), level)
    rest = np.bincount(dev.clusters, weights=above - above.sum() / below.sum() * below)
    each = math.sqrt(float((rest**2).sum()) * len(rest)) / abs(float(below.sum()))
    error = each / math.sqrt(confirm.contexts)
    return 1.0 if error == 0 else NormalDist().cdf(abs(claim.difference) / error - NormalDist().inv_cdf(1 - level / 2))
