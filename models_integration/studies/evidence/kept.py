"""What each cell of a sample keeps: a prompt is observed once, each policy scores it once, budgets only select."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from models_integration.session.segment import ObservedSegment
from models_integration.session.verbs import EVERYTHING, observe
from models_integration.studies.answers import cropped, needed, retentions
from models_integration.studies.subject import Subject
from models_integration.tasks import Placement, Sample
from reference.policies.budgets import even
from reference.policies.protections import SinkAndRecent, protecting
from reference.policies.retain import tokens_of
from reference.policies.selectors import top_units
from spec.arrays import BoolVector
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.policy import Needs, Observation, Policy, Scores
from spec.retention import Granularity, Retention

__all__ = ["BLIND", "CONTROLS", "EVIDENCE", "FULL", "RANDOM", "Prompt", "random_policy", "read_prompt"]

FULL, BLIND, RANDOM, EVIDENCE = "fullcache", "blind", "random", "evidence"
CONTROLS = (FULL, BLIND, RANDOM, EVIDENCE)
"""Ceiling; no context; a random set; the evidence, then a random set."""


@dataclass(frozen=True)
class RandomScores:
    """Scores that know nothing: every layer and KV head draws its own."""

    seed: int
    needs: Needs = Needs()

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        shape = observation.groups, observation.seen
        return Scores(np.random.default_rng(self.seed).random(shape), np.arange(observation.seen + 1))


def random_policy(seed: int) -> Policy:
    """A random set for each layer and KV head, beside the paper's sinks and recent window."""
    protection = SinkAndRecent(PAPER.N_sink, PAPER.W_recent)
    floor = PAPER.N_sink + PAPER.W_recent
    return Policy(
        RANDOM, RandomScores(seed), even, top_units, protection, granularity=Granularity.HEAD, floor=floor
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt that was read once, and what each policy keeps of it under each budget.

    Attributes:
        placement: what is dropped from it and read after it.
        observed: with the full cache, less what is dropped.
        kept: by policy, in the order of the budgets; less what is dropped.
        seconds: of the prefill, and of each policy's decisions.
    """

    placement: Placement
    observed: ObservedSegment
    kept: Mapping[str, Sequence[Retention]]
    seconds: Mapping[str, float]

    def followed_by(self, placement: Placement) -> "Prompt":
        """The same with another question behind it."""
        return replace(self, placement=placement)

    def with_evidence(self, sample: Sample, budgets: Sequence[str]) -> Mapping[str, Sequence[Retention]]:
        """What is kept, the control that keeps this sample's evidence among it."""
        positions = [position for start, stop in sample.evidence for position in range(start, stop)]
        policy = protecting(random_policy(_seed(self.placement)), positions)
        return {**self.kept, EVIDENCE: _kept(policy, budgets, self.observed, self.placement)}


def read_prompt(
    subject: Subject, policies: Mapping[str, Policy], budgets: Sequence[str], placement: Placement,
) -> Prompt:
    """Observe a prompt once, and decide about it under every policy and budget, and at random.

    Raises:
        SpecError: for a prompt that is not served, and what a policy refuses.
    """
    start = time.perf_counter()
    rehearsal = needed(policy.scorer.needs for policy in policies.values()).rehearsal
    ids = torch.tensor([placement.prompt_ids], device=subject.model.device)
    observed = observe(subject.model, ids, needs=replace(EVERYTHING, rehearsal=rehearsal))
    seconds, kept = {"prefill": time.perf_counter() - start}, {}
    for name, policy in {**policies, RANDOM: random_policy(_seed(placement))}.items():
        start = time.perf_counter()
        kept[name] = _kept(policy, budgets, observed, placement)
        seconds[name] = time.perf_counter() - start
    if placement.dropped_slots:
        observed.cache.crop(-placement.dropped_slots)
    return Prompt(placement, observed, kept, seconds)


def _kept(
    policy: Policy, budgets: Sequence[str], observed: ObservedSegment, placement: Placement,
) -> list[Retention]:
    wanted = [parse_budget(budget) for budget in budgets]
    try:
        each = retentions(policy, wanted, observed)
        for budget, kept in zip(wanted, each, strict=True):
            _check_promise(policy, tokens_of(policy, budget, kept.seen), kept)
    except Exception as error:
        error.add_note(f"policy {policy.name}")
        raise
    return [cropped(retention, placement.dropped_slots) for retention in each]


def _check_promise(policy: Policy, B: int, kept: Retention) -> None:
    """What promises to be exact in its budget keeps no more, or its figures would not be those of its budget."""
    if policy.promises.budget_exact == "yes" and len(kept.positions) > B * kept.groups:
        mean = f"{len(kept.positions) / kept.groups:g}"
        raise SpecError("budget", B, f"is what {policy.name} promises to keep, and it keeps {mean} tokens of a group")


def _seed(placement: Placement) -> int:
    """Of a prompt's random sets: questions of one context share them."""
    ids = np.array(placement.prompt_ids, dtype="<u4")
    return int(np.bitwise_xor.reduce(ids * np.arange(1, 2 * len(ids), 2, dtype="<u4")))
