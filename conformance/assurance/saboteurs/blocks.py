"""Block retention: wrong readings of a block's score, of its place and of what is counted."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, beyond, instead_of, method_instead_of
from conformance.assurance.saboteurs.size_inputs import random_rows
from reference.policies.blocks import InBlocks, in_blocks
from reference.policies.selectors import best_blocks, best_tokens, top_tokens
from spec.policy import Policy, Scores, Selection

__all__: list[str] = []


@instead_of(best_blocks, "PO-BEST-BLOCKS")
def blocks_by_their_best_tokens(
    values: Array, shares: Array, pinned: Array, /, b: int, choose: Any = best_tokens,
) -> Selection:
    """A block is as good as its best token."""
    full = values.shape[1] // b * b
    alone: Array = np.zeros(values.shape)
    alone[:, :full:b] = values[:, :full].reshape(len(values), -1, b).max(axis=2)
    return best_blocks(alone, shares, pinned, b, choose)


@instead_of(best_blocks, "PO-BEST-BLOCKS")
def summed_from_the_last_token(
    values: Array, shares: Array, pinned: Array, /, b: int, choose: Any = best_tokens,
) -> Selection:
    """A block's scores are added from its last token down."""
    turned, full = values.copy(), values.shape[1] // b * b
    turned[:, :full] = values[:, :full].reshape(len(values), -1, b)[:, :, ::-1].reshape(len(values), full)
    return best_blocks(turned, shares, pinned, b, choose)


@instead_of(best_blocks, "PO-BEST-BLOCKS")
def the_open_block_for_nothing(
    values: Array, shares: Array, pinned: Array, /, b: int, choose: Any = best_tokens,
) -> Selection:
    """The open block takes no place of the share."""
    return best_blocks(values, shares + values.shape[1] % b, pinned, b, choose)


@instead_of(best_blocks, "PO-BEST-BLOCKS")
def protected_tokens_counted_alone(
    values: Array, shares: Array, pinned: Array, /, b: int, choose: Any = best_tokens,
) -> Selection:
    """A block that is kept for a protected token takes this token's place alone."""
    full = values.shape[1] // b * b
    rest = b * pinned[:, :full].reshape(len(pinned), -1, b).any(axis=2).sum(axis=1) - pinned[:, :full].sum(axis=1)
    return best_blocks(values, shares + rest, pinned, b, choose)


@instead_of(best_blocks, "PO-BEST-BLOCKS")
def later_blocks_first(values: Array, shares: Array, pinned: Array, /, b: int, choose: Any = best_tokens) -> Selection:
    """Of equal blocks the later one stays."""
    def turned(best: Array, blocks: Array, held: Array) -> Selection:
        found, m = choose(best[:, ::-1], blocks, held[:, ::-1]), best.shape[1]
        groups = [m - 1 - part[::-1] for part in np.split(found.positions, found.offsets[1:-1])]
        return Selection(np.concatenate(groups), found.offsets)

    return best_blocks(values, shares, pinned, b, turned)


@instead_of(in_blocks, "PO-BLOCKS")
def the_host_s_own_floor(host: Policy, b: int) -> Policy:
    """A budget below one block is not raised to one."""
    return replace(in_blocks(host, b), floor=host.floor)


@method_instead_of(InBlocks, "__call__", "PO-BLOCKS")
def the_highest_scores_alone(selector: Any, scores: Scores, budgets: Array, protected: Array) -> Selection:
    """Whatever the host's selector, blocks are those of the highest scores: no newest half, no second stage."""
    return top_tokens(scores, budgets, protected, selector.choose)


@method_instead_of(InBlocks, "__call__", "PO-BLOCKS")
def tokens_first_then_their_blocks(selector: Any, scores: Scores, budgets: Array, protected: Array) -> Selection:
    """The host chooses tokens, and every block that holds one stays."""
    b = selector.choose.keywords["b"]

    def touched(values: Array, shares: Array, pinned: Array, /) -> Selection:
        found = best_tokens(values, shares, pinned)
        marks: Array = np.zeros(values.shape, dtype=np.bool_)
        marks[np.repeat(np.arange(len(values)), np.diff(found.offsets)), found.positions] = True
        return best_blocks(values, shares * 0, marks, b)

    chosen: Selection = selector.select(scores, budgets, protected, choose=touched)
    return chosen


@beyond("255 blocks", best_blocks, "PO-BEST-BLOCKS", lambda: (
    random_rows(1, 4_000), np.array([3_000]), np.zeros((1, 4_000), dtype=np.bool_), 8,
))
def places_of_blocks_in_8_bits(
    values: Array, shares: Array, pinned: Array, /, b: int, choose: Any = best_tokens,
) -> Selection:
    """The number of blocks that fit is held in 8 bits."""
    left = values.shape[1] % b
    places = (shares - left) // b
    return best_blocks(values, np.where(places < 256, places, places % 256) * b + left, pinned, b, choose)

