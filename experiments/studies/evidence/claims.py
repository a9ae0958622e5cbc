"""Evaluation of the claims of a study."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from experiments.studies.evidence.kept import BLIND, EVIDENCE, FULL
from experiments.studies.evidence.rules import KEPT, Claim
from experiments.studies.evidence.samples import ENDS, FLOOR, Samples
from experiments.studies.evidence.splits import differences, opposite, split_text
from experiments.studies.report import NOTHING, RESAMPLES, SAME_CACHE, SIGNIFICANT, Estimate, format_p
from experiments.studies.results import Row
from reference.statistics import Interval, holm, mcnemar, mcnemar_power, ratio_bootstrap, sign_flip
from spec.arrays import Float64, Vector

__all__ = ["GATE", "Verdict", "compared", "gate", "opposite_signs", "verdicts"]

GATE: tuple[tuple[str, str, float], ...] = ((FULL, ">=", FLOOR), (BLIND, "<=", 0.05), (EVIDENCE, ">=", 0.9))
"""Required fractions of right dev answers of the controls. Otherwise a task supports no claim."""
_POWER, _DEV_CONTEXTS = 0.8, 30
_EXACT_CONTEXTS = 16
"""Largest number of contexts for the exact sign-flip test."""
_LEAST = 2 / RESAMPLES
"""Smallest p value that the bootstrap can give."""


@dataclass(frozen=True)
class Verdict:
    """Result of a claim on the confirming samples.

    Attributes:
        difference: estimated difference of `first` minus `second`.
        p: two-sided p value, or None if nothing is decided. Accuracies use McNemar's exact test. Recoveries use the
            exact sign-flip test over contexts, or the bootstrap above 16 contexts. Non-inferiority uses the bootstrap.
            If samples are clustered by template, all of them use the sign-flip test over at most 16 templates.
        corrected: p value after Holm's correction over all decided claims of the file.
        power: power to find the claimed difference at Bonferroni's level, computed from the variance of dev samples.
        flag: reason why nothing is decided, or "".
        bound: True if p is the smallest value that the bootstrap can give. The true p is then at most this value.
        dev_contexts: number of dev contexts from which the power is computed. Samples of one window, or of one shared
            text, are one context.
        registered: True if every confirming row names a commit with these rules.
        splits: differences of the two policies for each place of the fact, and for each text.
        opposite: entry of `splits` with opposite signs, or "".
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
    splits: tuple[str, ...] = ()
    opposite: str = ""

    @property
    def kind(self) -> str:
        """"exploratory" if a row does not name a commit with its rules. Otherwise confirmatory if the power is at least
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


def verdicts(
    claims: Sequence[Claim], dev: Samples, confirm: Samples, commits: Collection[str] = (),
) -> list[Verdict]:
    """Return the results of all claims of a study, in the order of the file.

    Args:
        claims: claims of the rules file.
        dev: dev samples.
        confirm: confirming samples.
        commits: commits that contain the rules of the samples, from `commits_with_rules`.
    """
    level = SIGNIFICANT / max(1, len(claims))
    result = [_verdict(claim, dev, confirm, level, commits) for claim in claims]
    corrected = holm({one.claim.name: one.p for one in result if one.p is not None})
    return [replace(one, corrected=corrected.get(one.claim.name)) for one in result]


def _verdict(
    claim: Claim, dev: Samples, confirm: Samples, level: float, commits: Collection[str],
) -> Verdict:
    (some, other), tried = compared(claim, confirm), compared(claim, dev)
    first, second = _cells_of(claim)
    registered = bool(some.rows) and all(row.get("commit") in commits for row in (*some.rows, *other.rows))
    undecided = Verdict(claim, NOTHING, None, None, 0.0, "", registered=registered)
    if flag := _undecided(claim, some, other, dev, registered):
        return replace(undecided, flag=flag)
    above, below = _pairs(claim, some, other)
    contexts = tried[0].clustered("").contexts
    power = _power(claim, tried, some, level)
    parts = differences(some, above, below)
    result = replace(
        undecided, difference=some.ratio(above, below), power=power, dev_contexts=contexts, opposite=opposite(parts),
        splits=tuple(split_text(kind, groups) for kind, groups in parts.items() if len(groups) > 1),
    )
    kept = some.prompt_kept(first), other.prompt_kept(second)
    if claim.second != FULL and abs(kept[0] - kept[1]) > SAME_CACHE * min(kept):
        return replace(result, flag=f"prompt tokens kept: {kept[0]:.1f} and {kept[1]:.1f}")
    p, bound = _p(claim, some, above, below)
    return replace(result, p=p, bound=bound)


def _undecided(claim: Claim, some: Samples, other: Samples, dev: Samples, registered: bool) -> str:
    """Return the reason why a claim cannot be decided, or ""."""
    first, second = _cells_of(claim)
    if some.rows and not (first in some.cells and second in other.cells):
        return "not measured"
    if not some.rows:
        return "no samples that count"
    if claim.measure == KEPT:
        return ""
    if claim.measure == "recovery" and not some.worth().low > 0:
        return "the context is not clearly worth anything"
    if ENDS[0] in some.cells and not some.of(ENDS[0], "right").any():
        return f"the full cache answers none of {len(some.rows)}"
    return gate(claim, dev) if registered else ""


def opposite_signs(claim: Claim, confirm: Samples) -> str:
    """Return the splits of a claim's samples that have opposite signs, or "" if there are none."""
    some, other = compared(claim, confirm)
    if _undecided(claim, some, other, confirm, registered=False) or not some.rows:
        return ""
    return opposite(differences(some, *_pairs(claim, some, other)))


