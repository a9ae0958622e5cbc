"""Random eviction: each token has a random score. Studies compare policies with random eviction."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import top_units
from reference.policies.vase import uniform_numbers
from spec.arrays import BoolVector
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["RandomScores", "random_tokens"]


def _any(tensor: DeviceArray) -> bool:
    return True


@dataclass(frozen=True)
class RandomScores:
    """Scorer with a uniform random number for each position of each kept set. The scorer reads no tensor."""

    seed: int
    # All layers are declared, so that a turn is decided after all layers have stored the turn.
    needs: Needs = Needs("all", query_rows=0, accepts_tensor=_any)
    separable: bool = True
    layerwise: ClassVar[bool] = True
    provided: ClassVar[Provided] = Provided(no_steps="keeps no records: leave the cadence out")

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Return the random number of each cached token.

        Implements: PO-RANDOM
        """
        seen, at = observation.seen, observation.positions
        rows = [uniform_numbers(self.seed, observation.first + g, 0, seen) for g in range(observation.groups)]
        values = np.stack(rows) if at is None else np.stack(rows)[:, at]
        heads = len(next(iter(observation.layers.values())).k)
        return Scores(values, np.arange(values.shape[1] + 1), heads=heads)


@named("random-tokens", "", "random tokens, which are different in each layer and KV head")
def random_tokens(seed: int = 0) -> Policy:
    """Return random eviction: each KV head keeps B random tokens. The seed and the position decide about a token.

    The random numbers are those of VaSE in kvspec (PO-UNIFORM), so the kept tokens do not depend on the library or on
    the device. RandomPress in kvpress uses the generator of torch. With a seed it keeps the same tokens in every layer,
    and without a seed it draws new numbers for each prompt.

    Raises:
        SpecError: if the seed does not lie in [0, 2^64).
    """
    if not 0 <= seed < 2**64:
        raise SpecError("seed", seed, "must lie in [0, 2^64)")
    return Policy(
        "random-tokens", RandomScores(seed), even, top_units, SinkAndRecent(0, 0), granularity=Granularity.HEAD,
    )
