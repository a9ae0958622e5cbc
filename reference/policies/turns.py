"""Later segments under a policy that has no records: of what each kept set still stores, some stays."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference.policies.retain import chosen, tokens_of
from reference.policies.selectors import touched_units
from reference.policies.shown import shown_to
from spec.arrays import BoolVector, Int64, IntVector
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Budgets, Observation, Policy, Scores
from spec.retention import Retention

__all__ = ["retain_turn"]


def retain_turn(
    policy: Policy, budget: Budget, live: Sequence[Int64[IntVector, " _"]], shown: Sequence[Observation],
    heads: int = 1,
) -> Retention:
    """What stays of each kept set at the end of a later segment, whose queries are the last of the tokens seen.

    Budget and protection are about all tokens seen; scores see the cached tokens as a sequence.

    Implements: PO-TURN

    Args:
        live: absolute positions that each kept set stores, ascending, those of the segment included.
        shown: one observation of all kept sets, which then store the same tokens; or one for each set, of its own
            layer (and head) alone, for a scorer that is separable.
        heads: kept sets of one layer.

    Raises:
        SpecError: as `retain`; or when sets store different numbers of protected tokens.
    """
    seen = shown[0].seen
    B, protected = tokens_of(policy, budget, seen), policy.protection(seen)
    marks = [protected[own] for own in live]
    parts = [
        policy.scorer(replace(shown_to(policy.scorer.needs, one), B=B, positions=own), mark)
        for one, own, mark in zip(shown, live, marks, strict=False)
    ]
    if len(parts) == 1:
        selection = chosen(policy, B, parts[0], marks[0])
        slots = np.split(selection.positions, selection.offsets[1:-1])
    else:
        shares = _shares(policy, B, parts, marks, heads)
        slots = [
            chosen(replace(policy, budgets=_given(int(share))), B, part, mark).positions
            for share, part, mark in zip(shares, parts, marks, strict=True)
        ]
    kept = [own[at] for own, at in zip(live, slots, strict=True)]
    offsets = np.cumsum([0, *map(len, kept)]).astype(np.int64)
    return Retention(np.concatenate(kept), offsets, seen, policy.granularity)


def _shares(
    policy: Policy, B: int, parts: Sequence[Scores], marks: Sequence[BoolVector], heads: int,
) -> Int64[IntVector, " g"]:
    """Budgets over sets of different lengths: what a set no longer stores scores below all that it does."""
    counts = sorted({int(mark.sum()) for mark in marks})
    if len(counts) > 1:
        raise SpecError("protection", counts, "kept sets store different numbers of protected tokens")
    longest = max(parts, key=lambda part: part.values.shape[1])
    m = longest.values.shape[1]
    rows = [
        np.pad(
            np.where(touched_units(mark, part.offsets), np.nan, part.values[0]), (m - part.values.shape[1], 0),
            constant_values=-np.inf,
        )
        for part, mark in zip(parts, marks, strict=True)
    ]
    shares: IntVector = policy.budgets(B * len(parts), Scores(np.stack(rows), longest.offsets, heads=heads))
    return shares


def _given(share: int) -> Budgets:
    return lambda total, scores, /: np.array([share], dtype=np.int64)
