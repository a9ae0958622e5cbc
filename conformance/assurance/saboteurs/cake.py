"""CAKE: wrong readings of preferences, shares and scores."""

from fractions import Fraction
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond, instead_of
from conformance.assurance.saboteurs.size_inputs import random_rows
from reference.policies.attention import average_pool, group_mean
from reference.policies.cake import cake_score, layer_preference, preferred_targets

__all__: list[str] = []


@instead_of(layer_preference, "PO-CAKE")
def temperatures_as_exponents(A: Array, tau1: float, tau2: float) -> float:
    """H and V are raised to the temperatures, not to their inverses."""
    return layer_preference(A, 1 / tau1, 1 / tau2)


@instead_of(layer_preference, "PO-CAKE")
def entropy_of_whole_rows(A: Array, tau1: float, tau2: float) -> float:
    """Rows are brought to a sum of 1 before their entropy is taken."""
    rows = A / np.maximum(A.sum(axis=2, keepdims=True), 1e-300)
    entropy = -(rows * np.log(rows, out=np.zeros_like(rows), where=rows > 0)).sum()
    variance = A.var(axis=1, ddof=min(1, A.shape[1] - 1)).sum()
    return float(entropy ** (1 / tau1) * variance ** (1 / tau2))


@instead_of(cake_score, "PO-CAKE")
def deviation_instead_of_variance(A: Array, gamma: float, kernel: int, H_kv: int) -> Any:
    """A token's shift is the standard deviation."""
    shift = A.std(axis=1, ddof=min(1, A.shape[1] - 1))
    return group_mean(average_pool(A.mean(axis=1) + gamma * shift, kernel), H_kv)


@instead_of(cake_score, "PO-CAKE")
def variance_of_a_population(A: Array, gamma: float, kernel: int, H_kv: int) -> Any:
    """The variance over the window is divided by the number of queries."""
    return group_mean(average_pool(A.mean(axis=1) + gamma * A.var(axis=1), kernel), H_kv)


@instead_of(preferred_targets, "PO-PREFERENCE-BUDGET")
def excess_shared_evenly(preferences: list[Fraction], total: Fraction, most: int) -> list[Fraction]:
    """What a layer cannot hold goes to the others in equal parts, not in proportion."""
    targets = preferred_targets(preferences, total, 10**9)
    while any(target > most for target in targets):
        excess = sum((max(Fraction(0), target - most) for target in targets), Fraction(0))
        targets = [min(target, Fraction(most)) for target in targets]
        room = [at for at, target in enumerate(targets) if target < most]
        for at in room:
            targets[at] += excess / len(room)
    return targets


@instead_of(preferred_targets, "PO-PREFERENCE-BUDGET")
def higher_layers_first(preferences: list[Fraction], total: Fraction, most: int) -> list[Fraction]:
    """Shares are in the order of the layers from the last to the first."""
    return preferred_targets(preferences[::-1], total, most)


@beyond("32 layers", preferred_targets, "PO-PREFERENCE-BUDGET", lambda: (
    [Fraction(at + 1) for at in range(40)], Fraction(4_000), 900,
))
def preferences_of_32_layers(preferences: list[Fraction], total: Fraction, most: int) -> list[Fraction]:
    """Layers behind the thirty-second have its preference."""
    held = preferences[:32]
    return preferred_targets(held + held[-1:] * (len(preferences) - 32), total, most)


@beyond("windows of 32", layer_preference, "PO-CAKE", lambda: (random_rows(1, 40, 6), 1.0, 1.0))
def a_window_of_32_queries(A: Array, tau1: float, tau2: float) -> float:
    """Entropy and variance are those of the first 32 queries."""
    return layer_preference(A[:, :32], tau1, tau2)
