"""What the rows of a study say: accuracy, recovery, evidence survival, and its claims.

Recovery is (ll - ll_blind) / (ll_full - ll_blind), a ratio of means over samples; where tasks are put together, each
counts in units of its own mean gap between full cache and blind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from models_integration.studies.estimate import NOTHING, RESAMPLES, SAME_CACHE, SEED, SIGNIFICANT, Estimate, share_of
from models_integration.studies.evidence.kept import BLIND, FULL
from models_integration.studies.evidence.rules import Claim
from models_integration.studies.results import Row
from reference.statistics import Interval, draws, holm, mcnemar, mcnemar_mid_p, mcnemar_power, ratio_bootstrap
from spec.arrays import Float64, IntVector, Vector

__all__ = ["ENDS", "FLOOR", "Samples", "Verdict", "verdicts"]

FLOOR = 0.7
"""Accuracy that the full cache must reach, for a task at a length and placement to count in accuracies."""
_POWER = 0.8
ENDS = (FULL, "1.0"), (BLIND, "0")
"""The cells between which recovery counts."""


class Samples:
    """Rows of one part of a study, cell by cell as vectors over samples."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._cells = [{(cell["policy"], cell["budget"]): cell for cell in row["cells"]} for row in rows]
        contexts = {row["context"]: at for at, row in enumerate(rows)}
        _, clusters = np.unique([contexts[row["context"]] for row in rows], return_inverse=True)
        self.clusters: IntVector = clusters.astype(np.int64)

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Policies and budgets, in the order in which they were measured."""
        return list(self._cells[0]) if self._cells else []

    @property
    def contexts(self) -> int:
        """How many different ones."""
        return int(self.clusters.max()) + 1 if self.rows else 0

    def where(self, **wanted: Sequence[object]) -> "Samples":
        """The samples of these tasks, placements, ..."""
        return Samples([row for row in self.rows if all(row[name] in some for name, some in wanted.items())])

    def able(self) -> "Samples":
        """The samples that count in accuracies: of tasks, lengths and placements that the full cache can do."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for at, row in enumerate(self.rows):
            groups.setdefault((row["task"], row["length"], row["placement"]), []).append(at)
        right = [cells.get(ENDS[0], {}).get("right") for cells in self._cells]
        counted = [
            at for group in groups.values() for at in group
            if None not in (some := [right[one] for one in group]) and sum(some) >= FLOOR * len(some)
        ]
        return Samples([self.rows[at] for at in sorted(counted)])

    def of(self, cell: tuple[str, str], name: str) -> Float64[Vector, " n"]:
        """A number of one cell, of every sample."""
        return np.array([cells[cell][name] for cells in self._cells], dtype=np.float64)

    def cache(self, cell: tuple[str, str]) -> float:
        """Mean cache while answering, slots of a layer and KV head."""
        return float(self.of(cell, "mean_cache").mean()) if self.rows else math.nan

    def share(self, cell: tuple[str, str]) -> float:
        """The same as a part of the full cache's; NaN where that was not run."""
        if not {cell, ENDS[0]} <= set(self.cells):
            return math.nan
        return float((self.of(cell, "mean_cache") / self.of(ENDS[0], "mean_cache")).mean())

    def accuracy(self, cell: tuple[str, str]) -> Estimate:
        """Right answers with Wilson's interval, or the mean score of a metric that is not right or wrong."""
        able = self.able()
        if cell not in able.cells:
            return NOTHING
        right = able.of(cell, "right")
        if set(right) <= {0.0, 1.0}:
            return share_of(int(right.sum()), len(right))
        return able.ratio(right, np.ones(len(right)))

    def survival(self, cell: tuple[str, str]) -> Estimate:
        """Share of evidence tokens kept, mean over layers and KV heads."""
        some = self.with_evidence()
        if cell not in some.cells:
            return NOTHING
        return some.ratio(some.kept(cell) / [row["evidence_tokens"] for row in some.rows], np.ones(len(some.rows)))

    def with_evidence(self) -> "Samples":
        """The samples whose task says where its evidence stands."""
        return Samples([row for row in self.rows if row["evidence_tokens"]])

    def kept(self, cell: tuple[str, str]) -> Float64[Vector, " n"]:
        """Evidence tokens that one cell keeps of every sample, mean over layers and KV heads."""
        return np.array([np.mean(cells[cell]["evidence_kept"]) for cells in self._cells])

    def recovery(self, cell: tuple[str, str]) -> Estimate:
        """Likelihood recovered, of what the context is worth; none where that is not clearly something."""
        if not self.worth().low > 0:
            return NOTHING
        return self.over(cell, ENDS[1])

    def over(self, first: tuple[str, str], second: tuple[str, str]) -> Estimate:
        """What one cell recovers more than another, sample by sample."""
        if not {first, second, *ENDS} <= set(self.cells):
            return NOTHING
        return self.ratio(self.gained(first, second), self.gained(*ENDS))

    def worth(self) -> Estimate:
        """Log-likelihood of the answer with the full cache above that without context, nats; none without these two."""
        if not set(ENDS) <= set(self.cells):
            return NOTHING
        gaps = self._gaps()
        return self.ratio(gaps, np.ones(len(gaps)))

    def worthy(self) -> "Samples":
        """The samples of tasks whose context is clearly worth something."""
        tasks = dict.fromkeys(row["task"] for row in self.rows)
        return self.where(task=[task for task in tasks if self.where(task=(task,)).worth().low > 0])

    def _gaps(self) -> Float64[Vector, " n"]:
        full, blind = (self.of(cell, "likelihood") for cell in ENDS)
        return full - blind

    def gained(self, cell: tuple[str, str], over: tuple[str, str]) -> Float64[Vector, " n"]:
        """Log-likelihood of one cell above that of another, in units of the task's mean gap of full cache and blind."""
        gaps = self._gaps()
        tasks = np.array([row["task"] for row in self.rows])
        units = np.array([gaps[tasks == task].mean() for task in tasks])
        gained: Vector = (self.of(cell, "likelihood") - self.of(over, "likelihood")) / units
        return gained

    def ratio(self, above: Float64[Vector, " n"], below: Float64[Vector, " n"]) -> Estimate:
        """A ratio of means; whole contexts are drawn, and one alone gives no interval."""
        if not self.rows:
            return NOTHING
        value = float(above.sum() / below.sum())
        if not self.clusters.any():
            return Estimate(value, math.nan, math.nan, len(above))
        drawn = draws(self.contexts, RESAMPLES, SEED)
        interval = ratio_bootstrap(above, below, self.clusters, drawn)
        return Estimate(value, interval.low, interval.high, len(above))


