"""Mistakes of a cache that can explain its log-probabilities: lost blocks, wrong kept sets, mixed position rules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from conformance.cache_suite.oracle import PositionRule

__all__ = ["Kept", "mistakes_of_blocks", "mistakes_of_positions", "mistakes_of_sets"]

Kept = dict[int, list[list[int]]]
"""Kept positions, ascending, by full-attention layer and KV head."""


BLOCK_SIZES = (16, 32, 64, 128, 256)
"""Numbers of tokens of the blocks and pages of caches."""


def mistakes_of_blocks(kept: Kept, n: int) -> Iterator[tuple[str, Kept]]:
    """Yield lost blocks as a description and the remaining kept sets: in the whole cache, a layer, or one head.

    A block is a number of stored tokens, or of positions of the text. The last stored block can be partly filled.
    """
    heads = [(layer, head) for layer, sets in kept.items() for head in range(len(sets))]
    places = [("every layer", heads), *((f"layer {at}", [pair for pair in heads if pair[0] == at]) for at in kept)]
    places += [(f"layer {layer}, KV head {head}", [(layer, head)]) for layer, head in heads]
    for (where, some), size in product(places, BLOCK_SIZES):
        longest = max(len(kept[layer][head]) for layer, head in some)
        for what, lost in _blocks(size, longest, n):
            yield f"{where} lost {what}", {
                layer: [lost(head_set) if (layer, head) in some else head_set for head, head_set in enumerate(sets)]
                for layer, sets in kept.items()
            }


def _blocks(size: int, longest: int, n: int) -> Iterator[tuple[str, Callable[[list[int]], list[int]]]]:
    """Yield blocks of a size as a description, and a function that removes the block from a kept set."""
    if size < 2 * longest:
        yield f"the last block of {size}", lambda head: head[: max(0, len(head) - 1) // size * size]
        for start in range(0, longest, size):
            what = f"the stored tokens {start} to {start + size - 1}"
            yield what, lambda head, start=start: [*head[:start], *head[start + size :]]  # type: ignore[misc]
    if size < 2 * n:
        for start in range(0, n, size):
            what = f"the positions {start} to {start + size - 1} of the text"
            block = range(start, start + size)
            yield what, lambda head, block=block: [token for token in head if token not in block]  # type: ignore[misc]


def mistakes_of_sets(kept: Kept, n: int) -> Iterator[tuple[str, Kept]]:
    """Yield mistakes as a description and the wrong kept sets: at one head, at one layer, or from a layer on."""
    whole, layers = list(range(n)), list(kept)
    for at, layer in enumerate(layers):
        sets = kept[layer]
        every = [whole] * len(sets)
        for head in range(len(sets)):
            yield f"layer {layer}, KV head {head} kept all", {**kept, layer: [*sets[:head], whole, *sets[head + 1 :]]}
        yield f"layer {layer} kept all", {**kept, layer: every}
        yield f"layers {layer} and later kept all", {**kept, **dict.fromkeys(layers[at:], every)}
        for head in range(1, len(sets)):
            others = [*sets[:head], sets[head - 1], *sets[head + 1 :]]
            yield f"layer {layer}, KV head {head} kept what head {head - 1} keeps", {**kept, layer: others}
        yield f"layer {layer} kept in each head what KV head 0 keeps", {**kept, layer: [sets[0]] * len(sets)}
        if len(kept[layers[at - 1]]) == len(sets) and at:
            yield f"layer {layer} kept what layer {layers[at - 1]} keeps", {**kept, layer: kept[layers[at - 1]]}


def mistakes_of_positions(
    kept: Kept, renumbered: bool, n: int,
) -> Iterator[tuple[str, Mapping[int, PositionRule]]]:
    """Yield mixtures of the two position rules as a description and the rule of each layer.

    Args:
        kept: kept positions.
        renumbered: declared rule: True if kept tokens are renumbered.
        n: number of tokens of the prompt.
    """
    declared = "renumbered positions" if renumbered else "positions of the text"
    actual = "positions of the text" if renumbered else "renumbered positions"
    zero = "keys that were not rotated" if renumbered else "the positions 0, 1, ..."
    right = dict.fromkeys(kept, PositionRule(renumbered))
    for where, layers, part in _places(kept, n):
        for words, from_zero in ((actual, False), (zero, True)):
            if not from_zero or part == range(n):
                wrong = dict.fromkeys(layers, PositionRule(renumbered, part, from_zero))
                yield f"{where} had {words}, and the rest {declared}", {**right, **wrong}


def _places(kept: Kept, n: int) -> Iterator[tuple[str, Sequence[int], range]]:
    """Yield parts of a cache as a description, the layers, and the positions of the text."""
    layers, whole = list(kept), range(n)
    yield "all kept tokens", layers, whole
    for at, layer in enumerate(layers):
        yield f"layer {layer}", [layer], whole
        if 0 < at < len(layers) - 1:
            yield f"layers {layer} and later", layers[at:], whole
    for some in (layers, *([layer] for layer in layers)):
        where = "" if some is layers else f"of layer {some[0]} "
        for position in sorted({position for layer in some for tokens in kept[layer] for position in tokens})[1:]:
            yield f"kept tokens {where}before position {position}", some, range(position)
            yield f"kept tokens {where}from position {position} on", some, range(position, n)
