"""VATP and CriticalKV: wrong readings of what a value weighs, and of the two stages."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond, instead_of, method_instead_of
from conformance.assurance.saboteurs.size_inputs import random_rows, scored
from reference.policies.attention import wide
from reference.policies.criticalkv import TwoScores, two_stages
from reference.policies.defensivekv import output_size
from reference.policies.h2o import h2o
from reference.policies.vatp import RunningValueWeighted, value_norms, vatp
from spec.policy import LayerView, Observation, Policy, Scores, Selection

__all__: list[str] = []


@instead_of(value_norms, "PO-VATP")
def euclidean_norms(observation: Any) -> Any:
    """A value's size is its Euclidean norm."""
    return np.concatenate([np.linalg.norm(wide(view.v), axis=2) for view in observation.layers.values()])


@instead_of(vatp, "PO-VATP")
def sinks_compete(N_sink: int = 4) -> Policy:
    """No sink is kept by itself."""
    return replace(vatp(N_sink), protection=h2o().protection)


@method_instead_of(RunningValueWeighted, "step", "PO-VATP")
def weighed_sums_are_kept(scorer: Any, records: object, observation: Any) -> Scores:
    """The weighed scores are the sums that a step goes on from: values weigh again in every step."""
    scores = RunningValueWeighted(scorer.host).step(records, observation)
    return replace(scores, carry=scores.values)


def staged(scores: Scores, budgets: Array, protected: Array, first: Array) -> Selection:
    """Each group has a number of its own for the first stage."""
    free = np.maximum(budgets - int(protected.sum()), 1)
    assert scores.second is not None
    positions = [
        two_stages(
            replace(scores, values=scores.values[g : g + 1], second=scores.second[g : g + 1]), budgets[g : g + 1],
            protected, Fraction(int(first[g]), int(free[g])),
        ).positions for g in range(len(budgets))
    ]
    return Selection(np.concatenate(positions), np.cumsum([0, *map(len, positions)]))


@instead_of(two_stages, "PO-TWO-STAGES")
def protected_in_the_first_stage(scores: Scores, budgets: Array, protected: Array, share: Fraction) -> Selection:
    """The first stage's places hold the protected tokens too."""
    first = budgets * share.numerator // share.denominator - int(protected.sum())
    return staged(scores, budgets, protected, np.maximum(first, 0))


@instead_of(two_stages, "PO-TWO-STAGES")
def the_first_part_rounded_up(scores: Scores, budgets: Array, protected: Array, share: Fraction) -> Selection:
    """The first stage's places are rounded up."""
    free = budgets - int(protected.sum())
    return staged(scores, budgets, protected, -(-free * share.numerator // share.denominator))


@instead_of(two_stages, "PO-TWO-STAGES")
def second_stage_first(scores: Scores, budgets: Array, protected: Array, share: Fraction) -> Selection:
    """The second score has the first half, rounded down."""
    assert scores.second is not None
    swapped = replace(scores, values=scores.second, second=scores.values)
    return two_stages(swapped, budgets, protected, share)


@method_instead_of(TwoScores, "__call__", "PO-CRITICALKV")
def budgets_by_the_second_score(scorer: Any, observation: Observation, protected: Array) -> Scores:
    """Both stages and the budgets have the score times the output's size."""
    scores = TwoScores(scorer.host, scorer.W_o)(observation, protected)
    assert scores.second is not None
    return replace(scores, values=scores.second)


@method_instead_of(TwoScores, "__call__", "PO-CRITICALKV")
def size_of_the_value_itself(scorer: Any, observation: Observation, protected: Array) -> Scores:
    """The output projection is left out."""
    scores = TwoScores(scorer.host, scorer.W_o)(observation, protected)
    return replace(scores, second=(scores.values + 1e-4) * value_norms(observation))


@method_instead_of(TwoScores, "__call__", "PO-CRITICALKV")
def without_epsilon(scorer: Any, observation: Observation, protected: Array) -> Scores:
    """Nothing is added to the score."""
    scores = TwoScores(scorer.host, scorer.W_o)(observation, protected)
    assert scores.second is not None
    return replace(scores, second=scores.second / (scores.values + 1e-4) * scores.values)


@beyond("2 047 channels of the output", output_size, "PO-CRITICALKV", lambda: (
    random_rows(1, 3, 4), random_rows(2, 4, 3000) - 0.5,
))
def outputs_of_2047_channels(v: Array, W_o: Array) -> Array:
    """The magnitudes of the first 2 047 channels are summed."""
    return output_size(v, W_o[:, :, :2047])


@beyond("1 024 tokens", value_norms, "PO-VATP", lambda: (
    Observation(1100, 1, None, {0: LayerView(None, None, random_rows(1, 1100, 4), 1.0, None)}),
))
def norms_of_1024_tokens(observation: Any) -> Array:
    """Tokens behind the first 1 024 have the norm of the last of these."""
    norms = value_norms(observation)
    norms[:, 1024:] = norms[:, 1023:1024]
    return norms


@beyond("511 places", two_stages, "PO-TWO-STAGES", lambda: (
    replace(scored(random_rows(1, 900)), second=random_rows(1, 1800)[:, 900:]), np.array([700]),
    np.zeros(900, dtype=np.bool_), Fraction(1, 2),
))
def the_first_stage_in_8_bits(scores: Scores, budgets: Array, protected: Array, share: Fraction) -> Selection:
    """The first stage's number of tokens is held in 8 bits."""
    free = int(budgets[0]) - int(protected.sum())
    first = free * share.numerator // share.denominator
    return two_stages(scores, budgets, protected, share if first < 256 else Fraction(first % 256, free))
