"""A list of strings, of which several are asked for by how they begin and end: the shape of SCBench's `prefix_suffix`.

Many strings begin as the wanted one does, and many end so; only one does both. The words are ours.
"""

from math import isqrt

from models_integration.tasks.context import Ground, as_many, asked, different, joined, letters
from models_integration.tasks.metrics import CONTAINS
from models_integration.tasks.samples import Sample

__all__ = ["prefix_suffix_samples"]

AFFIX, MIDDLE = 3, 6
"""Letters of a prefix or suffix, and between them."""
_INSTRUCTION = "Below is a list of strings. Find the string that has both the given prefix and the given suffix."
_OPENING = "The string with this prefix and suffix is:"


def prefix_suffix_samples(
    ground: Ground, length: int, index: int, seed: int, *, questions: int = 1
) -> tuple[Sample, ...]:
    """The questions of context number `index`, in the order in which they are asked.

    The strings that are asked for come from equal parts of the list, one from each, outside sinks and recent window.

    Args:
        ground, length, index, seed, questions: as `key_value_samples`'.

    Raises:
        SpecError: for no question, or a length that has no string for each question.
    """
    rng = ground.rng(length, index, seed)
    head, foot = ground.encode(f"\n\n{_INSTRUCTION}\n"), ground.encode("\n\n")
    room = ground.room(length, head, foot)
    # More pairs of affixes than there are tokens, so that there is always another one; few enough to be shared.
    before, after = (different(lambda: letters(rng, AFFIX), isqrt(max(0, room)) + 2) for _ in range(2))
    drawn = dict[str, str]()

    def unit() -> tuple[int, ...]:
        (pair,) = different(lambda: f"{rng.choice(before)} {rng.choice(after)}", 1, drawn)
        drawn[pair] = pair.replace(" ", letters(rng, MIDDLE))
        return ground.encode(f"\n{drawn[pair]}")

    units = as_many(unit, room)
    text = joined(ground, length, index, seed, [head, *units, foot])
    spans, pairs = text.spans[1:-1], list(drawn.items())
    return tuple(
        ground.sample(
            text.ids, 'Prefix: "{}"\nSuffix: "{}"'.format(*pairs[at][0].split()), _OPENING, pairs[at][1], [spans[at]],
            gap="\n", task="prefix_suffix", metadata={"depth": at / len(units)}, metric=CONTAINS,
        )
        for at in asked(rng, spans, questions, length)
    )
