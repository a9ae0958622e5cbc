"""Selectors: functions that select the kept positions from scores and budgets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, TypeAlias

import numpy as np

from spec.arrays import Bool, BoolMatrix, BoolVector, Float64, Int64, IntVector, Matrix, Vector
from spec.backend import CrystalStages
from spec.composition import MODEL_SETS, Required, requires
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.policy import Scores, Selection
from spec.records import CrystalRecords, CrystalRetention, Dissolution, Trunks

__all__ = [
    "Choice", "Dissolve", "best_blocks", "best_tokens", "fill_units", "marked", "recent_half", "staged", "top_tokens",
    "top_units", "touched_units",
]


def touched_units(
    protected: Bool[BoolVector, " n"], offsets: Int64[IntVector, " m_and_one"],
) -> Bool[BoolVector, " m"]:
    """Return a mask of the units that contain a protected token."""
    touched: BoolVector = np.logical_or.reduceat(protected, offsets[:-1])
    return touched


@requires(Required(frozenset({"tokens", "chunks"}), device=True))
def top_units(scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
    """Select a group's protected units, then the best-scored other units up to the budget.

    If scores are equal, the unit with the lower index is selected.

    Implements: PO-TOP-UNITS
    """
    pinned = touched_units(protected, scores.offsets)
    groups = [_fill(row, scores.offsets, int(B), pinned) for row, B in zip(scores.values, budgets, strict=True)]
    return _selection(groups)


def best_tokens(
    values: Float64[Matrix, "g n"], shares: Int64[IntVector, " g"], pinned: Bool[BoolMatrix, "g n"],
) -> Selection:
    """Select a group's pinned tokens, then the best-scored other tokens up to the group's share.

    This function is the reference of the backend stage `best_tokens`.

    Implements: PO-TOP-UNITS
    """
    offsets = np.arange(values.shape[1] + 1)
    return _selection([_fill(row, offsets, int(B), pins) for row, B, pins in zip(values, shares, pinned, strict=True)])


Choice: TypeAlias = Callable[[Matrix, IntVector, BoolMatrix], Selection]


@requires(Required(device=True))
def top_tokens(
    scores: Scores, budgets: IntVector, protected: BoolVector, /, choose: Choice = best_tokens,
) -> Selection:
    """Select single tokens as in `top_units`. The argument `choose` is the stage `best_tokens` of a backend."""
    return choose(scores.values, budgets, np.broadcast_to(protected, scores.values.shape))


def staged(
    scores: Scores, first: Int64[IntVector, " g"], budgets: Int64[IntVector, " g"], protected: BoolVector,
    choose: Choice = best_tokens,
) -> Selection:
    """Select `first` tokens of a group by first score, then more tokens by second score, up to the budget.

    The number `first` includes the protected tokens.

    Implements: PO-TWO-STAGES, PO-VASE
    """
    if scores.second is None:
        raise SpecError("scores.second", None, "are needed, because the selector has two stages: use top_units instead")
    chosen = top_tokens(scores, first, protected, choose)
    return choose(scores.second, budgets, marked(chosen, scores.values.shape[1]))


def marked(selection: Selection, n: int) -> Bool[BoolMatrix, "g n"]:
    """Return the selection as a boolean mask over n tokens or units, with a row for each group."""
    marks = np.zeros((len(selection.offsets) - 1, n), dtype=np.bool_)
    marks[np.repeat(np.arange(len(marks)), np.diff(selection.offsets)), selection.positions] = True
    return marks


def best_blocks(
    values: Float64[Matrix, "g n"], shares: Int64[IntVector, " g"], pinned: Bool[BoolMatrix, "g n"], /, b: int,
    choose: Choice = best_tokens,
) -> Selection:
    """Select a group's blocks of b tokens with the largest sums of scores, up to the group's budget.

    A last block with fewer than b tokens is always kept.

    Implements: PO-BEST-BLOCKS
    """
    full, left = divmod(values.shape[1], b)
    closed, shape = full * b, (len(values), full, b)
    total: Matrix = reduce(np.add, np.moveaxis(values[:, :closed].reshape(shape), 2, 0))
    held: BoolMatrix = np.logical_or.reduce(pinned[:, :closed].reshape(shape), axis=2)
    chosen = choose(total, np.maximum(0, (shares - left) // b), held)
    newest = np.arange(closed, closed + left)
    return _selection([
        np.append((b * blocks[:, None] + np.arange(b)).ravel(), newest)
        for blocks in np.split(chosen.positions, chosen.offsets[1:-1])
    ])


@requires(Required(frozenset({"chunks", "trunks"}), device=True))
def fill_units(scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
    """Select a group's protected tokens, then whole units by score, then the best tokens of one more unit.

    Implements: PO-FILL-UNITS

    Raises:
        SpecError: if `scores.members` is None. `members` has the scores of the tokens inside units.
    """
    if scores.members is None:
        raise SpecError(
            "scores.members", None, "are needed: the selector keeps part of a unit by the scores of single tokens"
        )
    unit = np.repeat(np.arange(len(scores.offsets) - 1), np.diff(scores.offsets))
    groups = []
    for row, members, B in zip(scores.values, scores.members, budgets, strict=True):
        rank = np.argsort(np.argsort(-row, kind="stable"))[unit]
        order = np.lexsort((-members, rank, ~protected))
        groups.append(scores.offsets[0] + np.sort(order[: max(int(B), int(protected.sum()))]))
    return _selection(groups)


@requires(Required(device=True))
def recent_half(
    scores: Scores, budgets: IntVector, protected: BoolVector, /, choose: Choice = best_tokens,
) -> Selection:
    """Select a group's newest B // 2 tokens, then the best-scored other tokens up to the group's budget B.

    Implements: PO-H2O
    """
    n = len(protected)
    return choose(scores.values, budgets, protected | (np.arange(n) >= n - budgets[:, None] // 2))


def _selection(groups: list[Int64[IntVector, " _"]]) -> Selection:
    return Selection(np.concatenate(groups), np.cumsum([0, *map(len, groups)]).astype(np.int64))


def _fill(
    values: Float64[Vector, " m"], offsets: Int64[IntVector, " m_and_one"], B: int, pinned: Bool[BoolVector, " m"],
) -> Int64[IntVector, " kept"]:
    sizes = np.diff(offsets)
    order = np.argsort(-values, kind="stable")
    order = np.concatenate([np.flatnonzero(pinned), order[~pinned[order]]])
    chosen = order[(np.cumsum(sizes[order]) <= B) | pinned[order]]
    kept = np.zeros(len(values), dtype=np.bool_)
    kept[chosen] = True
    positions: IntVector = offsets[0] + np.flatnonzero(np.repeat(kept, sizes))
    return positions


@dataclass(frozen=True)
class Dissolve:
    """Selector of CrystalCache (Algorithm 1, branch dissolution): evicts the trunks with the lowest scores.

    Some tokens of the last evicted trunk may be kept. The records of the selection are a `Dissolution`, computed with D
    = 0. A scorer that stores D updates D from the kept ratio r by Eq. 34.
    """

    stages: CrystalStages
    parameters: CrystalCacheParameters
    required: ClassVar[Required] = Required(frozenset({"trunks"}), MODEL_SETS, exact=False)

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        if scores.members is None or len(budgets) != 1:
            reason = "must be one row with scores of tokens inside trunks: use the scorer of crystalcache"
            raise SpecError("scores", scores.values.shape, reason)
        units = Trunks(scores.offsets, scores.values[0])
        no_D = np.zeros(len(units.impact))
        records = scores.carry if isinstance(scores.carry, CrystalRecords) else None
        decided = records.decided if records is not None and records.parameters == self.parameters else None
        pinned = touched_units(protected, scores.offsets)
        if decided is not None and _decides(decided, scores, pinned, int(budgets[0])):
            kept = Dissolution(decided.kept, decided.ratio, no_D)
            return Selection(kept.kept, decided.offsets, kept)
        result = self.stages.dissolve(
            scores.values[0], units, scores.members[0], no_D, pinned, int(budgets[0]), self.parameters,
        )
        return Selection(result.kept, np.array([0, len(result.kept)], dtype=np.int64), result)


def _decides(decided: CrystalRetention, scores: Scores, pinned: BoolVector, B: int) -> bool:
    """Return True if the retention is the result of S6 for these scores, protected trunks and this budget."""
    pairs = (
        (scores.values, decided.scores[None]), (scores.members, decided.impact[None]),
        (scores.offsets, decided.trunks.offsets), (pinned, decided.protected),
    )
    return decided.budget == B and all(
        np.array_equal(given, used, equal_nan=True) for given, used in pairs if given is not None
    )
