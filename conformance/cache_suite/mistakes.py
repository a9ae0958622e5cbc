"""Mistakes of a cache that can explain its log-probabilities: wrong kept sets, and mixed position rules."""

from collections.abc import Iterator, Mapping, Sequence

from conformance.cache_suite.oracle import PositionRule

__all__ = ["Kept", "mistakes_of_positions", "mistakes_of_sets"]

Kept = dict[int, list[list[int]]]
"""Kept positions, ascending, by full-attention layer and KV head."""


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
