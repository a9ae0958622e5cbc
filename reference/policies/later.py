"""Policies with two scorers: one for the first prompt, one for decode steps and later segments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spec.arrays import BoolVector, IntMatrix
from spec.composition import Provided, provided_by
from spec.errors import SpecError
from spec.policy import (
    JoiningScorer,
    LayerView,
    LayerwiseScorer,
    Needs,
    Observation,
    RecordingScorer,
    RunningScorer,
    Scorer,
    Scores,
)
from spec.retention import Granularity

__all__ = ["FirstAndLater", "with_later_scores"]


@dataclass(frozen=True)
class FirstAndLater:
    """Scorer that scores the first prompt by `first`, and decode steps and later segments by `later`."""

    first: Scorer
    later: RunningScorer

    @property
    def needs(self) -> Needs:
        """Return the needs of both scorers together. Each scorer receives only the tensors that it declares."""
        a, b = self.first.needs, self.later.needs
        layers, rows = {a.layers, b.layers} - {"none"}, (a.query_rows, b.query_rows)
        same = len(layers) == 1 and (layers != {"observed"} or a.observed == b.observed)
        return Needs(
            layers.pop() if same else "all" if layers else "none",
            None if None in rows else max(row for row in rows if row is not None),
            a.observed if a.layers == "observed" else b.observed, a.values or b.values, a.token_ids or b.token_ids,
            a.accepts_tensor if a.accepts_tensor == b.accepts_tensor else None, a.budget or b.budget,
        )

    @property
    def provided(self) -> Provided | None:
        """Return what both scorers provide. The protection includes the tokens without a score in either of them."""
        first, later = provided_by(self.first), provided_by(self.later)
        if first is None or later is None:
            return None
        sink, recent = (max(pair) for pair in zip(first.unscored, later.unscored, strict=True))
        return replace(first, sets=first.sets & later.sets, unscored=(sink, recent), no_steps=later.no_steps)

    @property
    def layerwise(self) -> bool:
        alone = [isinstance(scorer, LayerwiseScorer) and scorer.layerwise for scorer in (self.first, self.later)]
        return all(alone) and isinstance(self.later, JoiningScorer)

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Return the scores of the first scorer, with the records of the second scorer about the whole prompt.

        Implements: PO-LATER-SCORES
        """
        shown = _shown(self.later.needs, self.needs, observation)
        if isinstance(self.later, RecordingScorer):
            records = self.later.record(None, shown)
        else:
            records = self.later(shown, protected).carry
        return replace(self.first(_shown(self.first.needs, self.needs, observation), protected), carry=records)

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Return the scores of the second scorer.

        Implements: PO-LATER-SCORES
        """
        return self.later.step(records, _shown(self.later.needs, self.needs, observation))

    def record(self, records: Any, observation: Observation, /) -> object:
        if isinstance(self.later, RecordingScorer):
            return self.later.record(records, _shown(self.later.needs, self.needs, observation))
        return self.step(records, observation).carry

    def keep(self, records: object, slots: IntMatrix, /) -> object:
        return self.later.keep(records, slots)

    def join(self, records: Sequence[Any], /) -> object:
        assert isinstance(self.later, JoiningScorer)
        return self.later.join(records)


def _shown(needs: Needs, known: Needs, observation: Observation) -> Observation:
    """Return the layers and the last queries that one of two scorers needs. `known` is what both of them need."""
    if needs.layers == "none":
        return observation
    layers = observation.layers
    if needs.layers == "observed" and known.layers == "all":
        layers = dict(list(layers.items())[needs.observed :][:1])
    return replace(observation, layers={layer: _last(view, needs.query_rows) for layer, view in layers.items()})


def _last(view: LayerView, rows: int | None) -> LayerView:
    if not rows:
        return view
    return replace(view, q=view.q[:, -rows:], lse=None if view.lse is None else view.lse[:, -rows:])


def with_later_scores(first: Scorer, later: Scorer, name: str) -> FirstAndLater:
    """Return a scorer that scores decode steps and later segments by `later`, which has the name `name`.

    Implements: PO-LATER-SCORES

    Raises:
        SpecError: if the scorers score different units or kept sets, or if a scorer has data that the other lacks.
    """
    one, other = provided_by(first), provided_by(later)
    fits = "use a scorer of single tokens for each layer and KV head, such as keydiff, knorm, h2o or rkv"
    if one is None or other is None or {one.units, other.units} != {"tokens"}:
        raise SpecError("steps", name, f"needs two scorers of single tokens: {fits}")
    if not one.sets & other.sets:
        (prompt, *_), (steps, *_) = one.sets, other.sets
        near = {Granularity.HEAD: "type steps=h2o", Granularity.LAYER: "type steps=tova"}
        reason = f"scores the tokens of each {steps.value}, but the prompt has a kept set for each {prompt.value}"
        raise SpecError("steps", name, f"{reason}: {near.get(prompt, 'leave steps= out')}")
    if one.second or other.second or first.needs.rehearsal is not None or later.needs.rehearsal is not None:
        raise SpecError("steps", name, f"needs scorers without second scores that read the prompt once: {fits}")
    if first.needs.hidden or later.needs.hidden:
        raise SpecError("steps", name, f"needs scorers that use no hidden states: {fits}")
    if not isinstance(later, RunningScorer):
        raise SpecError("steps", name, f"cannot score a decode step: {fits}")
    return FirstAndLater(first, later)
