"""RULER v1's aggregation tasks: `vt` with a worked example, common words (`cwe`), and frequent words (`fwe`).

In `cwe` and `fwe` the evidence is all occurrences of the wanted words, except in the sinks and the recent window.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import ceil, pi

import numpy as np

from experiments.tasks.context import Ground, Span, as_many, different, joined, letters, unprotected
from experiments.tasks.needle import Sample
from experiments.tasks.ruler import INSTRUCTION, NOISE, as_ruler, draw_chains, order, variable_tracking_samples, words
from spec.errors import SpecError

__all__ = ["cwe_samples", "fwe_samples", "vt_samples"]

COMMON = 10
SHORT = 4096
"""Contexts with fewer tokens repeat words less often."""
_TIMES, _SHOWN_TIMES = {True: (30, 3), False: (6, 1)}, {True: (10, 3), False: (3, 1)}
STEP = 10
VT_EXAMPLE = 500
"""Largest number of tokens of the worked example of `vt` before its answer, unless the assignments need more."""
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
    """Return one question on a chain, after a worked example with names of three letters. No dialect shuffles.

    Raises:
        SpecError: as in `variable_tracking_samples`.
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
    """Return a question on the ten common words of a numbered list, after a small example list.

    A common word occurs 30 times and a different word 3 times (6 times and once below 4096 tokens).

    Raises:
        SpecError: if index or seed is negative, if the length is too short, or if there are too few words for the
            length.
    """
    rng = ground.rng(length, index, seed)
    (_, _, first), (head, drawn, fits) = (_cwe(dialect, ground, length, at, seed) for at in (0, index))
    listing = _repeated(drawn[: _as_first(first, fits, STEP)], *_TIMES[length >= SHORT])
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
    """Return the ids before the list, the words of the list (common words first), and how many words fit."""
    rng = ground.rng(length, index, seed, 1)
    drawn, shown = [str(word) for word in rng.permutation(words())], 40 if length >= SHORT else 20
    example = [str(word) for word in rng.permutation(words())[:shown]]
    small = _repeated(example, *_SHOWN_TIMES[length >= SHORT])
    small = [small[at] for at in order(rng, dialect, len(small))]
    shot = f"{_CWE}{_numbered(small)}{_CWE_QUESTION}{_CWE_OPENING} {_numbered(example[:COMMON])}\n"
    head = ground.encode(f"\n\n{shot}{_CWE}1.")
    left = ground.tokens_left(length, head) + len(ground.follow("1."))
    return head, drawn, _words_that_fit(ground, drawn, *_TIMES[length >= SHORT], left)


def _repeated(drawn: list[str], often: int, seldom: int) -> list[str]:
    return [*drawn[:COMMON] * often, *drawn[COMMON:] * seldom]


def _as_first(first: int, fits: int, step: int) -> int:
    """Return the number of units as in v1: the number for the first sample, reduced in steps until the sample fits."""
    return first - step * max(0, ceil((first - fits) / step))


def _numbered(listing: Sequence[str]) -> str:
    return " ".join(f"{at}. {word}" for at, word in enumerate(listing, 1))


def _words_that_fit(ground: Ground, drawn: Sequence[str], often: int, seldom: int, left: int) -> int:
    """Return how many different words fit with their numbers, including the common words."""
    number = 0
    for at, word in enumerate(drawn):
        times = often if at < COMMON else seldom
        left -= times * len(ground.follow(word))
        left -= sum(len(ground.follow(f"{number + count}.")) for count in range(1, times + 1))
        if left < 0 and at >= COMMON + STEP:
            return at
        number += times
    raise SpecError("length", number, f"is too large: the task has only {len(drawn)} words")


def fwe_samples(dialect: str, ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """Return a question on the three most frequent words. The k-th word occurs about k^-2 times as often as the dots.

    A word has six random letters. Dots are not an answer.

    Raises:
        SpecError: if index or seed is negative, or if the length is too short for three most frequent words.
    """
    rng = ground.rng(length, index, seed)
    (_, first), (coded, fits) = (_fwe(ground, length, at, seed) for at in (0, index))
    times = _times(_as_first(first, fits, max(1, length // 32)), len(coded))
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
    """Return the words, most frequent first, and how many words fit in total."""
    rng = ground.rng(length, index, seed, 1)
    coded = ["...", *different(lambda: letters(rng, 6), max(4, length // 50 - 1))]
    sizes = np.array([len(ground.follow(word)) for word in coded])
    left = max(0, ground.tokens_left(length, ground.encode(f"\n\n{_FWE}")))
    return coded, bisect_right(range(2 * left), left, key=lambda total: int(sizes @ _times(total, len(coded)))) - 1


def _times(total: int, ranks: int) -> np.ndarray:
    """Return how often the word of each rank occurs among about `total` words, by a zeta law with exponent 2."""
    return np.floor(max(0, total) / np.arange(1, ranks + 1) ** 2.0 / (pi**2 / 6)).astype(int)


def _occurrences(
    spans: Sequence[Span], listing: Sequence[str], wanted: Sequence[str], length: int
) -> list[Span]:
    stands = zip(spans, listing, strict=True)
    return [span for span, word in stands if word in wanted and unprotected(span, length)]
