"""Set-conditioned diversity: wrong readings."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of, method_instead_of
from reference.diversity import EPSILON, cosines, diverse, dots, signatures, toward_mean, unit_rows
from reference.policies import scheduled
from reference.policies.diversity import Diverse, RunningSigned, SignedRecords
from spec.policy import Scores, Selection
from spec.validate import check_diversity, check_penalty

__all__: list[str] = []


@instead_of(dots, "DV-COSINE")
def in_any_order(V: Array, x: Array) -> Array:
    """A matrix product, whose order of sums is the library's."""
    product: Array = V @ x
    return product


@instead_of(unit_rows, "DV-COSINE")
def epsilon_in_the_root(u: Array) -> Array:
    """Epsilon is added to the sum of squares."""
    unit: Array = u / np.sqrt((u * u).sum(axis=1) + EPSILON)[:, None]
    return unit


@instead_of(signatures, "DV-SIGNATURE")
def unit_before_the_mean(values: Any, mode: Any) -> Array:
    """Each head's value has length 1 before it is averaged."""
    unit = [np.stack([unit_rows(np.asarray(head, dtype=np.float64)) for head in layer]) for layer in values]
    return signatures(unit, mode)


@instead_of(signatures, "DV-SIGNATURE")
def the_last_layer_alone(values: Any, mode: Any) -> Array:
    """A flat signature is made of the last layer's values."""
    return signatures(values[-1:] if mode == "flat" else values, mode)


def _grown(s: Array, V: Array, retained: Array, k: int, redundancy: Any, last: bool = False) -> Array:
    check_diversity(s, V, retained, k, 0.0)
    worth, sims, S = np.where(np.isnan(s), -np.inf, s), cosines(V), retained.copy()
    for _ in range(k - int(S.sum())):
        left = np.flatnonzero(~S)
        gain = (worth - redundancy(sims, S))[left]
        S[left[len(left) - 1 - np.argmax(gain[::-1]) if last else np.argmax(gain)]] = True
    return np.flatnonzero(S)


def _largest(lam: float, floor: float = 0.0) -> Any:
    check_penalty(lam)
    return lambda sims, S: lam * (sims[S].max(axis=0, initial=floor) if S.any() else np.zeros(len(S)))


@instead_of(diverse, "DV-GREEDY")
def a_bonus_for_opposites(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """The largest cosine counts below 0 too."""
    return _grown(s, V, retained, k, _largest(lam, -np.inf))


@instead_of(diverse, "DV-GREEDY")
def mean_similarity(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """Redundancy is the mean cosine with what is kept."""
    check_penalty(lam)
    return _grown(
        s, V, retained, k, lambda sims, S: lam * np.maximum(0.0, sims[S].mean(axis=0)) if S.any() else np.zeros(len(S))
    )


@instead_of(diverse, "DV-GREEDY")
def later_position_first(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """Equal gains go to the higher position."""
    return _grown(s, V, retained, k, _largest(lam), last=True)


@instead_of(diverse, "DV-GREEDY")
def retained_tokens_outside_the_set(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """Only picks count as kept: a copy of a protected token stays as well."""
    held = retained.copy()
    return _grown(s, V, retained, k, lambda sims, S: _largest(lam)(sims, S & ~held))


@instead_of(diverse, "DV-GREEDY")
def in_one_pass(s: Array, V: Array, retained: Array, k: int, lam: float) -> Array:
    """Redundancy with the best token alone, then the highest: nothing is conditioned on later picks."""
    first = diverse(s, V, retained, min(k, int(retained.sum()) + 1), lam)
    marks = np.zeros(len(s), dtype=np.bool_)
    marks[first] = True
    return _grown(s, V, marks, k, lambda sims, S: _largest(lam)(sims, marks))


@method_instead_of(Diverse, "__call__", "DV-POLICY")
def the_first_signature_for_all(selector: Any, scores: Scores, budgets: Array, protected: Array) -> Selection:
    """Every kept set compares by the first one's signatures."""
    V = scores.signatures
    assert V is not None
    one = Scores(scores.values, scores.offsets, scores.members, scores.carry, scores.heads, V[:1])
    return Diverse(selector.stages, selector.lam)(one, budgets, protected)


@method_instead_of(Diverse, "__call__", "DV-POLICY")
def penalty_doubled_below_one(selector: Any, scores: Scores, budgets: Array, protected: Array) -> Selection:
    """Both tokens of a pair pay: the penalty is twice lambda."""
    return Diverse(selector.stages, 2 * selector.lam)(scores, budgets, protected)


@method_instead_of(RunningSigned, "shown", "DV-POLICY")
def another_layer_observed(scorer: Any, observation: Any) -> Any:
    """A host that looks at the first layer is shown the last one."""
    layers = dict(observation.layers)
    return replace(observation, layers=layers if scorer.host.needs.layers == "all" else dict([layers.popitem()]))


@method_instead_of(RunningSigned, "step", "DV-POLICY")
def signatures_of_slots(scorer: Any, records: Any, observation: Any) -> Scores:
    """A step averages what stands in the same slot, though heads hold different tokens there."""
    scores = scorer.host.step(records.host, observation)
    V = signatures([np.asarray(view.v) for view in observation.layers.values()], scorer.mode)
    V = np.repeat(V, len(records.signatures) // len(V), axis=0)
    return Scores(scores.values, scores.offsets, None, SignedRecords(scores.carry, V), scores.heads, V)


@instead_of(toward_mean, "DV-VARIANT-B")
def toward_the_first_token(V: Array) -> Array:
    """The direction is the first token's signature."""
    return dots(V, V[0])


@instead_of(toward_mean, "DV-VARIANT-B")
def mean_without_a_norm(V: Array) -> Array:
    """The mean signature is not brought to length 1."""
    return dots(V, V.mean(axis=0))


@instead_of(scheduled, "DV-SCHEDULE")
def each_round_rounded(B: int, rounds: int, tilt: int) -> Array:
    """Each round is rounded by itself, so that the mean misses B."""
    scheduled(B, rounds, tilt)
    return np.array([int(B + tilt - Fraction(2 * tilt * r, rounds - 1)) for r in range(rounds)])


@instead_of(scheduled, "DV-SCHEDULE")
def two_levels(B: int, rounds: int, tilt: int) -> Array:
    """The first half above the mean, the second half below it."""
    line = scheduled(B, rounds, tilt)
    half = rounds // 2
    return np.concatenate([np.full(half, B + tilt), line[half : rounds - half], np.full(half, B - tilt)])
