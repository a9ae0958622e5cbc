"""RULER v1's three aggregation tasks: `vt` with its worked example, the common words `cwe`, the frequent words `fwe`.

In `cwe` and `fwe` every occurrence of a wanted word is evidence; those in sinks or recent window are left out.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, pi

import numpy as np

from models_integration.tasks.context import Ground, Span, as_many, different, joined, letters, unprotected
from models_integration.tasks.ruler import (
    INSTRUCTION,
    NOISE,
    as_ruler,
    draw_chains,
    order,
    variable_tracking_samples,
    words,
)
from models_integration.tasks.samples import Sample
from spec.errors import SpecError

__all__ = ["cwe_samples", "fwe_samples", "vt_samples"]

COMMON = 10
SHORT = 4096
"""Contexts below this many tokens repeat words less often."""
_TIMES, _SHOWN_TIMES = {True: (30, 3), False: (6, 1)}, {True: (10, 3), False: (3, 1)}
STEP = 10
VT_EXAMPLE = 500
"""Tokens of the worked example of `vt` before its answer, at most, where as many lines as names do not need more."""
_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
    " appear most often.\n"
)
_CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_CWE_OPENING = " Answer: The top 10 words that appear most often in the list are:"
_FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared"
    " coded words."
)
_FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently"
    " appeared words in the above coded text?"
)
_FWE_OPENING = " Answer: According to the coded text above, the three most frequently appeared words are:"


def vt_samples(dialect: str, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """One chain, after a worked example with names of three letters. Neither dialect shuffles.

    Raises:
        SpecError: as `variable_tracking_samples`.
    """
    example = _vt_example(ground, ground.rng(length, index, seed, 1))
    samples = variable_tracking_samples(ground, length, index, seed, example=example)
    return tuple(as_ruler(sample, "vt", dialect, 30) for sample in samples)


def _vt_example(ground: Ground, rng: np.random.Generator) -> str:
    (chain,) = draw_chains(rng, 1, 3)
    question, count = chain.question + chain.opening, len(chain.lines)
    used = len(ground.encode(INSTRUCTION + "\n".join(["", *chain.lines]) + question))
    noise = ground.encode(f"\n{NOISE}")
    lines = [NOISE] * max(count, len(as_many(lambda: noise, VT_EXAMPLE - used)))
    for done, at in enumerate(sorted(rng.permutation(len(lines))[:count].tolist())):
        lines.insert(at + done, chain.lines[done])
    return INSTRUCTION + "\n".join(["", *lines]) + f"{question} {' '.join(chain.names)}\n\n"


def cwe_samples(dialect: str, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """Ten words 30 times each, all others 3 times (6 and 1 below 4096 tokens), in a numbered list after a small one.

    Raises:
        SpecError: for a negative index or seed, a length without room, or one for which the words do not suffice.
    """
    rng = ground.rng(length, index, seed)
    (_, _, first), (head, drawn, own) = (_cwe(dialect, ground, length, at, seed) for at in (0, index))
    listing = _repeated(drawn[: _as_first(first, own, STEP)], *_TIMES[length >= SHORT])
    listing = [listing[at] for at in order(rng, dialect, len(listing))]
    pieces = [ground.follow(part) for at, word in enumerate(listing, 1) for part in (f"{at}.", word)]
    text = joined(ground, length, index, seed, [head, *pieces[1:]])
    wanted = drawn[:COMMON]
    evidence = _occurrences(text.spans[1::2], listing, wanted, length)
    sample = ground.sample(
        text.ids, _CWE_QUESTION, _CWE_OPENING, _numbered(wanted), evidence, gap="", task="cwe",
        references=tuple(wanted),
    )
    return (as_ruler(sample, "cwe", dialect, 120),)


def _cwe(dialect: str, ground: Ground, length: int, index: int, seed: int) -> tuple[tuple[int, ...], list[str], int]:
    """All before the first word; the list's words, the common ones first, and how many of them there is room for."""
    rng = ground.rng(length, index, seed, 1)
    drawn, shown = [str(word) for word in rng.permutation(words())], 40 if length >= SHORT else 20
    example = [str(word) for word in rng.permutation(words())[:shown]]
    small = _repeated(example, *_SHOWN_TIMES[length >= SHORT])
    small = [small[at] for at in order(rng, dialect, len(small))]
    shot = f"{_CWE}{_numbered(small)}{_CWE_QUESTION}{_CWE_OPENING} {_numbered(example[:COMMON])}\n"
    head = ground.encode(f"\n\n{shot}{_CWE}1.")
    room = ground.room(length, head) + len(ground.follow("1."))
    return head, drawn, _room_for(ground, drawn, *_TIMES[length >= SHORT], room)