def _p(
    claim: Claim, some: Samples, above: Float64[Vector, " n"], below: Float64[Vector, " n"],
) -> tuple[float, bool]:
    """Return the p value, and whether it is the smallest value of the bootstrap."""
    if claim.measure == "accuracy" and claim.difference > 0 and not some.by:
        return mcnemar(int((above < 0).sum()), int((above > 0).sum())), False
    margin = min(claim.difference, 0.0)
    beyond = above - margin * below
    if some.contexts <= _EXACT_CONTEXTS and (claim.difference > 0 or some.by):
        p = sign_flip(np.bincount(some.clusters, weights=beyond).astype(np.float64))
        return (1.0 if margin and beyond.sum() <= 0 else p), False
    p = _two_sided(ratio_bootstrap(beyond, below, some.clusters, some.drawn()), margin < 0)
    return p, p == _LEAST


def gate(claim: Claim, dev: Samples) -> str:
    """Return the control of GATE that fails on the dev samples of a claim's tasks, with the length, or "".

    Templates that the full cache cannot answer do not count. At least one template must count.
    """
    for task in (*claim.tasks, *claim.second_tasks):
        whole = dev.where(task=(task,), placement=(claim.placement,))
        for length in sorted({row["length"] for row in whole.rows}):
            every = whole.where(length=(length,))
            some = every.able() if claim.measure == "accuracy" and every.able().rows else every
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


def compared(claim: Claim, samples: Samples) -> tuple[Samples, Samples]:
    """Return the samples of a claim's two policies, in the same order. The two are equal without `second_tasks`."""
    some = samples.clustered(claim.clusters) if claim.clusters else samples
    some = some.where(placement=(claim.placement,))
    sides = [some.where(task=tasks) for tasks in (claim.tasks, claim.second_tasks or claim.tasks)]
    first, second = (side.able() if claim.measure == "accuracy" else side for side in sides)
    if not claim.second_tasks:
        return first, first
    twins = dict(zip(claim.tasks, claim.second_tasks, strict=True))
    of_second = {_pair_key(row, row["task"]): row for row in second.rows}
    pairs = [(row, twin) for row in first.rows if (twin := of_second.get(_pair_key(row, twins[row["task"]])))]
    return first.only([row for row, _ in pairs]), second.only([row for _, row in pairs])


def _pair_key(row: Row, task: str) -> tuple[object, ...]:
    return task, *(row[name] for name in ("length", "seed", "index", "question"))


def _pairs(
    claim: Claim, some: Samples, other: Samples,
) -> tuple[Float64[Vector, " n"], Float64[Vector, " n"]]:
    """Return the differences of the two policies, and the denominators of the differences."""
    first, second = _cells_of(claim)
    if claim.measure == "recovery":
        return some.gained(first, second), some.gained(*ENDS)
    each = [
        side.of(cell, "right") if claim.measure == "accuracy" else side.kept_share(cell)
        for side, cell in ((some, first), (other, second))
    ]
    return each[0] - each[1], np.ones(len(some.rows))


def _power(claim: Claim, dev: tuple[Samples, Samples], confirm: Samples, level: float) -> float:
    """Return the power to find the claimed difference. The power is 0 with fewer than two dev samples."""
    some = dev[0]
    if len(some.rows) < 2:
        return 0.0
    above, below = _pairs(claim, *dev)
    if claim.measure == "accuracy" and not some.by:
        discordance = max(float((above != 0).mean()), abs(claim.difference))
        return mcnemar_power(len(confirm.rows), discordance, abs(claim.difference), level)
    rest = np.bincount(some.clusters, weights=above - above.sum() / below.sum() * below)
    each = math.sqrt(float((rest**2).sum()) * len(rest)) / abs(float(below.sum()))
    error = each / math.sqrt(confirm.contexts)
    return 1.0 if error == 0 else NormalDist().cdf(abs(claim.difference) / error - NormalDist().inv_cdf(1 - level / 2))
