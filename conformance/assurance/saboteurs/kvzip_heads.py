"""Head budgets by KVzip's head scores: wrong readings of a head's score, of what full heads cost, of what is left."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import beyond, instead_of, method_instead_of
from reference.policies.kvzip_heads import FullHeads, head_scores, kvzip_heads
from reference.policies.protections import SinkAndRecent
from spec.policy import Policy, Scores

__all__: list[str] = []


@instead_of(head_scores, "PO-HEAD-SCORES")
def heads_by_their_mean_token(contexts: Any) -> Any:
    """A head's score of a context is the mean over its tokens."""
    return np.mean([np.nanmean(rows, axis=1) for rows in contexts], axis=0)


@instead_of(head_scores, "PO-HEAD-SCORES")
def heads_by_their_best_context(contexts: Any) -> Any:
    """Over contexts too the largest score counts."""
    return np.max([np.nanmax(rows, axis=1) for rows in contexts], axis=0)


@beyond("4096 tokens", head_scores, "PO-HEAD-SCORES", lambda: ([np.arange(10_000.0).reshape(2, 5_000)],))
def heads_by_their_first_tokens(contexts: Any) -> Any:
    """The first 4096 tokens of a context are looked at."""
    return head_scores([rows[:, :4096] for rows in contexts])


@method_instead_of(FullHeads, "__call__", "PO-FULL-HEADS")
def the_rest_stays_empty(budgets: Any, total: int, scores: Scores) -> Any:
    """Heads that are not full have their window and no more."""
    n = int(scores.offsets[-1])
    shares = FullHeads(budgets.scores, budgets.window)(total, scores)
    return np.where(shares < n, min(budgets.window, n), shares)


@method_instead_of(FullHeads, "__call__", "PO-FULL-HEADS")
def the_last_of_equal_heads(budgets: Any, total: int, scores: Scores) -> Any:
    """Of equal heads the higher one is full."""
    return FullHeads(budgets.scores[::-1], budgets.window)(total, scores)[::-1]


@method_instead_of(FullHeads, "__call__", "PO-FULL-HEADS")
def windows_come_with_full_heads(budgets: Any, total: int, scores: Scores) -> Any:
    """A full head is counted beside its window: fewer are full."""
    n, G = int(scores.offsets[-1]), len(scores.values)
    w = min(budgets.window, n)
    full = G if total >= G * n else (total - G * w) // n
    shares = np.full(G, n, dtype=np.int64)
    others = np.sort(np.argsort(-budgets.scores, kind="stable")[full:])
    if len(others):
        rest = total - full * n
        shares[others] = rest // len(others) + (np.arange(len(others)) < rest % len(others))
    return shares


@beyond("255 heads", FullHeads.__call__, "PO-FULL-HEADS", lambda: (
    FullHeads(np.arange(600.0), 2), 600 * 8, Scores(np.zeros((600, 10)), np.arange(11)),
))
def full_heads_in_8_bits(budgets: Any, total: int, scores: Scores) -> Any:
    """The number of full heads is held in 8 bits."""
    n, G = int(scores.offsets[-1]), len(scores.values)
    w = min(budgets.window, n)
    free = min(total, G * n) - G * w
    full = G if n == w else free // (n - w)
    full = full if full < 256 else full % 256
    shares = np.full(G, n, dtype=np.int64)
    others = np.sort(np.argsort(-budgets.scores, kind="stable")[full:])
    if len(others):
        rest = free - full * (n - w) + len(others) * w
        shares[others] = rest // len(others) + (np.arange(len(others)) < rest % len(others))
    return shares


@instead_of(kvzip_heads, "PO-KVZIP-HEADS")
def no_sinks_in_streaming_heads(calibration: Any, served: Any, N_sink: int = 64, N_recent: int = 256) -> Policy:
    """Streaming heads keep the newest tokens alone."""
    right = kvzip_heads(calibration, served, N_sink, N_recent)
    return replace(right, protection=SinkAndRecent(0, N_sink + N_recent))


@instead_of(kvzip_heads, "PO-KVZIP-HEADS")
def the_weakest_heads_are_full(calibration: Any, served: Any, N_sink: int = 64, N_recent: int = 256) -> Policy:
    """Heads with the lowest scores keep all tokens."""
    return kvzip_heads(replace(calibration, head_scores=-calibration.head_scores), served, N_sink, N_recent)
