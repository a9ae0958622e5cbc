"""Pure functions that decide which tokens a policy keeps while decoding. The caller evicts all other tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference.policies.budgets import tokens_of
from reference.policies.retain import chosen, shown_to
from spec.arrays import BoolVector, IntMatrix
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import JoiningScorer, Observation, Policy, RecordingScorer, Running, RunningScorer, Scores, Selection
from spec.retention import Retention

__all__ = ["advance", "advance_turn", "append_tokens", "join", "start"]


def start(policy: Policy, budget: Budget, observation: Observation) -> tuple[Retention, Running]:
    """Return the tokens that `retain` keeps at the end of the prompt, and the state for decoding.

    Raises:
        SpecError: as in `retain`, or if the policy cannot evict while decoding. A policy cannot evict while decoding if
            its scorer has no method `step`, or if its groups keep different numbers of tokens.
    """
    scorer = _running(policy)
    protected = policy.protection(observation.seen)
    B = tokens_of(policy, budget, observation.seen)
    scores = scorer(replace(shown_to(scorer.needs, observation), B=B), protected)
    slots = _rectangular(chosen(policy, B, scores, protected), policy)
    return _retention(slots, observation.seen, policy), Running(slots, scorer.keep(scores.carry, slots))


def join(policy: Policy, parts: Sequence[Running]) -> Running:
    """Join the decoding states of single layers into the state of all layers. `parts` is sorted by layer."""
    assert isinstance(policy.scorer, JoiningScorer)
    return Running(
        np.concatenate([part.live for part in parts]), policy.scorer.join([part.records for part in parts])
    )


def advance(
    policy: Policy, budget: Budget, running: Running, observation: Observation,
) -> tuple[Retention | None, Running]:
    """Run one decode step: add the token at position seen - 1. If an eviction is due, select the tokens to keep.

    The cache in `observation` includes the new token. The first result is None if the policy's cadence requires no
    eviction after the new token.

    Implements: PO-STEP
    """
    B = tokens_of(policy, budget, observation.seen)
    if not policy.cadence.due(observation.seen, running.live.shape[1] + 1, B):
        return None, append_tokens(policy, budget, running, observation, 1)
    live, scores, B = _grown(policy, budget, running, observation, 1)
    return _cut(policy, B, live, scores, observation.seen)


def advance_turn(
    policy: Policy, budget: Budget, running: Running, observation: Observation, tokens: int,
) -> tuple[Retention, Running]:
    """Add a later segment (the last `tokens` tokens) to the state, then decide once which tokens to keep.

    Each token of the segment changes the scorer's records as in a decode step.

    Implements: PO-TURN
    """
    live, scores, B = _grown(policy, budget, running, observation, tokens)
    return _cut(policy, B, live, scores, observation.seen)


def append_tokens(policy: Policy, budget: Budget, running: Running, observation: Observation, tokens: int) -> Running:
    """Add the last `tokens` tokens to the state without an eviction.

    Each added token changes the scorer's records as in a decode step.

    Implements: PO-READ
    """
    scorer = _running(policy)
    if isinstance(scorer, RecordingScorer):
        shown = shown_to(scorer.needs, observation)
        return Running(_live(running, observation.seen, tokens), scorer.record(running.records, shown))
    live, scores, _ = _grown(policy, budget, running, observation, tokens)
    return Running(live, scores.carry)


def _live(running: Running, seen: int, tokens: int) -> IntMatrix:
    """Return the positions of all cached tokens, including the new tokens."""
    return np.column_stack([running.live, np.tile(np.arange(seen - tokens, seen), (len(running.live), 1))])


def _grown(
    policy: Policy, budget: Budget, running: Running, observation: Observation, tokens: int,
) -> tuple[IntMatrix, Scores, int]:
    """Return the positions and the scores of all cached tokens, including the new tokens, and the budget."""
    B, scorer = tokens_of(policy, budget, observation.seen), _running(policy)
    live = _live(running, observation.seen, tokens)
    return live, scorer.step(running.records, replace(shown_to(scorer.needs, observation), B=B)), B


def _cut(policy: Policy, B: int, live: IntMatrix, scores: Scores, seen: int) -> tuple[Retention, Running]:
    slots = _rectangular(chosen(policy, B, scores, _protected_slots(policy, seen, live)), policy)
    kept = np.take_along_axis(live, slots, axis=1)
    return _retention(kept, seen, policy), Running(kept, _running(policy).keep(scores.carry, slots))


def _running(policy: Policy) -> RunningScorer:
    if not isinstance(policy.scorer, RunningScorer):
        raise SpecError(
            "policy", policy.name,
            "evicts only at the end of a prompt; use a policy that evicts while decoding, such as h2o",
        )
    return policy.scorer


def _rectangular(selection: Selection, policy: Policy) -> IntMatrix:
    sizes = np.diff(selection.offsets)
    if (sizes != sizes[0]).any():
        raise SpecError(
            "policy", policy.name, "cannot evict while decoding: all kept sets must have the same number of tokens"
        )
    return selection.positions.reshape(len(sizes), -1)


def _protected_slots(policy: Policy, seen: int, live: IntMatrix) -> BoolVector:
    marks = policy.protection(seen)[live]
    if (marks != marks[0]).any():
        raise SpecError("protection", policy.name, "must protect the same slots in every kept set")
    slots: BoolVector = marks[0]
    return slots


def _retention(positions: IntMatrix, seen: int, policy: Policy) -> Retention:
    groups, kept = positions.shape
    return Retention(positions.ravel(), kept * np.arange(groups + 1), seen, policy.granularity)