def _repeated(drawn: list[str], often: int, seldom: int) -> list[str]:
    return [*drawn[:COMMON] * often, *drawn[COMMON:] * seldom]


def _as_first(first: int, own: int, step: int) -> int:
    """v1 searches the amount once, with its first sample; where it does not fit another, that gets less, in steps."""
    return first - step * max(0, ceil((first - own) / step))


def _numbered(listing: Sequence[str]) -> str:
    return " ".join(f"{at}. {word}" for at, word in enumerate(listing, 1))


def _room_for(ground: Ground, drawn: Sequence[str], often: int, seldom: int, room: int) -> int:
    """How many different words there is room for with their numbers, the common ones among them."""
    number = 0
    for at, word in enumerate(drawn):
        times = often if at < COMMON else seldom
        room -= times * len(ground.follow(word))
        room -= sum(len(ground.follow(f"{number + count}.")) for count in range(1, times + 1))
        if room < 0 and at >= COMMON + STEP:
            return at
        number += times
    raise SpecError("length", number, f"is too large: the task has only {len(drawn)} words")


def fwe_samples(dialect: str, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """Words of six random letters, the k-th of them about k^-2 times as often as dots, which are no answer.

    Raises:
        SpecError: for a negative index or seed, and a length in which three words are not the most frequent.
    """
    rng = ground.rng(length, index, seed)
    (_, first), (coded, own) = (_fwe(ground, length, at, seed) for at in (0, index))
    times = _times(_as_first(first, own, max(1, length // 32)), len(coded))
    if times[3] <= times[4]:
        bound = "is too short: the third most frequent word must occur more often than the fourth"
        raise SpecError("length", length, bound)
    listing = [word for word, count in zip(coded, times, strict=True) for _ in range(count)]
    listing = [listing[at] for at in order(rng, dialect, len(listing))]
    head, wanted = ground.encode(f"\n\n{_FWE}"), coded[1:4]
    text = joined(ground, length, index, seed, [head, *map(ground.follow, listing)])
    evidence = _occurrences(text.spans[1:], listing, wanted, length)
    sample = ground.sample(
        text.ids, _FWE_QUESTION, _FWE_OPENING, " ".join(wanted), evidence, gap="", task="fwe",
        references=tuple(wanted),
    )
    return (as_ruler(sample, "fwe", dialect, 50),)


def _fwe(ground: Ground, length: int, index: int, seed: int) -> tuple[list[str], int]:
    """The words, the most frequent first, and how many words in all there is room for."""
    rng = ground.rng(length, index, seed, 1)
    coded = ["...", *different(lambda: letters(rng, 6), max(4, length // 50 - 1))]
    sizes = np.array([len(ground.follow(word)) for word in coded])
    room = max(0, ground.room(length, ground.encode(f"\n\n{_FWE}")))
    return coded, bisect_right(range(2 * room), room, key=lambda total: int(sizes @ _times(total, len(coded)))) - 1


def _times(total: int, ranks: int) -> np.ndarray:
    """How often the word of each rank stands among about so many, by a zeta law of exponent 2."""
    return np.floor(max(0, total) / np.arange(1, ranks + 1) ** 2.0 / (pi**2 / 6)).astype(int)


def _occurrences(
    spans: Sequence[Span], listing: Sequence[str], wanted: Sequence[str], length: int
) -> list[Span]:
    stands = zip(spans, listing, strict=True)
    return [span for span, word in stands if word in wanted and unprotected(span, length)]
