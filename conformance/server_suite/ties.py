"""Differences between the stated kept sets and the kept sets of the policy that rounding cannot explain."""

from collections.abc import Iterable, Sequence

from conformance.server_suite.reading import HeadSets

__all__ = ["Difference", "flat", "judged_differences"]

Difference = tuple[int, int, int]
"""Eviction, kept set, and position of a token that is in exactly one of two kept sets."""
EXCESS = 2
"""A server may have this many times as many differences that no copy shows as a copy has beside the other copies."""


def flat(sets: HeadSets) -> list[list[int]]:
    """Return the kept sets of all layers in one list."""
    return [head for layer in sets for head in layer]


def judged_differences(
    stated: Sequence[HeadSets], expected: Sequence[HeadSets], ids: Sequence[int], copies: Iterable[Sequence[HeadSets]],
    sequential: bool,
) -> tuple[set[Difference], set[Difference]]:
    """Return the differences that rounding cannot explain, and the differences that may be due to rounding.

    Rounding explains a token's difference if noise changes the same set at a token with the same id. Equal tokens can
    tie, and each noisy copy shows only one order of tied tokens. In bfloat16, copies do not show all tokens that
    rounding can change. Differences that no copy shows decide nothing, unless they are many more than in each copy.

    If the selector is sequential, a tie changes all later choices. Differences in a set that noise changes, and in all
    sets of later evictions, then decide nothing.

    Args:
        stated: kept sets of the server, for each eviction.
        expected: kept sets of the policy.
        ids: token ids of the request.
        copies: kept sets of the policy on copies of the model with noise. A copy is used only if differences remain.
        sequential: True if the selector chooses a token by the tokens that it has chosen before.
    """
    clear, noise, rest = _differences(stated, expected), list[set[Difference]](), iter(copies)
    while clear and (noisy := next(rest, None)) is not None:
        noise.append(_differences(noisy, expected))
        clear = _alone(clear, noise[-1:], ids)
    if len(clear) <= EXCESS * _most_alone(noise, ids):
        return set(), clear
    unstable = set[Difference]().union(*noise)
    if not sequential or not unstable:
        return clear, set()
    first, sets = min(at for at, _, _ in unstable), {one[:2] for one in unstable}
    tied = {one for one in clear if one[0] > first or one[:2] in sets}
    return clear - tied, tied


def _alone(one: set[Difference], others: Sequence[set[Difference]], ids: Sequence[int]) -> set[Difference]:
    """Return the differences of `one` that no other has, at the same set and the same token id."""
    shown = {(at, number, ids[position]) for other in others for at, number, position in other}
    return {(at, number, position) for at, number, position in one if (at, number, ids[position]) not in shown}


def _most_alone(noise: Sequence[set[Difference]], ids: Sequence[int]) -> int:
    """Return the largest number of differences of a copy that no other copy has."""
    return max((len(_alone(one, [*noise[:at], *noise[at + 1 :]], ids)) for at, one in enumerate(noise)), default=0)


def _differences(one: Sequence[HeadSets], other: Sequence[HeadSets]) -> set[Difference]:
    return {
        (at, number, position)
        for at, pair in enumerate(zip(one, other, strict=True))
        for number, (a, b) in enumerate(zip(*map(flat, pair), strict=True))
        for position in set(a) ^ set(b)
    }
