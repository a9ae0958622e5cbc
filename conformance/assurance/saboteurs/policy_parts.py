"""Policies: wrong readings of the parts that they share."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of, method_instead_of
from reference.policies.attention import (
    accumulated_attention,
    average_pool,
    max_pool,
    observed_attention,
    received_attention,
)
from reference.policies.budgets import (
    Above,
    Adaptive,
    Competition,
    Pyramid,
    even,
    largest_remainder,
    pyramid_targets,
    winners,
)
from reference.policies.cadences import advance_turn, take_up
from reference.policies.expected_attention import expected_weights
from reference.policies.official import adakv_official, pyramidkv_official
from reference.policies.retain import chosen, tokens_of
from reference.policies.selectors import best_tokens, fill_units, top_units
from reference.policies.turns import retain_turn
from spec.budget import Budget
from spec.policy import Cadence, Scores, Selection
from spec.retention import Retention

__all__: list[str] = []


@instead_of(chosen, "PO-RETAIN")
def total_for_all_sets(policy: Any, B: int, scores: Any, protected: Array) -> Any:
    """B is the total of all kept sets, not the mean."""
    return policy.selector(scores, policy.budgets(B, scores), protected)


@instead_of(tokens_of, "PO-RETAIN")
def floor_on_top(policy: Any, budget: Any, seen: int) -> int:
    """The floor is added to the budget."""
    return int(policy.floor + budget.tokens(seen))


@instead_of(chosen, "PO-RETAIN")
def shares_are_not_checked(policy: Any, B: int, scores: Any, protected: Array) -> Any:
    """A share may be smaller than what is protected: it is exceeded in silence."""
    return policy.selector(scores, policy.budgets(B * len(scores.values), scores), protected)


@method_instead_of(Cadence, "due", "PO-STEP")
def one_step_late(cadence: Any, seen: int, live: int, B: int) -> bool:
    """A decision falls due in the step after the multiple."""
    return cadence.every is not None and (seen - 1) % cadence.every == 0 and live - B >= cadence.excess


@method_instead_of(Cadence, "due", "PO-STEP")
def slack_is_exceeded(cadence: Any, seen: int, live: int, B: int) -> bool:
    """More than the excess must be above the budget."""
    return cadence.every is not None and seen % cadence.every == 0 and live - B > cadence.excess


@instead_of(retain_turn, "PO-TURN")
def budget_of_what_is_stored(policy: Any, budget: Any, live: Any, shown: Any, heads: int = 1) -> Any:
    """B is counted from the tokens that the fullest set stores."""
    return retain_turn(policy, Budget(count=budget.tokens(max(map(len, live)))), live, shown, heads)


@instead_of(retain_turn, "PO-TURN")
def protection_by_slot(policy: Any, budget: Any, live: Any, shown: Any, heads: int = 1) -> Any:
    """The first slots are taken for the first tokens."""
    most = max(map(len, live))
    slots = [np.arange(most - len(own), most) for own in live]
    moved = [replace(one, seen=most) for one in shown]
    counted = Budget(count=tokens_of(policy, budget, shown[0].seen))
    found = retain_turn(policy, counted, slots, moved, heads)
    kept = [own[found.group(g) - (most - len(own))] for g, own in enumerate(live)]
    return Retention(np.concatenate(kept), found.offsets, shown[0].seen, policy.granularity)


@instead_of(advance_turn, "PO-TURN")
def a_turn_waits_for_the_cadence(policy: Any, budget: Any, running: Any, observation: Any, tokens: int) -> Any:
    """Nothing is evicted at the end of a turn unless a step would be due."""
    seen = observation.seen
    due = policy.cadence.due(seen, running.live.shape[1] + tokens, tokens_of(policy, budget, seen))
    return advance_turn(policy, budget if due else Budget(count=seen), running, observation, tokens)


@instead_of(take_up, "PO-READ")
def a_text_that_is_read_leaves_no_sums(policy: Any, budget: Any, running: Any, observation: Any, tokens: int) -> Any:
    """What is read joins the cache, and nobody notes what it attended to."""
    after, old = take_up(policy, budget, running, observation, tokens), np.asarray(running.records)
    return replace(after, records=np.pad(old, ((0, 0), (0, tokens))))


@instead_of(take_up, "PO-READ")
def a_text_that_is_read_is_a_turn(policy: Any, budget: Any, running: Any, observation: Any, tokens: int) -> Any:
    """A decision follows what was read."""
    return advance_turn(policy, budget, running, observation, tokens)[1]


@instead_of(observed_attention, "PO-OBSERVED-ATTENTION")
def window_outside_the_softmax(view: Any, W: int) -> Array:
    """The softmax runs over the keys before the window alone."""
    A = observed_attention(view, W)
    past = A[:, :, : A.shape[2] - A.shape[1]]
    total = past.sum(axis=2, keepdims=True)
    return np.concatenate([past / np.where(total == 0, 1, total), A[:, :, past.shape[2] :]], axis=2)


@instead_of(accumulated_attention, "PO-OBSERVED-ATTENTION")
def mean_over_the_queries_that_see_a_key(view: Any) -> Array:
    """The sum is divided by the number of queries that see the key."""
    total = accumulated_attention(view)
    return total / np.arange(total.shape[1], 0, -1)


@instead_of(received_attention, "PO-OBSERVED-ATTENTION")
def the_mean_of_a_group(q: Array, k: Array, scaling: float, softcap: float | None) -> Array:
    """A group's heads are averaged, not added."""
    return received_attention(q, k, scaling, softcap) * len(k) / len(q)


