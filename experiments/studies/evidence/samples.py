"""Samples of a study as vectors: accuracy, recovery, and kept evidence of each policy.

Recovery is (ll - ll_blind) / (ll_full - ll_blind). Numerator and denominator are means over samples. If several tasks
are combined, each task is first divided by its mean difference between full cache and blind.
"""

import math
from collections.abc import Sequence

import numpy as np

from experiments.studies.evidence.kept import BLIND, CONTROL_BOUNDS, FULL, control_of
from experiments.studies.evidence.rules import TEMPLATE
from experiments.studies.report import NOTHING, RESAMPLES, SEED, Estimate, Pairs, pairs_of, share_of
from experiments.studies.results import Row
from reference.statistics import ratio_bootstrap, stratified_draws
from spec.arrays import Float64, Int64, IntMatrix, IntVector, Vector
from spec.retention import Granularity

__all__ = ["ENDS", "FLOOR", "Samples", "is_user_question", "recoveries", "template_of"]

FLOOR = 0.7
"""Smallest accuracy of the full cache with which a template of a task is included in accuracies."""
_STRATUM = 5
"""Smallest number of contexts per depth for resampling by depth. A single context would have no variance."""
ENDS = (FULL, "1.0"), (BLIND, "0")
"""Cells that define recovery 1 and recovery 0."""


class Samples:
    """Rows of one part of a study, with each cell as vectors over samples. Controls with a bound are excluded.

    Args:
        rows: rows of samples.
        clusters: "" if the samples of a context are one cluster, or "template" if the samples of a template are.
    """

    def __init__(self, rows: Sequence[Row], clusters: str = "") -> None:
        self.rows, self.by = rows, clusters
        self._cells = [
            {(cell["policy"], cell["budget"]): cell for cell in row["cells"] if cell["policy"] not in CONTROL_BOUNDS}
            for row in rows
        ]
        names = [template_of(row) if clusters == TEMPLATE else _context_of(row) for row in rows]
        last = {name: at for at, name in enumerate(names)}
        firsts, result = np.unique([last[name] for name in names], return_inverse=True)
        self.clusters: IntVector = result.astype(np.int64)
        depths = [0.0 if clusters == TEMPLATE else _depth_of(rows[int(at)]) for at in firsts]
        self._strata: IntVector = np.unique(depths, return_inverse=True)[1].astype(np.int64)

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Policies and budgets that at least one sample has, in the order of measurement."""
        return list(dict.fromkeys(cell for cells in self._cells for cell in cells))

    @property
    def contexts(self) -> int:
        """Number of different contexts."""
        return int(self.clusters.max()) + 1 if self.rows else 0

    def only(self, rows: Sequence[Row]) -> "Samples":
        """Return these rows with the same clusters."""
        return Samples(rows, self.by)

    def clustered(self, clusters: str) -> "Samples":
        """Return the same rows with clusters "" (contexts) or "template"."""
        return Samples(self.rows, clusters)

    def about(self, name: str, value: object) -> "Samples":
        """Return the samples whose metadata have this value."""
        return self.only([row for row in self.rows if row["metadata"].get(name) == value])

    def where(self, **wanted: Sequence[object]) -> "Samples":
        """Return the samples of these tasks, placements, ..."""
        return self.only([row for row in self.rows if all(row[name] in some for name, some in wanted.items())])

    def having(self, *cells: tuple[str, str]) -> "Samples":
        """Return the samples with all of these cells. An interrupted run, or policies added later, can leave gaps."""
        if all(cell in row_cells for cell in cells for row_cells in self._cells):
            return self
        pairs = zip(self.rows, self._cells, strict=True)
        return self.only([row for row, row_cells in pairs if set(cells) <= row_cells.keys()])

    def able(self) -> "Samples":
        """Return the samples that count in accuracies: templates of a task, at a length and placement, with a high
        accuracy of the full cache. All scored samples count if the full cache was not run, and of your own questions.
        """
        floor = FLOOR if ENDS[0] in self.cells and not self.of_user else 0.0
        groups: dict[tuple[object, ...], list[int]] = {}
        for at, row in enumerate(self.rows):
            key = row["task"], row["length"], row["placement"], row["metadata"].get("template")
            groups.setdefault(key, []).append(at)
        judges = [cells.get(ENDS[0], {}) if floor else next(iter(cells.values()), {}) for cells in self._cells]
        right = [cell.get("right") for cell in judges]
        counted = [
            at for group in groups.values() for at in group
            if None not in (some := [right[one] for one in group]) and sum(some) >= floor * len(some)
        ]
        return self.only([self.rows[at] for at in sorted(counted)])

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

    def whole(self, cell: tuple[str, str]) -> Estimate:
        """Return the fraction of samples of which all evidence is kept, averaged over the sets of kept tokens."""
        some = self.with_evidence().having(cell)
        if not some.rows:
            return NOTHING
        result = [
            np.mean(np.asarray(cells[cell]["evidence_kept"]) == row["evidence_tokens"])
            for row, cells in zip(some.rows, some._cells, strict=True)
        ]
        return some.ratio(np.array(result, dtype=np.float64), np.ones(len(result)))

    def answered(self, cell: tuple[str, str]) -> Estimate:
        """Return the fraction of right answers among all samples, also of tasks that the full cache cannot do."""
        some = self.having(cell)
        right = some.of(cell, "right")
        return share_of(int(right.sum()), len(right)) if some.rows else NOTHING

    def survival(self, cell: tuple[str, str]) -> Estimate:
        """Return the fraction of evidence tokens that are kept, averaged over layers and KV heads."""
        some = self.with_evidence().having(cell)
        if not some.rows:
            return NOTHING
        return some.ratio(some.kept_share(cell), np.ones(len(some.rows)))

    def kept_share(self, cell: tuple[str, str]) -> Float64[Vector, " n"]:
        """Return `kept` as a fraction of each sample's evidence tokens."""
        shares: Vector = self.kept(cell) / np.array([row["evidence_tokens"] for row in self.rows])
        return shares

    def with_evidence(self) -> "Samples":
        """Return the samples with evidence."""
        return self.only([row for row in self.rows if row["evidence_tokens"]])

    def kept(self, cell: tuple[str, str]) -> Float64[Vector, " n"]:
        """Return the number of evidence tokens that a cell keeps of each sample, averaged over layers and KV heads."""
        return np.array([np.mean(cells[cell]["evidence_kept"]) if cell in cells else np.nan for cells in self._cells])

    def recovery(self, cell: tuple[str, str]) -> Estimate:
        """Return the recovery. If `has_recovery` is False, the result is NaN."""
        return self.over(cell, ENDS[1]) if self.has_recovery else NOTHING

    @property
    def has_recovery(self) -> bool:
        """Return True if the context clearly increases the likelihood of the answer.

        Your own questions can be about one text, which gives no interval, so an increase of the mean is enough.
        """
        worth = self.worth()
        return (worth.value if self.of_user else worth.low) > 0

    @property
    def of_user(self) -> bool:
        """Return True if all samples are your own questions."""
        return bool(self.rows) and all(map(is_user_question, self.rows))

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


