"""VaSE: wrong readings of its numbers, its ranges and its race."""

from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond, instead_of
from conformance.assurance.saboteurs.size_inputs import view
from reference.policies.attention import group_mean, observed_attention
from reference.policies.selectors import staged
from reference.policies.vase import ranges_first, uniform_numbers, value_range, window_attention

__all__: list[str] = []


@instead_of(uniform_numbers, "PO-UNIFORM")
def blocks_from_zero(seed: int, group: int, seen: int, n: int) -> Any:
    """The first block's counter is 0."""
    before = (seen << 128 | group << 64) - 1
    words = np.random.Philox(key=seed, counter=before).random_raw(n)
    return ((words >> np.uint64(12)) + 0.5) / 2.0**52


@instead_of(uniform_numbers, "PO-UNIFORM")
def all_heads_draw_the_same(seed: int, group: int, seen: int, n: int) -> Any:
    """The group is in no counter."""
    return uniform_numbers(seed, 0, seen, n)


@beyond("32 words", uniform_numbers, "PO-UNIFORM", lambda: (1, 2, 50, 50))
def numbers_repeat(seed: int, group: int, seen: int, n: int) -> Array:
    """After 32 positions they begin again."""
    return np.resize(uniform_numbers(seed, group, seen, min(n, 32)), n)


@instead_of(value_range, "PO-VASE")
def largest_magnitude(v: Any) -> Any:
    """The largest channel's magnitude stands for the range."""
    return np.abs(np.asarray(v, dtype=np.float64)).max(axis=2)


@instead_of(window_attention, "PO-VASE")
def window_in_the_softmax(shown: Any, W: int, kernel: int) -> Any:
    """The window's own keys share the weights, and nothing is pooled."""
    A = observed_attention(shown, W)
    return group_mean(A[:, :, : A.shape[2] - A.shape[1]].mean(axis=1), len(shown.k))


@instead_of(ranges_first, "PO-VASE")
def the_best_and_no_sample(scores: Any, budgets: Any, protected: Any, /, share: Any, N_sink: int) -> Any:
    """All places go to the widest values."""
    return staged(scores, budgets, budgets, protected)


@instead_of(ranges_first, "PO-VASE")
def sinks_beside_the_share(scores: Any, budgets: Any, protected: Any, /, share: Any, N_sink: int) -> Any:
    """Sinks are not counted among the wide values."""
    return ranges_first(scores, budgets, protected, share, 0)


@beyond("windows of 32", window_attention, "PO-VASE", lambda: (view(90), 40, 5))
def queries_up_to_32(shown: Any, W: int, kernel: int) -> Array:
    """The newest 32 queries weigh; the window's older ones are left out."""
    past = shown.k.shape[1] - min(W, shown.q.shape[1])
    return window_attention(shown, min(W, 32), kernel)[:, :past]
