"""The controls: kept sets that are right or wrong by construction. A run that measures nothing fails them."""

from collections.abc import Sequence

import numpy as np

from models_integration.session.segment import ObservedSegment
from models_integration.studies.answers import cropped, retentions
from models_integration.tasks import Placement, Sample
from models_integration.tasks.metrics import RIGHT_OR_WRONG
from models_integration.tasks.samples import DELAYED_ASSOCIATION, NEEDLE
from reference.crystalcache.protection import effective_budget
from reference.policies.budgets import even
from reference.policies.protections import SinkAndRecent, protecting
from reference.policies.selectors import top_units
from spec.arrays import BoolVector
from spec.budget import Budget, parse_budget
from spec.parameters import PAPER
from spec.policy import Needs, Observation, Policy, Scores
from spec.retention import Granularity, Retention

__all__ = [
    "BLIND", "CONTROLS", "CONTROL_BOUNDS", "EVERY_CONTROL", "EVIDENCE", "FULL", "RANDOM", "WINDOWS", "bounds_of",
    "control_set", "control_tokens", "evidence_mask", "random_policy",
]

FULL, BLIND, RANDOM, EVIDENCE = "fullcache", "blind", "random", "evidence"
CONTROLS = (FULL, BLIND, RANDOM, EVIDENCE)
"""Ceiling; no context; a random set; the evidence, then a random set: those of every study."""
WITHOUT, ONLY, HOLDS, MISSES = "without needle", "only needle", "window holds needle", "window misses needle"
CONTROL_BOUNDS: dict[str, tuple[str, float]] = {
    WITHOUT: ("<=", 0.05), ONLY: (">=", 0.9), HOLDS: (">=", 0.9), MISSES: ("<=", 0.1),
}
"""The share of right answers that each of these must show."""
WINDOWS = {(NEEDLE, HOLDS): f"{NEEDLE}(depth=1.0)", (NEEDLE, MISSES): f"{NEEDLE}(depth=0.25)"}
"""Controls about the recent window whose sample has its fact elsewhere: the task that draws it."""
EVERY_CONTROL = (*CONTROLS, *CONTROL_BOUNDS)


def bounds_of(task: str, sample: Sample) -> Sequence[str]:
    """The controls with a bound that a task's own samples serve: those with one fact, whose answer is right or wrong.

    A fact in prose may stand in the recent window or not.
    """
    if len(sample.evidence) != 1 or sample.metric not in RIGHT_OR_WRONG:
        return ()
    return (WITHOUT, ONLY, *((MISSES,) if task.partition("(")[0] == DELAYED_ASSOCIATION else ()))


def control_tokens(budget: str, length: int) -> int:
    """B of a control about the window: it holds sinks and window."""
    return min(length, effective_budget(parse_budget(budget), length, PAPER.N_sink, PAPER.W_recent))


def evidence_mask(sample: Sample, seen: int) -> BoolVector:
    """Which of the tokens seen are the sample's evidence."""
    found = np.zeros(seen, dtype=np.bool_)
    for start, stop in sample.evidence:
        found[start:stop] = True
    return found


def control_set(
    name: str, budget: str, sample: Sample, observed: ObservedSegment, placement: Placement,
) -> Retention:
    """What a control keeps of a prompt that was read, less what is dropped of it."""
    seen = len(placement.prompt_ids)
    if name in (RANDOM, EVIDENCE):
        kept = _drawn(name, budget, sample, observed, placement)
    else:
        evidence = evidence_mask(sample, seen)
        B = control_tokens(budget, sample.length) if name in (HOLDS, MISSES) else 0
        masks = {FULL: ~np.zeros(seen, dtype=np.bool_), BLIND: np.zeros(seen, dtype=np.bool_), WITHOUT: ~evidence}
        window = SinkAndRecent(PAPER.N_sink, max(PAPER.W_recent, B - PAPER.N_sink))(seen)
        masks[ONLY] = evidence | window
        kept = Retention.shared(np.flatnonzero(masks.get(name, window)), seen)
    return cropped(kept, placement.dropped_slots)


def _drawn(
    name: str, budget: str, sample: Sample, observed: ObservedSegment, placement: Placement,
) -> Retention:
    seen = len(placement.prompt_ids)
    B, seed = parse_budget(budget).tokens(seen), _seed(placement)
    policy = random_policy(seed, B)
    if name == EVIDENCE:
        positions = np.flatnonzero(evidence_mask(sample, seen)).tolist()
        if len(positions) + policy.floor > B:
            policy = random_policy(seed, 0)
        policy = protecting(policy, positions)
    return retentions(policy, [Budget(count=B)], observed)[0]


class RandomScores:
    """Scores that know nothing: every layer and KV head draws its own."""

    needs = Needs()

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        shape = observation.groups, observation.seen
        return Scores(np.random.default_rng(self._seed).random(shape), np.arange(observation.seen + 1))


def random_policy(seed: int, B: int) -> Policy:
    """A random set for each layer and KV head, beside the paper's sinks and recent window where B holds them."""
    fits = PAPER.N_sink + PAPER.W_recent <= B
    protection = SinkAndRecent(PAPER.N_sink, PAPER.W_recent) if fits else SinkAndRecent(0, 0)
    floor = PAPER.N_sink + PAPER.W_recent if fits else 1
    return Policy(
        RANDOM, RandomScores(seed), even, top_units, protection, granularity=Granularity.HEAD, floor=floor
    )


def _seed(placement: Placement) -> int:
    """Of a prompt's random sets: questions of one context share them."""
    ids = np.array(placement.prompt_ids, dtype="<u4")
    return int(np.bitwise_xor.reduce(ids * np.arange(1, 2 * len(ids), 2, dtype="<u4")))
