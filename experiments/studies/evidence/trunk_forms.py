"""Controls that give CrystalCache's trunks a different impact: rarity alone, or a salience relative to neighbours.

CrystalCache's salience sums over all later queries, so early tokens have more salience (Eq. 11). The local salience
divides the salience of a token by the mean salience of the neighbours, which have about as many later queries. A
control differs from CrystalCache with D = 0 in two orders: that of the trunks, and that of the tokens of a partly kept
trunk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from reference.crystalcache.impact import impact, rarity, token_counts, trunk_impact
from spec.arrays import BoolVector, Float64, Vector
from spec.parameters import PAPER
from spec.policy import Needs, Observation, Policy, Scorer, Scores
from spec.records import CrystalRecords

__all__ = ["NEIGHBOURS", "TRUNK_FORMS", "TrunkForm", "local_salience", "seed_of", "shuffled_in_runs"]

NEIGHBOURS = 64
"""Number of neighbours whose mean divides the salience of a token: half of them before the token, half after."""
Impact: TypeAlias = Callable[[Vector, Vector, np.random.Generator], Vector]
"""Function of the salience S, the rarity U and a generator of random numbers that returns the impact M, each (n,)."""


def seed_of(prompt_ids: Sequence[int]) -> int:
    """Return the seed of a prompt's random sets. All questions on one context share these sets."""
    ids = np.array(prompt_ids, dtype="<u4")
    return int(np.bitwise_xor.reduce(ids * np.arange(1, 2 * len(ids), 2, dtype="<u4")))


def local_salience(S: Float64[Vector, " n"]) -> Float64[Vector, " n"]:
    """Return S_i divided by the mean S of the neighbours of token i, without token i. At an end there are fewer."""
    sums, n, half = np.concatenate([[0.0], np.cumsum(S)]), len(S), NEIGHBOURS // 2
    first, stop = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    around: Vector = (sums[stop] - sums[first] - S) / (stop - first - 1)
    return S / around


def shuffled_in_runs(values: Float64[Vector, " n"], rng: np.random.Generator) -> Float64[Vector, " n"]:
    """Return the values in random order inside each run of NEIGHBOURS tokens."""
    runs = np.split(values, range(NEIGHBOURS, len(values), NEIGHBOURS))
    return np.concatenate([rng.permutation(run) for run in runs])


def _mixture(S: Vector, U: Vector, rng: np.random.Generator) -> Vector:
    return impact(np.clip(local_salience(S), PAPER.M_min, PAPER.M_max), U, PAPER)


def _shuffled(S: Vector, U: Vector, rng: np.random.Generator) -> Vector:
    return impact(np.clip(shuffled_in_runs(local_salience(S), rng), PAPER.M_min, PAPER.M_max), U, PAPER)


def _geometric(S: Vector, U: Vector, rng: np.random.Generator) -> Vector:
    return np.sqrt(local_salience(S) * U)


def _salience(S: Vector, U: Vector, rng: np.random.Generator) -> Vector:
    return local_salience(S)


def _rarity(S: Vector, U: Vector, rng: np.random.Generator) -> Vector:
    return U + 1e-9 * rng.random(len(U))  # far below any difference of U, so only ties are broken


@dataclass(frozen=True)
class FormScorer:
    """Scorer that runs CrystalCache's stages, and replaces the impact of tokens and trunks."""

    scorer: Scorer
    impact: Impact

    @property
    def needs(self) -> Needs:
        return self.scorer.needs

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        scores, ids = self.scorer(observation, protected), observation.token_ids
        assert ids is not None
        assert isinstance(scores.carry, CrystalRecords)
        U, rng = rarity(token_counts(ids)), np.random.default_rng(seed_of(ids.tolist()))
        M = self.impact(scores.carry.coattention.salience, U, rng)
        M_bar = np.where(scores.carry.protected, np.nan, trunk_impact(M, scores.offsets))
        return replace(scores, values=M_bar[None], members=M[None])


@dataclass(frozen=True)
class TrunkForm:
    """Impact of a control, and the text of the policy that forms the trunks."""

    impact: Impact
    base: str = 'crystalcache(graph="zero")'

    def of(self, crystalcache: Policy, name: str) -> Policy:
        """Return a policy made from `base` with this impact."""
        return replace(crystalcache, name=name, scorer=FormScorer(crystalcache.scorer, self.impact))


TRUNK_FORMS: Mapping[str, TrunkForm] = {
    "local-trunks": TrunkForm(_mixture),
    "local-salience-trunks": TrunkForm(_salience),
    "local-geometric-trunks": TrunkForm(_geometric, 'crystalcache(graph="zero", observed_layer=-3)'),
    "rarity-trunks": TrunkForm(_rarity),
    "shuffled-trunks": TrunkForm(_shuffled),
}
"""Controls by name, with these impacts:

- `local-trunks`: Eq. 22 with the local salience in place of the salience.
- `local-salience-trunks`: the local salience alone.
- `local-geometric-trunks`: the geometric mean of local salience and rarity, in the last layer but two.
- `rarity-trunks`: the rarity alone. Ties are broken at random.
- `shuffled-trunks`: Eq. 22 with the local salience of a random neighbour.
"""
