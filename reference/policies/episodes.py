"""EpiCache's episodes: clusters of a dialogue's windows, their prompts, shares of layers, and a question's episode."""

from fractions import Fraction

import numpy as np

from reference.policies.budgets import largest_remainder
from reference.policies.vase import uniform_numbers
from spec.arrays import Bool, BoolMatrix, Float64, Int64, IntVector, Matrix, Vector
from spec.errors import SpecError

__all__ = ["cluster_windows", "layer_shares", "nearest_episode", "prompt_windows", "visible_in_windows"]

ROUNDS = 300
"""Largest number of rounds of K-means in a run."""


def cluster_windows(
    x: Float64[Matrix, "m d"], K: int, seed: int = 42, runs: int = 10,
) -> tuple[Int64[IntVector, " m"], Float64[Matrix, "episodes d"]]:
    """Return the episode of each window, and the centroid of each episode, from the embeddings x of the windows.

    The result is the run of K-means with the smallest sum of squared distances. Episodes are numbered by their first
    window. An episode without windows is left out.

    Implements: PO-EPISODES

    Raises:
        SpecError: if there are fewer windows than episodes.
    """
    m = len(x)
    if not 1 <= K <= m:
        raise SpecError("episodes", K, f"must be a number from 1 to {m}, the number of windows of the dialogue")
    order = [np.argsort(uniform_numbers(seed, run, m, m), kind="stable") for run in range(runs)]
    labels, c, _ = min((_k_means(x, x[np.sort(one[:K])]) for one in order), key=lambda run: run[2])
    names, first, at = np.unique(labels, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    return np.argsort(by_first)[at], c[names[by_first]]


def _k_means(x: Matrix, c: Matrix) -> tuple[IntVector, Matrix, float]:
    """Return labels, centroids and the sum of squared distances after Lloyd's rounds from first centroids."""
    labels = np.full(len(x), -1)
    for _ in range(ROUNDS):
        squares = np.stack([np.square(x - one).sum(axis=1) for one in c], axis=1)
        before, labels = labels, squares.argmin(axis=1)
        if np.array_equal(labels, before):
            break
        c = np.stack([x[labels == e].mean(axis=0) if (labels == e).any() else c[e] for e in range(len(c))])
    return labels, c, float(squares.min(axis=1).sum())


def prompt_windows(
    x: Float64[Matrix, "m d"], labels: Int64[IntVector, " m"], centroids: Float64[Matrix, "episodes d"], P: int,
) -> list[list[int]]:
    """Return the windows of each episode's patched prompt: the P windows nearest to the centroid, in temporal order.

    Implements: PO-EPISODE-PROMPT
    """
    windows = []
    for e, c in enumerate(centroids):
        members = np.flatnonzero(labels == e)
        # Not a matrix product, in which equal rows can have different last bits.
        nearness = (x[members] * c).sum(axis=1)
        best = members[np.argsort(-nearness, kind="stable")[:P]]
        windows.append(np.sort(best).tolist())
    return windows


def visible_in_windows(n: int, w: int, N_sink: int) -> Bool[BoolMatrix, "n n"]:
    """Return the mask of the pass in windows: each token attends to the first tokens and to its window of w tokens.

    A window begins every w / 2 tokens. A token belongs to the window of which it is in the second half.

    Implements: PO-EPISODE-LAYERS
    """
    i, j, half = np.arange(n)[:, None], np.arange(n), w // 2
    first = (i // half - 1) * half
    visible: BoolMatrix = (j <= i) & ((j >= first) | (j < N_sink))
    return visible


def layer_shares(similarity: Float64[Vector, " L"], M: int, power: float = 1.1) -> Int64[IntVector, " L"]:
    """Return the number of tokens of each layer, M in the mean, from the similarity of its keys in both passes.

    A layer whose keys change more has a larger share. No share is below a quarter of M.

    Implements: PO-EPISODE-LAYERS

    Raises:
        SpecError: if a similarity is not finite, or if the power is below 0.
    """
    if not np.isfinite(similarity).all():
        raise SpecError("similarities", similarity.tolist(), "must be finite numbers, one for each layer")
    if not power >= 0:
        raise SpecError("power", power, "must be at least 0; 0 gives each layer an equal share")
    L, least, span = len(similarity), max(1, M // 4), np.ptp(similarity)
    scaled = (similarity - similarity.min()) / span if span > 0 else np.zeros(L)
    w = [Fraction(float(one)) for one in (1 - scaled) ** power]
    targets, left, low = [Fraction(least)] * L, list(range(L)), [-1]
    while low:
        rest, total = L * M - least * (L - len(left)), sum(w[layer] for layer in left)
        low = [layer for layer in left if w[layer] * rest < least * total]
        left = [layer for layer in left if layer not in low]
    for layer in left:
        targets[layer] = w[layer] * rest / total
    return largest_remainder(targets)


def nearest_episode(question: Float64[Vector, " d"], centroids: Float64[Matrix, "episodes d"]) -> int:
    """Return the episode of a question: the episode whose centroid has the largest dot product with its embedding.

    Implements: PO-EPISODE-TURN
    """
    return int((centroids * question).sum(axis=1).argmax())
