"""NestedKV: wrong readings of each equation."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.directions import unit_keys
from reference.nestedkv import (
    anomalies,
    anomaly_score,
    blend,
    block_size,
    current_memory,
    episodic_memory,
    gap,
    min_max,
    rectified_surprise,
    routed_score,
    stable_memory,
)
from reference.policies.budgets import Adaptive, Competition, even
from reference.policies.keydiff import keydiff
from reference.policies.nestedkv import (
    eviction_budget,
    nestedkv,
    nestedkv_score,
    nestedkv_without_adaptive,
    nestedkv_without_both,
    nestedkv_without_continuum,
)
from reference.policies.protections import SinkAndRecent
from spec.parameters import NESTEDKV, NestedKVParameters
from spec.policy import Policy

__all__: list[str] = []


@instead_of(unit_keys, "NK-UNIT-KEYS")
def largest_channel(k: Array) -> Any:
    """A key is divided by its largest channel."""
    return k / np.maximum(np.abs(k).max(axis=2, keepdims=True), 1e-300)


@instead_of(unit_keys, "NK-UNIT-KEYS")
def epsilon_under_the_key(k: Array) -> Any:
    """A zero key stays zero: an epsilon stands under it."""
    return k / (np.sqrt((k * k).sum(axis=2, keepdims=True)) + 1e-12)


@instead_of(stable_memory, "NK-STABLE")
def without_sinks(unit: Array) -> Any:
    """The sinks are left out of the mean."""
    return unit[:, 4 if unit.shape[1] > 4 else 0 :].mean(axis=1, keepdims=True)


@instead_of(stable_memory, "NK-STABLE")
def median_key(unit: Array) -> Any:
    """The median of each channel stands for the mean."""
    return np.median(unit, axis=1, keepdims=True)


@instead_of(block_size, "NK-EPISODIC")
def without_the_upper_clip(N: int, parameters: Any) -> int:
    """Blocks grow with the prompt."""
    return int(max(N // parameters.blocks, parameters.b_min))


@instead_of(block_size, "NK-EPISODIC")
def rounded_block(N: int, parameters: Any) -> int:
    """N / 32 is rounded, not floored."""
    return int(min(max(round(N / parameters.blocks), parameters.b_min), parameters.b_max))


@instead_of(episodic_memory, "NK-EPISODIC")
def last_block_joined(unit: Array, b: int) -> Any:
    """What is left at the end joins the block before it."""
    memory, n = episodic_memory(unit, b), unit.shape[1]
    first = max(0, n // b - 1) * b
    memory[:, first:] = unit[:, first:].mean(axis=1, keepdims=True)
    return memory


@instead_of(current_memory, "NK-CURRENT")
def without_the_token(unit: Array, W: int) -> Any:
    """The window ends before the token."""
    memory = np.zeros_like(unit)
    memory[:, 1:] = current_memory(unit, W)[:, :-1]
    return memory


@instead_of(current_memory, "NK-CURRENT")
def one_token_longer(unit: Array, W: int) -> Any:
    """The window holds W tokens before the token itself."""
    return current_memory(unit, W + 1)


@instead_of(current_memory, "NK-CURRENT")
def divided_by_the_window(unit: Array, W: int) -> Any:
    """The start is divided by W too."""
    share = np.minimum(np.arange(1, unit.shape[1] + 1), W) / W
    return current_memory(unit, W) * share[:, None]


@instead_of(anomalies, "NK-ANOMALY")
def inner_products(unit: Array, memory: Array) -> Any:
    """The memory is not normalised: minus the inner product."""
    return -(unit * memory).sum(axis=2)


@instead_of(anomalies, "NK-ANOMALY")
def typical_keys_score(unit: Array, memory: Array) -> Any:
    """The cosine itself."""
    return -anomalies(unit, memory)


@instead_of(anomalies, "NK-ANOMALY")
def any_length_has_a_direction(unit: Array, memory: Array) -> Any:
    """Only an exact zero has no direction."""
    length = np.sqrt((memory * memory).sum(axis=2))
    return -(unit * memory).sum(axis=2) / np.where(length > 0, length, 1.0)


@instead_of(min_max, "NK-MIN-MAX")
def over_all_heads(a: Array) -> Any:
    """One range for all heads of the layer."""
    spread = a.max() - a.min()
    return (a - a.min()) / spread if spread > 2.0**-16 else np.zeros_like(a)


@instead_of(min_max, "NK-MIN-MAX")
def any_range_counts(a: Array) -> Any:
    """Only a range of exactly zero is zero: rounding is stretched to [0, 1]."""
    above = a - a.min(axis=1, keepdims=True)
    spread = above.max(axis=1, keepdims=True)
    return above / np.where(spread > 0, spread, 1.0)


@instead_of(gap, "NK-GAP")
def rounded_up(a: Array, p: Fraction) -> Any:
    """The share is rounded up."""
    m = math.ceil(p * a.shape[2])
    ordered = np.sort(a, axis=2)
    return ordered[:, :, -m:].mean(axis=2) - ordered[:, :, :m].mean(axis=2)


@instead_of(gap, "NK-GAP")
def top_alone(a: Array, p: Fraction) -> Any:
    """The bottom is not taken off."""
    m = max(1, math.floor(p * a.shape[2]))
    return np.sort(a, axis=2)[:, :, -m:].mean(axis=2)


@instead_of(blend, "NK-BLEND")
def prior_alone(a: Array, delta: Array, parameters: Any) -> Any:
    """The gaps move nothing."""
    return blend(a, np.zeros_like(delta), parameters)


@instead_of(blend, "NK-BLEND")
def without_the_prior(a: Array, delta: Array, parameters: Any) -> Any:
    """A softmax of the gaps alone."""
    return blend(a, delta, replace(parameters, w0=(1.0, 1.0, 1.0)))


@instead_of(rectified_surprise, "NK-SURPRISE")
def without_appendix_a(a: Array) -> Any:
    """Eq. 13 as it stands: the deviation itself."""
    return a.std(axis=0)


@instead_of(rectified_surprise, "NK-SURPRISE")
def normalised_last(a: Array) -> Any:
    """Centred and cut first, normalised then."""
    s = a.std(axis=0)
    return min_max(np.maximum(0.0, s - s.mean(axis=1, keepdims=True)))


@instead_of(rectified_surprise, "NK-SURPRISE")
def without_the_mean(a: Array) -> Any:
    """Normalised, and not centred."""
    return min_max(a.std(axis=0))


@instead_of(routed_score, "NK-ROUTE")
def hard_switch(a: Array, blended: Array, s: Array, parameters: Any) -> Any:
    """The gate is open or shut."""
    return np.where(s > parameters.tau, a.max(axis=0), blended)


@instead_of(routed_score, "NK-ROUTE")
def branches_swapped(a: Array, blended: Array, s: Array, parameters: Any) -> Any:
    """Where the scales agree, the strongest counts."""
    return blended + a.max(axis=0) - routed_score(a, blended, s, parameters)


@instead_of(anomaly_score, "NK-SCORE")
def pinned_before_the_statistics(k: Any, parameters: Any) -> Any:
    """Sinks are left out of every statistic and score 1."""
    first = parameters.N_sink if k.shape[1] > parameters.N_sink else 0
    rest = anomaly_score(k[:, first:], parameters)
    return np.concatenate([np.ones((len(k), first)), rest], axis=1)


@instead_of(anomaly_score, "NK-SCORE")
def two_scales(k: Any, parameters: Any) -> Any:
    """The current memory is left out."""
    return anomaly_score(k, replace(parameters, w0=(*parameters.w0[:2], 1e-300), W=k.shape[1]))


@instead_of(nestedkv, "NK-NESTEDKV")
def blend_as_the_safeguard(parameters: NestedKVParameters = NESTEDKV, backend: Any = "numpy") -> Policy:
    """A fifth of every share is even, as in Ada-KV."""
    return replace(nestedkv(parameters, backend), budgets=Adaptive(parameters.alpha_s))


@instead_of(nestedkv, "NK-NESTEDKV")
def no_safeguard(parameters: NestedKVParameters = NESTEDKV, backend: Any = "numpy") -> Policy:
    """Heads have what they win."""
    return replace(nestedkv(parameters, backend), budgets=Competition(Fraction(0)))


@instead_of(nestedkv, "NK-NESTEDKV")
def sinks_are_not_pinned(parameters: NestedKVParameters = NESTEDKV, backend: Any = "numpy") -> Policy:
    """Sinks stand for themselves."""
    return replace(nestedkv(parameters, backend), protection=SinkAndRecent(0, 0))


@instead_of(nestedkv, "NK-NESTEDKV")
def sinks_beside_the_quota(parameters: NestedKVParameters = NESTEDKV, backend: Any = "numpy") -> Policy:
    """Each head has its sinks, and then the whole of its quota."""
    def shares(total: int, scores: Any) -> Any:
        n = scores.values.shape[1]
        return np.minimum(Competition(parameters.alpha_s)(total, scores) + np.isnan(scores.values).sum(axis=1), n)

    return replace(nestedkv(parameters, backend), budgets=shares)


@instead_of(nestedkv_score, "NK-NESTEDKV")
def renormalised_before_competing(view: Any, stages: Any, parameters: Any) -> Any:
    """a* is moved to [0, 1] again in each head before heads compete."""
    return min_max(stages.anomaly_score(view.k, parameters))


@instead_of(eviction_budget, "NK-TOKENS")
def truncated_float(r: Any, N: int) -> int:
    """int(N * (1 - r)) in floats."""
    return int(N * (1 - float(r))) or eviction_budget(r, N)


@instead_of(eviction_budget, "NK-TOKENS")
def rounded_up_budget(r: Any, N: int) -> int:
    """The kept share is rounded up."""
    return N - int(Fraction(str(r)) * N) if eviction_budget(r, N) else 0


@instead_of(nestedkv_without_continuum, "NK-ABLATIONS")
def keydiff_with_sinks(parameters: NestedKVParameters = NESTEDKV) -> Policy:
    """KeyDiff's score under NestedKV's budgets, sinks pinned."""
    pinned = SinkAndRecent(parameters.N_sink, 0)
    return replace(nestedkv_without_continuum(parameters), protection=pinned, floor=parameters.N_sink)


@instead_of(nestedkv_without_adaptive, "NK-ABLATIONS")
def heads_still_compete(parameters: NestedKVParameters = NESTEDKV, backend: Any = "numpy") -> Policy:
    """The safeguard goes, and the competition stays."""
    return replace(nestedkv(parameters, backend), budgets=Competition(Fraction(0)))


@instead_of(nestedkv_without_both, "NK-ABLATIONS")
def nestedkv_itself_uniform() -> Policy:
    """Without both is without adaptive."""
    return replace(keydiff(), scorer=nestedkv().scorer, budgets=even)