@instead_of(received_attention, "PO-OBSERVED-ATTENTION")
def every_query_sees_all_keys(q: Array, k: Array, scaling: float, softcap: float | None) -> Array:
    """Several queries see each other's later keys."""
    alone = (received_attention(q[:, at : at + 1], k, scaling, softcap) for at in range(q.shape[1]))
    total: Array = np.sum(list(alone), axis=0)
    return total


@instead_of(received_attention, "PO-OBSERVED-ATTENTION")
def logits_without_a_cap(q: Array, k: Array, scaling: float, softcap: float | None) -> Array:
    """The soft cap is left out."""
    return received_attention(q, k, scaling, None)


@instead_of(best_tokens, "PO-TOP-UNITS")
def the_newer_token_of_a_tie(values: Array, shares: Array, pinned: Array) -> Selection:
    """Of equal scores the newer token stays."""
    n = values.shape[1]
    found = best_tokens(values[:, ::-1], shares, pinned[:, ::-1])
    groups = np.split(found.positions, found.offsets[1:-1])
    return Selection(np.concatenate([n - 1 - own[::-1] for own in groups]), found.offsets)


@instead_of(best_tokens, "PO-TOP-UNITS")
def pinned_tokens_beside_the_share(values: Array, shares: Array, pinned: Array) -> Selection:
    """Pinned tokens come on top of the share."""
    return best_tokens(values, shares + pinned.sum(axis=1), pinned)


@instead_of(expected_weights, "PO-EXPECTED-ATTENTION")
def the_next_position_alone(
    q: Array, k: Array, v: Array, at: Array, ahead: Array, inv_freq: Array, factor: float, scaling: float,
) -> Array:
    """Queries to come stand at the next position, whatever the horizon."""
    return expected_weights(q, k, v, at, ahead[:1], inv_freq, factor, scaling)


@instead_of(max_pool, "PO-POOL")
def zeros_outside(x: Array, kernel: int) -> Array:
    """What lies outside is a zero, also for a maximum."""
    if kernel == 1:
        return max_pool(x, kernel)
    found, half = max_pool(x, kernel), kernel // 2
    found[:, :half] = np.maximum(found[:, :half], 0.0)
    found[:, max(0, x.shape[1] - half) :] = np.maximum(found[:, max(0, x.shape[1] - half) :], 0.0)
    return found


@instead_of(average_pool, "PO-POOL")
def divided_by_what_is_there(x: Array, kernel: int) -> Array:
    """An average at the edge is divided by the entries that there are."""
    return average_pool(x, kernel) / average_pool(np.ones_like(x), kernel)


@instead_of(top_units, "PO-TOP-UNITS")
def higher_unit_on_a_tie(scores: Scores, budgets: Array, protected: Array) -> Selection:
    """Of equal scores the higher unit stays."""
    n = int(scores.offsets[-1])
    flipped = replace(scores, values=scores.values[:, ::-1], offsets=n - scores.offsets[::-1])
    found = top_units(flipped, budgets, protected[::-1])
    groups = [n - 1 - group[::-1] for group in np.split(found.positions, found.offsets[1:-1])]
    return Selection(np.concatenate(groups), found.offsets)


@instead_of(top_units, "PO-TOP-UNITS")
def protected_tokens_compete(scores: Scores, budgets: Array, protected: Array) -> Selection:
    """Protection is ignored."""
    return top_units(scores, budgets, np.zeros_like(protected))


@instead_of(fill_units, "PO-FILL-UNITS")
def whole_units_only(scores: Scores, budgets: Array, protected: Array) -> Selection:
    """The unit that does not fit goes altogether."""
    return top_units(scores, budgets, protected)


@instead_of(fill_units, "PO-FILL-UNITS")
def first_members_of_the_last_unit(scores: Scores, budgets: Array, protected: Array) -> Selection:
    """The last unit keeps its first members, not its best."""
    assert scores.members is not None
    return fill_units(replace(scores, members=np.zeros_like(scores.members)), budgets, protected)


@instead_of(largest_remainder, "PO-WHOLE-SHARES")
def each_share_rounded(targets: Sequence[Fraction]) -> Array:
    """Each share is rounded by itself."""
    return np.array([round(target) for target in targets], dtype=np.int64)


