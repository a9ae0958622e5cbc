"""What the rows of a study say: accuracy, recovery, evidence survival, and its claims.

Recovery is (ll - ll_blind) / (ll_full - ll_blind), a ratio of means over samples; where tasks are put together, each
counts in units of its own mean gap between full cache and blind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from models_integration.studies.estimate import (
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
from models_integration.studies.evidence.controls import BLIND, CONTROL_BOUNDS, EVIDENCE, FULL, control_of
from models_integration.studies.evidence.rules import Claim
from models_integration.studies.results import Row
from reference.statistics import (
    Interval,
    holm,
    mcnemar,
    mcnemar_mid_p,
    mcnemar_power,
    ratio_bootstrap,
    sign_flip,
    stratified_draws,
)
from spec.arrays import Float64, Int64, IntMatrix, IntVector, Vector
from spec.retention import Granularity

__all__ = ["ENDS", "FLOOR", "GATE", "Samples", "Verdict", "gate", "verdicts"]

FLOOR = 0.7
"""Accuracy that the full cache must reach, for a task at a length and placement to count in accuracies."""
GATE: tuple[tuple[str, str, float], ...] = ((FULL, ">=", FLOOR), (BLIND, "<=", 0.05), (EVIDENCE, ">=", 0.9))
"""The shares of right dev answers without which a task carries no claim."""
_POWER, _DEV_CONTEXTS = 0.8, 30
_EXACT_CONTEXTS = 16
"""Contexts up to which all signs of their differences are tried."""
_STRATUM = 5
"""Contexts of a depth below which depths are resampled together: one context alone would not scatter."""
_LEAST = 2 / RESAMPLES
"""The smallest p that the resamples can give."""
ENDS = (FULL, "1.0"), (BLIND, "0")
"""The cells between which recovery counts."""


class Samples:
    """Rows of one part of a study, cell by cell as vectors over samples; controls with a bound are not among them."""

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
        """Policies and budgets that some sample has, in the order in which they were measured."""
        return list(dict.fromkeys(cell for cells in self._cells for cell in cells))

    @property
    def contexts(self) -> int:
        """How many different ones."""
        return int(self.clusters.max()) + 1 if self.rows else 0

    def where(self, **wanted: Sequence[object]) -> "Samples":
        """The samples of these tasks, placements, ..."""
        return Samples([row for row in self.rows if all(row[name] in some for name, some in wanted.items())])

    def having(self, *cells: tuple[str, str]) -> "Samples":
        """The samples that have all of these cells; a run may have been cut short, or added policies later."""
        if all(cell in own for cell in cells for own in self._cells):
            return self
        return Samples([row for row, own in zip(self.rows, self._cells, strict=True) if set(cells) <= own.keys()])

    def able(self) -> "Samples":
        """The samples that count in accuracies: of tasks, lengths and placements that the full cache can do, or all
        that are judged where it was not asked."""
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
        """A number of one cell, of every sample; NaN where it was not measured."""
        return np.array([cells[cell].get(name) for cells in self._cells], dtype=np.float64)

    def control(self, cell: tuple[str, str]) -> str:
        """The random control of a policy's own granularity; rows of before 0.4 may not say which that is."""
        granularities = (cells[cell].get("granularity") for cells in self._cells if cell in cells)
        return control_of(cell[0], next(filter(None, granularities), Granularity.HEAD.value))

    def prompt_kept(self, cell: tuple[str, str]) -> float:
        """Tokens of the prompt that one cell keeps, a mean over samples, layers and KV heads."""
        each = [np.mean(cells[cell]["kept"]) for cells in self._cells if cell in cells]
        return float(np.mean(each)) if each else math.nan

    def drawn(self) -> Int64[IntMatrix, "resamples contexts"]:
        """Contexts of every resample, drawn depth by depth if each depth has enough of them."""
        few = len(self._strata) == 0 or np.bincount(self._strata).min() < _STRATUM
        return stratified_draws(np.zeros_like(self._strata) if few else self._strata, RESAMPLES, SEED)

    def share(self, cell: tuple[str, str]) -> float:
        """The same as a part of the full cache's; NaN where that was not run."""
        some = self.having(cell, ENDS[0])
        if not some.rows:
            return math.nan
        return float((some.of(cell, "mean_cache") / some.of(ENDS[0], "mean_cache")).mean())

    def accuracy(self, cell: tuple[str, str]) -> Estimate:
        """Right answers with Wilson's interval, or the mean score of a metric that is not right or wrong."""
        able = self.able().having(cell)
        if not able.rows:
            return NOTHING
        right = able.of(cell, "right")
        if set(right) <= {0.0, 1.0}:
            return share_of(int(right.sum()), len(right))
        return able.ratio(right, np.ones(len(right)))

    def survival(self, cell: tuple[str, str]) -> Estimate:
        """Share of evidence tokens kept, mean over layers and KV heads."""
        some = self.with_evidence().having(cell)
        if not some.rows:
            return NOTHING
        return some.ratio(some.kept(cell) / [row["evidence_tokens"] for row in some.rows], np.ones(len(some.rows)))

    def with_evidence(self) -> "Samples":
        """The samples whose task says where its evidence stands."""
        return Samples([row for row in self.rows if row["evidence_tokens"]])

    def kept(self, cell: tuple[str, str]) -> Float64[Vector, " n"]:
        """Evidence tokens that one cell keeps of every sample, mean over layers and KV heads."""
        return np.array([np.mean(cells[cell]["evidence_kept"]) if cell in cells else np.nan for cells in self._cells])

    def recovery(self, cell: tuple[str, str]) -> Estimate:
        """Likelihood recovered, of what the context is worth; none where that is not clearly something."""
        if not self.worth().low > 0:
            return NOTHING
        return self.over(cell, ENDS[1])

    def over(self, first: tuple[str, str], second: tuple[str, str]) -> Estimate:
        """What one cell recovers more than another, sample by sample."""
        some = self.having(first, second, *ENDS)
        return some.ratio(some.gained(first, second), some.gained(*ENDS)) if some.rows else NOTHING

    def worth(self) -> Estimate:
        """Log-likelihood of the answer with the full cache above that without context, nats; none without these two."""
        some = self.having(*ENDS)
        gaps = some._gaps() if some.rows else np.array([math.nan])
        return NOTHING if np.isnan(gaps).any() else some.ratio(gaps, np.ones(len(gaps)))

    def pairs(self, first: tuple[str, str], second: tuple[str, str]) -> Pairs | None:
        """Right answers of two cells on the same samples; None without any, or where a metric has more than two."""
        some = self.having(first, second)
        each = some.of(first, "right"), some.of(second, "right")
        judged = bool(some.rows) and all(set(one) <= {0.0, 1.0} for one in each)
        return pairs_of(*(one.tolist() for one in each)) if judged else None

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
        interval = ratio_bootstrap(above, below, self.clusters, self.drawn())
        return Estimate(value, interval.low, interval.high, len(above))


