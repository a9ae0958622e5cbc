"""Input of a failed test as Python code that makes the input again, and words for results that differ."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["MOST_LISTED", "code_of", "differing_set", "exchanged", "listed", "note_code", "unequal"]

MARK = "to make this input again:\n"
MOST_LISTED = 8


@contextmanager
def note_code(code: str) -> Iterator[None]:
    """Add code that makes the input again to each error of the block, as a note. pytest prints notes."""
    __tracebackhide__ = True
    try:
        yield
    except Exception as error:
        error.add_note(f"{MARK}{code}")
        raise


def code_of(error: BaseException) -> str:
    """Return the code that `note_code` added to an error, or ""."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(MARK)]
    return notes[0].removeprefix(MARK) if notes else ""


def listed(tokens: Sequence[int]) -> str:
    """Return positions as text. If there are many, the text has their number and the first positions."""
    if len(tokens) > MOST_LISTED:
        return f"{len(tokens)} tokens ({', '.join(map(str, tokens[:MOST_LISTED]))}, ...)"
    return str(list(tokens))


def unequal(name: str, actual: ArrayLike, expected: ArrayLike) -> str:
    """Return a sentence with two results that differ. For a long array, the sentence has the most different element."""
    a, b = (np.asarray(one, dtype=np.float64) for one in (actual, expected))
    if a.shape != b.shape or a.size <= MOST_LISTED:
        return f"{name} is {a.tolist()}, not {b.tolist()}"
    with np.errstate(invalid="ignore"):  # Equal infinities differ by NaN, which counts as 0.
        apart = np.where(np.isnan(a) != np.isnan(b), np.inf, np.nan_to_num(np.abs(a - b), posinf=np.inf))
    at = np.unravel_index(int(apart.argmax()), a.shape)
    place = ", ".join(map(str, at))
    return f"{name}[{place}] is {a[at]}, not {b[at]} ({np.count_nonzero(apart)} of {a.size} numbers differ)"


def differing_set(actual: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Return a description of the first kept set that differs, or "" if no kept set differs."""
    if len(actual) != len(expected):
        return f"there are {len(actual)} kept sets in place of {len(expected)}"
    for g, (kept, right) in enumerate(zip(actual, expected, strict=True)):
        if list(kept) != list(right):
            return f"kept set {g} of {len(actual)} {exchanged(kept, right)}"
    return ""


def exchanged(kept: Sequence[int], right: Sequence[int]) -> str:
    """Return a description of a kept set that differs from the right one: first a different size, then tokens."""
    more, less = sorted({*kept} - {*right}), sorted({*right} - {*kept})
    if len({*kept}) < len(kept):
        return f"is {listed(kept)}, and must have each position once"
    if not more and not less:
        return f"is {listed(kept)}, and must be in the order {listed(right)}"
    tokens = f"keeps {listed(more)} in place of {listed(less)}" if more and less else f"lacks {listed(less)}"
    tokens = tokens if less else f"also keeps {listed(more)}"
    if len(kept) == len(right):
        return tokens
    size = "1 token" if len(kept) == 1 else f"{len(kept)} tokens"
    return f"has {size}, and must have {len(right)}: it {tokens}"
