"""The properties that policies promise: the columns of the table in spec/policies.md, each a test on one input."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from conformance.strategies.policy_inputs import Inputs, Kept, another, decided, observation, resized
from reference.policies.budgets import Adaptive, Competition, across_layers
from spec.arrays import Matrix
from spec.errors import SpecError
from spec.policy import LayerView, Policy
from spec.promises import field_of
from spec.retention import Granularity


class Judged(Protocol):
    """A policy, which may depend on what the inputs have of a model, and what it protects."""

    @property
    def policy(self) -> Callable[[Inputs], Policy]: ...

    @property
    def floor(self) -> int: ...

    @property
    def guaranteed(self) -> Callable[[int, int], set[int]]:
        """Positions of n that every kept set of B tokens holds."""
        ...


ROUNDED = 64 * np.finfo(np.float64).eps
"""Of a score: tokens that are no further apart tie."""
Holds = Callable[[Judged, Inputs, int, int], bool]
FAR = 2.0**10
"""How many times shorter and longer other sequences are."""


@dataclass(frozen=True)
class Promise:
    """A column: what it says, and whether it holds on one input at B tokens; `seed` makes a second input."""

    says: str
    holds: Holds


def exact(case: Judged, inputs: Inputs, B: int, seed: int) -> bool:
    kept = decided(case.policy(inputs), inputs, B)
    return sum(map(len, kept)) == len(kept) * min(max(B, case.floor), inputs.n)


def protects(case: Judged, inputs: Inputs, B: int, seed: int) -> bool:
    held = case.guaranteed(inputs.n, max(B, case.floor))
    return all(held <= set(group) for group in decided(case.policy(inputs), inputs, B))


def keeps_all(case: Judged, inputs: Inputs, B: int, seed: int) -> bool:
    everything = list(range(inputs.n))
    return all(group == everything for group in decided(case.policy(inputs), inputs, inputs.n + seed % 2))


def token_scores(policy: Policy, inputs: Inputs, B: int) -> Matrix:
    """A row per kept set; where units are chunks and their tokens have no scores of their own, those of the chunks."""
    seen = replace(observation(policy, inputs), B=max(B, policy.floor))
    scores = policy.scorer(seen, policy.protection(inputs.n))
    return np.repeat(scores.values, np.diff(scores.offsets), axis=1) if scores.members is None else scores.members


def pools(policy: Policy, inputs: Inputs, groups: int) -> list[range]:
    """The kept sets that share their tokens' places: one, or a layer's where heads compete, or all of them."""
    size = inputs.H_kv if isinstance(policy.budgets, Adaptive | Competition) else 1
    if policy.budgets is across_layers:
        size = groups
    return [range(first, first + size) for first in range(0, groups, size)]


def monotone(case: Judged, inputs: Inputs, B: int, seed: int) -> bool:
    """In a pool: a kept set, or a layer where heads compete, or all layers where they do."""
    policy = case.policy(inputs)
    kept = decided(policy, inputs, B)
    held = case.guaranteed(inputs.n, max(B, case.floor))
    free = [i for i in range(inputs.n) if i not in held]
    rows = token_scores(policy, inputs, B)
    for pool in pools(policy, inputs, len(rows)):
        mine = [(rows[g, i], i in kept[g]) for g in pool for i in free]
        best_lost = max((s for s, stays in mine if not stays), default=-np.inf)
        if any(s < best_lost for s, stays in mine if stays):
            return False
    return True


def independent(case: Judged, inputs: Inputs, B: int, seed: int) -> bool:
    """Other sequences under the same policy object, also far shorter and longer ones, leave the decision as it was.

    So do they before it. A copy of the object for each, if it can be copied: what one has seen is not what the next
    one knows. Long inputs show what the object has seen before, as a bound of sizes.
    """
    other = another(inputs, seed + 1)
    for size in (1.0, FAR):
        same = resized(inputs, size)
        policy, fresh = copied(case.policy(same)), copied(case.policy(same))
        before = decision(fresh, same, B)
        for more in (1.0, 1 / FAR, 30.0, FAR):
            decision(policy, resized(other, size * more), B)
            if decision(policy, same, B) != before:
                return False
    return True


def decision(policy: Policy, inputs: Inputs, B: int) -> Kept | None:
    """The kept sets, or that the budget is refused: what is protected may follow from the inputs."""
    try:
        return decided(policy, inputs, B)
    except SpecError as refused:
        if refused.argument != "budget":
            raise
        return None


def copied(policy: Policy) -> Policy:
    """Another object, if there can be one."""
    with suppress(Exception):
        return deepcopy(policy)
    return policy


def permuted(case: Judged, inputs: Inputs, B: int, seed: int) -> bool:
    """KV heads change places, each with its query heads: their kept sets change places too."""
    order = np.random.default_rng(seed).permutation(inputs.H_kv)
    G = len(inputs.layers[0].q) // inputs.H_kv
    queries = (order[:, None] * G + np.arange(G)).ravel()
    layers = [replace(x, q=x.q[queries], k=x.k[order], v=np.asarray(x.v)[order]) for x in inputs.layers]
    other = replace(inputs, layers=layers, W_o=[W_o[queries] for W_o in inputs.W_o])
    policy = case.policy(inputs)
    before, after = decided(policy, inputs, B), decided(case.policy(other), other, B)
    if policy.granularity is not Granularity.HEAD:
        return after == before
    return after == [before[layer * inputs.H_kv + int(h)] for layer in range(len(layers)) for h in order]


def grouped(case: Judged, inputs: Inputs, B: int, seed: int) -> bool:
    """Every query head twice on the same KV head; a mean over twice the heads may be rounded otherwise."""
    def twice(view: LayerView) -> LayerView:
        return replace(view, q=np.repeat(view.q, 2, axis=0))

    other = replace(
        inputs, layers=[twice(view) for view in inputs.layers],
        W_o=[np.repeat(W_o, 2, axis=0) for W_o in inputs.W_o],
    )
    policy = case.policy(inputs)
    before, after = decided(policy, inputs, B), decided(case.policy(other), other, B)
    if before == after:
        return True
    rows = token_scores(policy, inputs, B)
    both = ((before, after), (after, before))
    for pool in pools(policy, inputs, len(rows)):
        lost, won = ([rows[g, i] for g in pool for i in {*a[g]} - {*b[g]}] for a, b in both)
        moved = [*lost, *won]
        if len(lost) != len(won) or (moved and max(moved) - min(moved) > ROUNDED * max(map(abs, moved))):
            return False
    return True


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
    """What the policy says of a column: yes, no or N/A."""
    return str(getattr(policy.promises, field_of(column)))