def _window_of(row: Row) -> int | None:
    """The window of the running text that a sample reads, if it reads one."""
    window: int | None = row["metadata"].get("window")
    return window


def _depth_of(row: Row) -> float:
    """The depth of a window's samples, which is the same for all of them; 0 for other contexts."""
    return 0.0 if _window_of(row) is None else float(row["metadata"].get("depth", 0.0))


def _context_of(row: Row) -> object:
    """What samples share that are not independent: a window of the running text, or else the whole context."""
    window = _window_of(row)
    return row["context"] if window is None else (row["length"], window)


@dataclass(frozen=True)
class Verdict:
    """A claim as the confirming samples decide it.

    Attributes:
        difference: of `first` over `second`.
        p: two-sided; None if nothing is decided. Accuracies: McNemar's exact test. Recoveries: all signs of the
            contexts' differences, or the bootstrap if there are more than 16 contexts. Non-inferiority: the bootstrap.
        mid_p: of accuracies.
        corrected: Holm's, over all decided claims of the file.
        power: to find the size that the claim names at Bonferroni's level, by what the dev samples scatter.
        flag: why nothing is decided, or "".
        bound: whether p is the smallest that the resamples can give, so that the true p is at most this.
        dev_contexts: of which the power is computed.
        registered: whether every confirming row names the commit of its rules.
    """

    claim: Claim
    difference: Estimate
    p: float | None
    mid_p: float | None
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
        """What the corrected p and the claimed size say, in a few words."""
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
        """The corrected p as text; "" if nothing is decided."""
        return "" if self.corrected is None else format_p(self.corrected, self.bound)


def verdicts(claims: Sequence[Claim], dev: Samples, confirm: Samples) -> list[Verdict]:
    """Every claim of a study, in the file's order."""
    level = SIGNIFICANT / max(1, len(claims))
    found = [_verdict(claim, dev, confirm, level) for claim in claims]
    corrected = holm({one.claim.name: one.p for one in found if one.p is not None})
    return [replace(one, corrected=corrected.get(one.claim.name)) for one in found]


def _verdict(claim: Claim, dev: Samples, confirm: Samples, level: float) -> Verdict:
    some, tried = (_about(claim, samples) for samples in (confirm, dev))
    first, second = _cells_of(claim)
    registered = bool(some.rows) and all(row.get("commit") for row in some.rows)
    undecided = Verdict(claim, NOTHING, None, None, None, 0.0, "", registered=registered)
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
        return replace(found, p=mcnemar(losses, wins), mid_p=mcnemar_mid_p(losses, wins))
    if some.contexts <= _EXACT_CONTEXTS and claim.difference > 0:
        return replace(found, p=sign_flip(np.bincount(some.clusters, weights=above).astype(np.float64)))
    margin = min(claim.difference, 0.0)
    p = _two_sided(ratio_bootstrap(above - margin * below, below, some.clusters, some.drawn()), margin < 0)
    return replace(found, p=p, bound=p == _LEAST)


def gate(claim: Claim, dev: Samples) -> str:
    """Which control of GATE fails on the dev samples of a claim's tasks, at which length; "" if none does."""
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
    """Twice the smaller share of resamples on one side of no difference, or twice that below; never 0."""
    below = 1 - interval.positive
    return min(1.0, max(2 * (below if above_alone else min(interval.positive, below)), _LEAST))


def _cells_of(claim: Claim) -> tuple[tuple[str, str], tuple[str, str]]:
    """The claim's policies with their budgets; the full cache has one of its own."""
    return (claim.first, claim.budget), ENDS[0] if claim.second == FULL else (claim.second, claim.budget)


def _about(claim: Claim, samples: Samples) -> Samples:
    some = samples.where(task=claim.tasks, placement=(claim.placement,))
    return some.able() if claim.measure == "accuracy" else some


def _pairs(claim: Claim, samples: Samples) -> tuple[Float64[Vector, " n"], Float64[Vector, " n"]]:
    """Differences of the two policies, and what they are parts of."""
    first, second = _cells_of(claim)
    if claim.measure == "accuracy":
        return samples.of(first, "right") - samples.of(second, "right"), np.ones(len(samples.rows))
    return samples.gained(first, second), samples.gained(*ENDS)


def _power(claim: Claim, dev: Samples, confirm: Samples, level: float) -> float:
    """To find the claimed size in so many contexts (recovery) or samples (accuracy); 0 without two dev samples."""
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