@instead_of(largest_remainder, "PO-WHOLE-SHARES")
def rest_to_the_lowest(targets: Sequence[Fraction]) -> Array:
    """What the floors leave goes to the lower indices, whatever their remainders."""
    floors = np.array([math.floor(target) for target in targets], dtype=np.int64)
    floors[: int(sum(targets)) - int(floors.sum())] += 1
    return floors


@instead_of(pyramid_targets, "PO-PYRAMID-BUDGET")
def upside_down(base: Fraction, past: int, L: int, beta: int) -> list[Fraction]:
    """The last layer has the most."""
    return pyramid_targets(base, past, L, beta)[::-1]


@instead_of(pyramid_targets, "PO-PYRAMID-BUDGET")
def more_than_there_is(base: Fraction, past: int, L: int, beta: int) -> list[Fraction]:
    """The line is not held to the tokens that there are."""
    return pyramid_targets(base, 10**9, L, beta)


@method_instead_of(Pyramid, "__call__", "PO-PYRAMID-BUDGET")
def no_pyramid(pyramid: Any, total: int, scores: Scores) -> Array:
    """All layers have the same share."""
    return even(total, scores)


@instead_of(winners, "PO-ADAPTIVE-BUDGET")
def higher_head_on_a_tie(values: Array, k: int) -> Array:
    """Of equal scores that of the higher head wins."""
    return winners(values[::-1], k)[::-1]


@method_instead_of(Adaptive, "__call__", "PO-ADAPTIVE-BUDGET")
def without_the_safeguard(adaptive: Any, total: int, scores: Scores) -> Array:
    """Heads have what they win, and no even part."""
    return Adaptive(Fraction(0))(total, scores)


@method_instead_of(Adaptive, "__call__", "PO-ADAPTIVE-BUDGET")
def safeguard_as_a_quota(adaptive: Any, total: int, scores: Scores) -> Array:
    """The safeguard is a minimum for each head."""
    return Competition(adaptive.safeguard)(total, scores)


@method_instead_of(Competition, "__call__", "PO-COMPETITION-BUDGET")
def without_the_quota(competition: Any, total: int, scores: Scores) -> Array:
    """No head keeps a part of its own."""
    return Competition(Fraction(0))(total, scores)


@method_instead_of(Competition, "__call__", "PO-COMPETITION-BUDGET")
def quota_as_a_blend(competition: Any, total: int, scores: Scores) -> Array:
    """The quota moves every head, as Ada-KV's safeguard does."""
    return Adaptive(competition.safeguard)(total, scores)


@method_instead_of(Competition, "__call__", "PO-COMPETITION-BUDGET")
def quota_rounded_up(competition: Any, total: int, scores: Scores) -> Array:
    """The quota is not floored."""
    even_share = total // len(scores.values)
    quota = Fraction(math.ceil(competition.safeguard * even_share), max(1, even_share))
    return Competition(quota)(total, scores)


@method_instead_of(Above, "__call__", "PO-THRESHOLD")
def no_upper_bound(above: Any, total: int, scores: Scores) -> Array:
    """What scores above the threshold stays, beyond the share too."""
    wanted: Array = (np.isnan(scores.values) | (scores.values > above.tau)).sum(axis=1)
    return wanted


@method_instead_of(Above, "__call__", "PO-THRESHOLD")
def protected_beside_the_others(above: Any, total: int, scores: Scores) -> Array:
    """Protected tokens take the places of those that score above the threshold."""
    wanted = np.maximum((scores.values > above.tau).sum(axis=1), np.isnan(scores.values).sum(axis=1))
    found: Array = np.minimum(even(total, scores), wanted)
    return found


@instead_of(pyramidkv_official, "PO-PYRAMID-OFFICIAL")
def exact_steps(capacity: int, W: int, L: int, n: int, beta: int = 20) -> Array:
    """The steps are not floored: the sum is exact."""
    flat = pyramidkv_official(capacity, W, L, n, beta)
    targets = pyramid_targets(Fraction(capacity - W), n - W, L, beta)
    return flat if flat[0] == flat[-1] else W + largest_remainder(targets)


@instead_of(pyramidkv_official, "PO-PYRAMID-OFFICIAL")
def never_flat(capacity: int, W: int, L: int, n: int, beta: int = 20) -> Array:
    """A short prompt has a pyramid too."""
    return pyramidkv_official(capacity, W, L, max(n, 2 * capacity), beta)


@instead_of(adakv_official, "PO-ADAKV-OFFICIAL")
def half_upwards(wins: Sequence[int], base: int, safeguard: Fraction) -> Array:
    """A half is rounded up."""
    floor = int(base * safeguard)
    return np.array([math.floor(won * (1 - safeguard) + floor + Fraction(1, 2)) for won in wins], dtype=np.int64)


@instead_of(adakv_official, "PO-ADAKV-OFFICIAL")
def even_part_not_floored(wins: Sequence[int], base: int, safeguard: Fraction) -> Array:
    """The even part is added before it is rounded."""
    return np.array([round(won * (1 - safeguard) + base * safeguard) for won in wins], dtype=np.int64)