_ALIKE = ("task", "length", "placement", "seed", "model")
"""Columns that are equal in all rows that a row of `summary` counts."""


def recoveries(rows: Sequence[Row], counted: Sequence[Row]) -> list[float]:
    """Return the recovery of each row of `summary`, or NaN if the recovery is unknown."""
    groups = dict[tuple[object, ...], list[Row]]()
    for row in rows:
        if not row.get("control"):
            groups.setdefault(tuple(row[name] for name in _ALIKE), []).append(row)
    samples = {key: Samples(some) for key, some in groups.items()}
    result = []
    for one in counted:
        some = samples.get(tuple(one[name] for name in _ALIKE), Samples(()))
        result.append(some.recovery((one["policy"], one["budget_requested"])).value)
    return result


def template_of(row: Row) -> object:
    """Return the template of a sample's fact, or the digest of the context if the task has no templates."""
    return row["metadata"].get("template", row["context"])


def is_user_question(row: Row) -> bool:
    """Return True for one of the user's own questions."""
    return "question" in row["metadata"]


def _window_of(row: Row) -> int | None:
    """Return the window of running text that a sample uses, or None."""
    window: int | None = row["metadata"].get("window")
    return window


def _depth_of(row: Row) -> float:
    """Return the depth of a window's samples (equal for all samples of a window), or 0 for different contexts."""
    return 0.0 if _window_of(row) is None else float(row["metadata"].get("depth", 0.0))


def _context_of(row: Row) -> object:
    """Return the key of a sample's cluster: the window of running text, the shared text, or the whole context."""
    window = _window_of(row)
    return row["metadata"].get("group", row["context"]) if window is None else (row["length"], window)
