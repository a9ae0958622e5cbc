"""Properties that policies promise: the columns of the table in spec/policies.md, each with a test on one input."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from conformance.checks.failing_input import differing_set, listed
from conformance.strategies.policy_inputs import Inputs, Kept, another, decided, observation, resized
from reference.policies.budgets import Adaptive, Competition, across_layers
from spec.arrays import Matrix
from spec.errors import SpecError
from spec.policy import LayerView, Policy
from spec.promises import field_of
from spec.retention import Granularity


class Judged(Protocol):
    """A policy under test, which may depend on the model constants in the inputs, and the tokens that it protects."""

    @property
    def policy(self) -> Callable[[Inputs], Policy]: ...

    @property
    def floor(self) -> int: ...

    @property
    def guaranteed(self) -> Callable[[int, int], set[int]]:
        """Return the positions, of n, that every kept set of B tokens contains."""
        ...


ROUNDED = 64 * np.finfo(np.float64).eps
"""Relative tolerance of a score. Tokens with scores that differ by no more than the tolerance tie."""
Problem = Callable[[Judged, Inputs, int, int], str]
FAR = 2.0**10
"""Factor by which queries, keys and values of other sequences are longer or shorter."""


@dataclass(frozen=True)
class Promise:
    """A promised property: a sentence, and a test of one input at B tokens. `seed` makes a second input.

    The test returns what was observed and expected, or "" if the property holds.
    """

    says: str
    problem: Problem


def exact(case: Judged, inputs: Inputs, B: int, seed: int) -> str:
    kept = decided(case.policy(inputs), inputs, B)
    number, each = sum(map(len, kept)), min(max(B, case.floor), inputs.n)
    wanted = len(kept) * each
    return "" if number == wanted else f"{number} tokens are kept in place of {wanted} = {len(kept)} sets x {each}"


def protects(case: Judged, inputs: Inputs, B: int, seed: int) -> str:
    held = case.guaranteed(inputs.n, max(B, case.floor))
    for g, group in enumerate(decided(case.policy(inputs), inputs, B)):
        if lacking := sorted(held - set(group)):
            return f"kept set {g} lacks {listed(lacking)} of the protected tokens {listed(sorted(held))}"
    return ""


def keeps_all(case: Judged, inputs: Inputs, B: int, seed: int) -> str:
    everything, budget = list(range(inputs.n)), inputs.n + seed % 2
    for g, group in enumerate(decided(case.policy(inputs), inputs, budget)):
        if group != everything:
            lacking = sorted(set(everything) - set(group))
            return f"with a budget of {budget}, kept set {g} has {len(group)} tokens and lacks {listed(lacking)}"
    return ""


def token_scores(policy: Policy, inputs: Inputs, B: int) -> Matrix:
    """Return the score of each token, a row per kept set.

    If the units are chunks and their tokens have no scores, each token has the score of its chunk.
    """
    seen = replace(observation(policy, inputs), B=max(B, policy.floor))
    scores = policy.scorer(seen, policy.protection(inputs.n))
    return np.repeat(scores.values, np.diff(scores.offsets), axis=1) if scores.members is None else scores.members


def pools(policy: Policy, inputs: Inputs, groups: int) -> list[range]:
    """Return the pools: groups of kept sets whose tokens compete for the same places.

    A pool is one kept set, or the kept sets of a layer if heads compete, or all kept sets if layers compete.
    """
    size = inputs.H_kv if isinstance(policy.budgets, Adaptive | Competition) else 1
    if policy.budgets is across_layers:
        size = groups
    return [range(first, first + size) for first in range(0, groups, size)]


def monotone(case: Judged, inputs: Inputs, B: int, seed: int) -> str:
    """Return an unprotected token that is kept with a lower score than an evicted token of its pool, or "".

    A pool is a kept set, or a layer if heads compete, or all layers if layers compete.
    """
    policy = case.policy(inputs)
    kept = decided(policy, inputs, B)
    held = case.guaranteed(inputs.n, max(B, case.floor))
    free = [i for i in range(inputs.n) if i not in held]
    rows = token_scores(policy, inputs, B)
    for pool in pools(policy, inputs, len(rows)):
        mine = [(float(rows[g, i]), g, i) for g in pool for i in free]
        lost = max((one for one in mine if one[2] not in kept[one[1]]), key=lambda one: one[0], default=None)
        worse = [one for one in mine if lost and one[2] in kept[one[1]] and one[0] < lost[0]]
        if lost and worse:
            (s, g, i), (best, h, j) = worse[0], lost
            return f"kept set {g} keeps token {i} with the score {s}, and kept set {h} evicts token {j} with {best}"
    return ""


def independent(case: Judged, inputs: Inputs, B: int, seed: int) -> str:
    """Return how other sequences under the same policy object, processed before, change the decision, or "".

    Some other sequences have far shorter or far longer queries, keys and values. If the policy object can be copied,
    one copy processes only the sequence, and another copy processes the other sequences before it. Long inputs show
    state that the object stores, such as a bound of sizes.
    """
    other = another(inputs, seed + 1)
    for size in (1.0, FAR):
        same = resized(inputs, size)
        policy, fresh = copied(case.policy(same)), copied(case.policy(same))
        before = decision(fresh, same, B)
        for more in (1.0, 1 / FAR, 30.0, FAR):
            decision(policy, resized(other, size * more), B)
            if (after := decision(policy, same, B)) != before:
                what = differing_set(after, before) if after and before else "the budget is refused in one of two cases"
                return f"{what}, after a different sequence with {more:g} times longer queries, keys and values"
    return ""


def decision(policy: Policy, inputs: Inputs, B: int) -> Kept | None:
    """Return the kept sets, or None if the budget raises `SpecError`.

    The number of protected tokens may depend on the inputs.
    """
    try:
        return decided(policy, inputs, B)
    except SpecError as refused:
        if refused.argument != "budget":
            raise
        return None


def copied(policy: Policy) -> Policy:
    """Return a copy of the policy, or the policy itself if it cannot be copied."""
    with suppress(Exception):
        return deepcopy(policy)
    return policy


def permuted(case: Judged, inputs: Inputs, B: int, seed: int) -> str:
    """Return how a permutation of the KV heads, with their query heads, changes a kept set of a head, or ""."""
    order = np.random.default_rng(seed).permutation(inputs.H_kv)
    G = len(inputs.layers[0].q) // inputs.H_kv
    queries = (order[:, None] * G + np.arange(G)).ravel()
    layers = [replace(x, q=x.q[queries], k=x.k[order], v=np.asarray(x.v)[order]) for x in inputs.layers]
    other = replace(inputs, layers=layers, W_o=[W_o[queries] for W_o in inputs.W_o])
    policy = case.policy(inputs)
    before, after = decided(policy, inputs, B), decided(case.policy(other), other, B)
    expected = before
    if policy.granularity is Granularity.HEAD:
        expected = [before[layer * inputs.H_kv + int(h)] for layer in range(len(layers)) for h in order]
    what = differing_set(after, expected)
    return what and f"with the KV heads in the order {order.tolist()}, {what}"


def grouped(case: Judged, inputs: Inputs, B: int, seed: int) -> str:
    """Return how two copies of every query head on the same KV head change more than ties up to rounding, or "".

    A mean over twice as many heads may be rounded differently.
    """
    def twice(view: LayerView) -> LayerView:
        return replace(view, q=np.repeat(view.q, 2, axis=0))

    other = replace(
        inputs, layers=[twice(view) for view in inputs.layers],
        W_o=[np.repeat(W_o, 2, axis=0) for W_o in inputs.W_o],
    )
    policy = case.policy(inputs)
    before, after = decided(policy, inputs, B), decided(case.policy(other), other, B)
    if before == after:
        return ""
    rows = token_scores(policy, inputs, B)
    both = ((before, after), (after, before))
    for pool in pools(policy, inputs, len(rows)):
        lost, won = ([rows[g, i] for g in pool for i in {*a[g]} - {*b[g]}] for a, b in both)
        moved = [*lost, *won]
        if len(lost) != len(won) or (moved and max(moved) - min(moved) > ROUNDED * max(map(abs, moved))):
            return f"with each query head twice, {differing_set(after, before)}"
    return ""


PROPERTIES: Mapping[str, Promise] = {
    "budget exact": Promise("the kept sets hold B tokens on average, or all there are", exact),
    "protection holds": Promise("sinks, windows and newest halves are in every kept set", protects),
    "no-op at full budget": Promise("with B at least the tokens seen, nothing is evicted", keeps_all),
    "higher score never loses": Promise(
        "of two unprotected tokens of a pool, the one that stays has no lower score; a pool is a kept set, or a layer"
        " where heads compete, or all layers where they do", monotone,
    ),
    "row independence": Promise("a sequence's kept sets do not depend on another sequence", independent),
    "head permutation": Promise("KV heads that change places take their kept sets along", permuted),
    "GQA": Promise(
        "repeating every query head on its KV head changes nothing but which of two tokens stays that tie up to"
        " rounding", grouped,
    ),
}


def promised(policy: Policy, column: str) -> str:
    """Return the policy's declaration for a column: yes, no or N/A."""
    return str(getattr(policy.promises, field_of(column)))
