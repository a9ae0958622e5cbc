"""Policies that only look, or fail: for tests of what a scorer is shown and of errors in the middle of a prompt."""

from dataclasses import dataclass, field

import numpy as np

from models_integration import CustomPolicy, RetentionPolicy
from reference.policies import full_cache
from spec.arrays import BoolVector
from spec.budget import parse_budget
from spec.policy import Needs, Observation, Policy, Scores

__all__ = ["Failing", "Looking", "method_of"]


@dataclass
class Looking:
    """A scorer that keeps what it is shown."""

    needs: Needs
    shown: list[Observation] = field(default_factory=list)

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        self.shown.append(observation)
        n = observation.seen if observation.positions is None else len(observation.positions)
        return Scores(np.zeros((observation.groups, n)), np.arange(n + 1))


@dataclass
class Failing:
    """A scorer that raises."""

    error: BaseException
    needs: Needs = Needs()

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        raise self.error


def method_of(scorer: Looking | Failing) -> RetentionPolicy:
    """Nothing is evicted; the scorer runs."""
    full = full_cache()
    policy = Policy("probe", scorer, full.budgets, full.selector, full.protection)
    return CustomPolicy(policy, parse_budget(1.0))