@dataclass(frozen=True)
class Verdict:
    """A claim as the confirming samples decide it.

    Attributes:
        difference: of `first` over `second`.
        p: of no difference; None where nothing is decided. Accuracies: McNemar's exact test. Recoveries: the bootstrap.
        mid_p: of accuracies.
        corrected: Holm's, over all decided claims of the file.
        power: for the smallest difference that the claim names, by what the dev samples scatter.
        flag: why it is outside, or "".
    """

    claim: Claim
    difference: Estimate
    p: float | None
    mid_p: float | None
    corrected: float | None
    power: float
    flag: str

    @property
    def kind(self) -> str:
        """Confirmatory where the power is 0.8, otherwise screening."""
        return "confirmatory" if self.power >= _POWER else "screening"

    @property
    def outcome(self) -> str:
        """What the corrected p says, in a word."""
        if self.corrected is None:
            return "not compared"
        if self.corrected > SIGNIFICANT:
            return "open"
        return "holds" if self.difference.value > 0 else "the opposite holds"


def verdicts(claims: Sequence[Claim], dev: Samples, confirm: Samples) -> list[Verdict]:
    """Every claim of a study, in the file's order."""
    found = [_verdict(claim, dev, confirm) for claim in claims]
    corrected = holm({one.claim.name: one.p for one in found if one.p is not None})
    return [replace(one, corrected=corrected.get(one.claim.name)) for one in found]


def _verdict(claim: Claim, dev: Samples, confirm: Samples) -> Verdict:
    some, tried = (_about(claim, samples) for samples in (confirm, dev))
    first, second = ((name, claim.budget) for name in (claim.first, claim.second))
    if not {first, second} <= set(some.cells or [first, second]):
        return Verdict(claim, NOTHING, None, None, None, 0.0, "not measured")
    if not some.rows:
        return Verdict(claim, NOTHING, None, None, None, 0.0, "no samples that count")
    if claim.measure == "recovery" and not some.worth().low > 0:
        return Verdict(claim, NOTHING, None, None, None, 0.0, "the context is not clearly worth anything")
    above, below = _pairs(claim, some)
    difference, power = some.ratio(above, below), _power(claim, tried, some)
    caches = some.cache(first), some.cache(second)
    if abs(caches[0] - caches[1]) > SAME_CACHE * min(caches):
        return Verdict(claim, difference, None, None, None, power, f"mean caches {caches[0]:.1f} and {caches[1]:.1f}")
    if claim.measure == "accuracy":
        wins, losses = int((above > 0).sum()), int((above < 0).sum())
        return Verdict(claim, difference, mcnemar(losses, wins), mcnemar_mid_p(losses, wins), None, power, "")
    drawn = draws(some.contexts, RESAMPLES, SEED)
    p = _two_sided(ratio_bootstrap(above, below, some.clusters, drawn))
    return Verdict(claim, difference, p, None, None, power, "")


def _two_sided(interval: Interval) -> float:
    """Twice the smaller share of resamples on one side of no difference, never 0."""
    side = min(interval.positive, 1 - interval.positive)
    return min(1.0, 2 * max(side, 1 / RESAMPLES))


def _about(claim: Claim, samples: Samples) -> Samples:
    some = samples.where(task=claim.tasks, placement=(claim.placement,))
    return some.able() if claim.measure == "accuracy" else some


def _pairs(claim: Claim, samples: Samples) -> tuple[Float64[Vector, " n"], Float64[Vector, " n"]]:
    """Differences of the two policies, and what they are parts of."""
    first, second = ((name, claim.budget) for name in (claim.first, claim.second))
    if claim.measure == "accuracy":
        return samples.of(first, "right") - samples.of(second, "right"), np.ones(len(samples.rows))
    return samples.gained(first, second), samples.gained(*ENDS)


def _power(claim: Claim, dev: Samples, confirm: Samples) -> float:
    """To find the claim's difference in so many contexts (recovery) or samples (accuracy); 0 without dev samples."""
    if len(dev.rows) < 2:
        return 0.0
    above, below = _pairs(claim, dev)
    if claim.measure == "accuracy":
        discordance = max(float((above != 0).mean()), claim.difference)
        return mcnemar_power(len(confirm.rows), discordance, claim.difference)
    rest = np.bincount(dev.clusters, weights=above - above.sum() / below.sum() * below)
    each = math.sqrt(float((rest**2).sum()) * len(rest)) / abs(float(below.sum()))
    error = each / math.sqrt(confirm.contexts)
    return 1.0 if error == 0 else NormalDist().cdf(claim.difference / error - NormalDist().inv_cdf(0.975))
