"""Functions that apply a policy to an observation and return the positions that the policy keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import numpy as np

from reference.policies.budgets import tokens_of
from reference.policies.crystalcache import crystal_retention
from reference.policies.selectors import touched_units
from spec.arrays import BoolVector, Int64, IntVector
from spec.budget import Budget
from spec.composition import required_by
from spec.errors import SpecError
from spec.policy import Budgets, LayerView, Needs, Observation, Policy, Scores, Selection
from spec.records import CrystalRecords, Dissolution
from spec.retention import Retention

__all__ = ["chosen", "retain", "retain_each", "retain_turn", "shown_to"]


@dataclass(frozen=True)
class _Absent:
    """Placeholder for a tensor that the policy's `needs` do not declare. Reading the placeholder raises SpecError."""

    what: str
    remedy: str

    def missed(self, *_: object, **__: object) -> NoReturn:
        """Raise the error for reading a tensor that is not declared.

        Raises:
            SpecError: always. The message explains how to declare the tensor in `Needs`.
        """
        raise SpecError(self.what, None, f"is used by the scorer, but not declared; declare Needs({self.remedy})")

    def __getattr__(self, name: str) -> NoReturn:
        self.missed()


# Python looks up operators on the type, not with __getattr__.
for _operator in (
    "abs", "add", "array", "bool", "eq", "ge", "getitem", "gt", "iter", "le", "len", "lt", "matmul", "mul", "ne", "neg",
    "pow", "sub", "truediv",
):
    setattr(_Absent, f"__{_operator}__", cast(Callable[..., Any], _Absent.missed))

_VALUES = _Absent("v", "..., values=True")
_QUERIES = _Absent("q", "..., query_rows=n, or None for all")
_LAYERS = _Absent("layers", "'all' or 'observed', ...")
_IDS = _Absent("token_ids", "..., token_ids=True")
_HIDDEN = _Absent("hidden", "'all', ..., hidden=True")


def shown_to(needs: Needs, observation: Observation) -> Observation:
    """Return the observation with only the tensors that `needs` declares.

    If the observation lacks a declared tensor, the scorer raises the error, not this function.
    """
    layers: Any = _LAYERS
    if needs.layers != "none":
        layers = {layer: _view(needs, view) for layer, view in observation.layers.items()}
    return replace(observation, layers=layers, token_ids=observation.token_ids if needs.token_ids else cast(Any, _IDS))


def _view(needs: Needs, view: LayerView) -> LayerView:
    q, v = _QUERIES if needs.query_rows == 0 else view.q, view.v if needs.values else _VALUES
    hidden = view.hidden if needs.hidden else _HIDDEN
    return replace(view, q=q, v=v, repeats=None if needs.rehearsal is None else view.repeats, hidden=hidden)


def retain(policy: Policy, budget: Budget, observation: Observation) -> Retention:
    """Return the positions of the tokens that the policy keeps. CrystalCache returns a `CrystalRetention`.

    The function calls the policy's protection, scorer, budgets and selector, in this order.

    Implements: PO-RETAIN

    Raises:
        SpecError: if a group's budget is below its number of protected tokens, or if an input is invalid.
    """
    (only,) = retain_each(policy, (budget,), observation)
    return only


def retain_each(
    policy: Policy, budgets: Sequence[Budget], observation: Observation,
) -> list[Retention]:
    """Return the result of `retain` for each budget.

    The scorer is called once for all budgets, unless the scores depend on the budget.

    Raises:
        SpecError: as in `retain`.
    """
    protected, scores, retentions = policy.protection(observation.seen), None, []
    observation = shown_to(policy.scorer.needs, observation)
    for B in (tokens_of(policy, budget, observation.seen) for budget in budgets):
        if scores is None or policy.scorer.needs.budget:
            scores = policy.scorer(replace(observation, B=B), protected)
        retentions.append(_retained(policy, B, observation.seen, scores, protected))
    return retentions


def _retained(
    policy: Policy, B: int, seen: int, scores: Scores, protected: BoolVector,
) -> Retention:
    selection = chosen(policy, B, scores, protected)
    retention = Retention(selection.positions, selection.offsets, seen, policy.granularity)
    if isinstance(scores.carry, CrystalRecords) and isinstance(selection.records, Dissolution):
        return crystal_retention(scores.carry, retention, selection.records.ratio, B)
    return retention


def chosen(policy: Policy, B: int, scores: Scores, protected: BoolVector) -> Selection:
    """Select the tokens to keep: on average B per group. The score of a unit with a protected token becomes NaN."""
    _check_units(policy, scores, len(protected))
    pinned = touched_units(protected, scores.offsets)
    if pinned.any():
        scores = replace(scores, values=np.where(pinned, np.nan, scores.values))
    shares = policy.budgets(B * len(scores.values), scores)
    if (shares < protected.sum()).any():
        raise SpecError(
            "budget", B, f"must be at least {int(protected.sum())}, the number of tokens that {policy.name} protects"
        )
    return policy.selector(scores, shares, protected)


def _check_units(policy: Policy, scores: Scores, n: int) -> None:
    """Check that the scores have one column for each unit, and that the selector accepts these units."""
    columns, units = scores.values.shape[1], len(scores.offsets) - 1
    if columns != units or int(scores.offsets[-1]) != n:
        raise SpecError("scores", scores.values.shape, f"must have a column for each of {units} units")
    required = required_by(policy.selector)
    if required is not None and required.units == {"tokens"} and units != n:
        reason = f"must be one for each of the {n} tokens: use the selector fill_units, or scores of tokens"
        raise SpecError("scores", f"{units} units", reason)


def retain_turn(
    policy: Policy, budget: Budget, live: Sequence[Int64[IntVector, " _"]], shown: Sequence[Observation],
    heads: int = 1,
) -> Retention:
    """Return the positions that each set of kept tokens contains after the end of a later segment.

    The budget and the protection are computed from all tokens seen, including evicted tokens. The scorer reads the
    queries of the segment, and treats the cached tokens as a complete sequence.

    Implements: PO-TURN

    Args:
        live: absolute positions of each set's cached tokens, ascending, including the tokens of the segment.
        shown: one observation if all sets cache the same tokens. For a separable scorer, one observation per set, with
            only the layer (and head) of this set.
        heads: number of sets of kept tokens per layer.

    Raises:
        SpecError: as in `retain`, and if the sets contain different numbers of protected tokens.
    """
    seen = shown[0].seen
    B, protected = tokens_of(policy, budget, seen), policy.protection(seen)
    marks = [protected[positions] for positions in live]
    parts = [
        policy.scorer(replace(shown_to(policy.scorer.needs, one), B=B, positions=positions), mark)
        for one, positions, mark in zip(shown, live, marks, strict=False)
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
    kept = [positions[at] for positions, at in zip(live, slots, strict=True)]
    offsets = np.cumsum([0, *map(len, kept)]).astype(np.int64)
    return Retention(np.concatenate(kept), offsets, seen, policy.granularity)


def _shares(
    policy: Policy, B: int, parts: Sequence[Scores], marks: Sequence[BoolVector], heads: int,
) -> Int64[IntVector, " g"]:
    """Return budgets for groups of different lengths. Shorter rows are padded in front with the score -inf."""
    counts = sorted({int(mark.sum()) for mark in marks})
    if len(counts) > 1:
        raise SpecError("protection", counts, "all kept sets must store the same number of protected tokens")
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
