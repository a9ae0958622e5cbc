"""KVCrush: wrong readings of its indicators, its anchor, its runs and its share."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond, instead_of
from conformance.assurance.saboteurs.size_inputs import random_rows
from reference.policies.kvcrush import anchor_distances, representatives, with_representatives
from reference.policies.selectors import best_tokens
from spec.policy import Policy, Scores, Selection

__all__: list[str] = []


@instead_of(anchor_distances, "PO-REPRESENTATIVES")
def the_first_head_speaks_for_all(values: Array, protected: Array, b: int, anchor: Any) -> Array:
    """A block's indicators are those of the layer's first head."""
    return anchor_distances(values[:1], protected, b, anchor)


@instead_of(anchor_distances, "PO-REPRESENTATIVES")
def halves_of_all_heads_together(values: Array, protected: Array, b: int, anchor: Any) -> Array:
    """The better half is of all heads' tokens in one ranking."""
    order = np.argsort(np.argsort(-values, axis=None, kind="stable")).reshape(values.shape)
    return anchor_distances(np.where(order < values.size // 2, 1.0, 0.0), protected, b, anchor)


@instead_of(anchor_distances, "PO-REPRESENTATIVES")
def the_anchor_begins_with_one(values: Array, protected: Array, b: int, anchor: Any) -> Array:
    """The alternating anchor is 1, 0, 1, 0."""
    if anchor != "alternating":
        return anchor_distances(values, protected, b, anchor)
    free = ~protected[: values.shape[1] // b * b].reshape(-1, b).any(axis=1)
    return np.where(free, len(values) * b - anchor_distances(values, protected, b, anchor), 0)


def _chosen(totals: Array, places: Array, held: Array, distances: Array, few: Array, at: Any) -> Selection:
    """Of the blocks that are left, those at `at(m, r)`."""
    best, stays = best_tokens(totals, places - few, held), np.zeros(totals.shape, dtype=np.bool_)
    stays[np.repeat(np.arange(len(stays)), np.diff(best.offsets)), best.positions] = True
    for own, distance, r in zip(stays, distances, few, strict=True):
        left = np.flatnonzero(~own)
        left = left[np.argsort(distance[left], kind="stable")]
        own[left[at(len(left), min(int(r), len(left)))]] = True
    return best_tokens(totals, np.zeros_like(places), stays)


def _few(places: Array, held: Array, share: Any) -> Array:
    few: Array = np.maximum(0, places - held.sum(axis=1)) * share.numerator // share.denominator
    return few


@instead_of(representatives, "PO-REPRESENTATIVES")
def steps_of_a_whole_number(totals: Array, places: Array, held: Array, /, distances: Array, share: Any) -> Selection:
    """Every floor(m / r)-th of the blocks that are left stands for them, as in OpenVINO GenAI."""
    few = _few(places, held, share)
    return _chosen(totals, places, held, distances, few, lambda m, r: np.arange(r) * (m // max(1, r)))


@instead_of(representatives, "PO-REPRESENTATIVES")
def both_ends_and_equal_steps(totals: Array, places: Array, held: Array, /, distances: Array, share: Any) -> Selection:
    """The nearest and the farthest block stand for them, and blocks at equal steps between, as in vLLM."""
    few = _few(places, held, share)
    return _chosen(
        totals, places, held, distances, few, lambda m, r: np.arange(r) * max(0, m - 1) // max(1, r - 1)
    )


@instead_of(representatives, "PO-REPRESENTATIVES")
def the_nearest_alone(totals: Array, places: Array, held: Array, /, distances: Array, share: Any) -> Selection:
    """The blocks nearest to the anchor stay."""
    return _chosen(totals, places, held, distances, _few(places, held, share), lambda m, r: np.arange(r))


@instead_of(representatives, "PO-REPRESENTATIVES")
def a_share_of_all_places(totals: Array, places: Array, held: Array, /, distances: Array, share: Any) -> Selection:
    """Protected blocks are among the places that representatives have their share of."""
    few = np.minimum(np.maximum(0, places - held.sum(axis=1)), _few(places, np.zeros_like(held), share))
    return _chosen(totals, places, held, distances, few, lambda m, r: np.arange(r) * m // max(1, r))


@beyond("255 bits", anchor_distances, "PO-REPRESENTATIVES", lambda: (
    random_rows(8, 4_000), np.zeros(4_000, dtype=np.bool_), 64, "zeros",
))
def distances_in_8_bits(values: Array, protected: Array, b: int, anchor: Any) -> Array:
    """A distance is held in 8 bits."""
    return anchor_distances(values, protected, b, anchor) % 256


@instead_of(with_representatives, "PO-KVCRUSH")
def the_host_s_floor_alone(host: Policy, block: int = 16, share: Any = 0.25, anchor: Any = "alternating") -> Policy:
    """The floor is the host's: a budget below one block keeps none of a host that protects nothing."""
    return replace(with_representatives(host, block, share, anchor), floor=host.floor)


@instead_of(with_representatives, "PO-KVCRUSH")
def representatives_beside_the_budget(
    host: Policy, block: int = 16, share: Any = 0.25, anchor: Any = "alternating",
) -> Policy:
    """The best blocks fill the budget, and representatives come on top, as in OpenVINO GenAI."""
    right = with_representatives(host, block, share, anchor)

    def more(scores: Scores, budgets: Array, protected: Array, /) -> Selection:
        return right.selector(scores, budgets + block, protected)

    return replace(right, selector=more)


@instead_of(with_representatives, "PO-KVCRUSH")
def the_mean_as_anchor(host: Policy, block: int = 16, share: Any = 0.25, anchor: Any = "alternating") -> Policy:
    """Whatever anchor is asked for, it is the mean."""
    return with_representatives(host, block, share, "mean")
