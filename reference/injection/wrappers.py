"""Wrappers: the ids that stand around a chunk when it is archived, and where a chunk may be cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spec.errors import SpecError

__all__ = ["CELLS", "FORMS", "Form", "Marker", "Vocabulary", "Wrapped", "marker_id", "slices", "wrap"]


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer without its habits: `encode` adds no special token, `decode` drops none."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Marker:
    """A special token of a chat template."""

    text: str


@dataclass(frozen=True)
class Form:
    """What stands before and after the chunk; the first `hidden` parts of the prefix are never spliced."""

    prefix: tuple[Marker | str, ...] = ()
    suffix: tuple[Marker | str, ...] = ()
    hidden: int = 0


@dataclass(frozen=True)
class Wrapped:
    """Ids of a wrapped chunk, all of which are computed.

    The first `hidden` ids are not spliced; `markers` are the positions of the markers, ascending; the chunk itself
    stands at [start, stop).
    """

    ids: tuple[int, ...]
    hidden: int
    markers: tuple[int, ...]
    start: int
    stop: int


_OPEN, _CLOSE = Marker("<|im_start|>"), Marker("<|im_end|>")
_SYSTEM = (_OPEN, "system\nYou are a helpful assistant.", _CLOSE, "\n")
_USER, _END = Marker("<|user|>"), Marker("<|end|>")

FORMS: Mapping[str, Form] = {
    "raw": Form(),
    "full": Form((*_SYSTEM, _OPEN, "user\n"), (_CLOSE,)),
    "full_hidden_preamble": Form((*_SYSTEM, _OPEN, "user\n"), (_CLOSE,), hidden=len(_SYSTEM)),
    "opening": Form((*_SYSTEM, _OPEN, "user\n")),
    "closing": Form(("user\n",), (_CLOSE,)),
    "role": Form(("user\n",)),
    "markers": Form((_OPEN, "\n"), (_CLOSE,)),
    "full_phi3": Form((_USER,), (_END,)),
    "markers_phi3": Form((_END,), (_END,)),
    "markers_deepseek": Form((Marker("<｜User｜>"), "\n"), (Marker("<｜end▁of▁sentence｜>"),)),
}

# The 2 x 2: whether chunks are cut at sentence ends, and the form around them.
CELLS: Mapping[str, tuple[bool, str]] = {
    "A": (False, "raw"), "B": (False, "full"), "C": (True, "raw"), "D": (True, "full"),
}


def marker_id(marker: Marker, vocabulary: Vocabulary) -> int:
    """The one id of a marker.

    Implements: IN-MARKER

    Source: Appendix A ("Tokens: 3"), which holds only where each marker is one token.

    Raises:
        SpecError: where the tokenizer makes several ids of it, or one that stands for something else.
    """
    ids = [int(token) for token in vocabulary.encode(marker.text)]
    if len(ids) != 1 or vocabulary.decode(ids) != marker.text:
        raise SpecError("marker", marker.text, f"must be one token id of this tokenizer, and is {ids}")
    return ids[0]


def wrap(form: Form, chunk: Sequence[int], vocabulary: Vocabulary) -> Wrapped:
    """The ids of a chunk in a form; the chunk's own ids are not tokenised again.

    Implements: IN-WRAP

    Source: Sections 3.5 and 3.6, Appendix A.

    Raises:
        SpecError: for an empty chunk, or a marker that is not one id.
    """
    if len(chunk) == 0:
        raise SpecError("chunk", [], "must hold at least one token id")
    before = [_ids(part, vocabulary) for part in form.prefix]
    after = [_ids(part, vocabulary) for part in form.suffix]
    pieces = [*before, [int(token) for token in chunk], *after]
    starts = [sum(map(len, pieces[:at])) for at in range(len(pieces))]
    parts = (*form.prefix, "", *form.suffix)
    return Wrapped(
        tuple(token for piece in pieces for token in piece),
        hidden=sum(map(len, before[: form.hidden])),
        markers=tuple(start for start, part in zip(starts, parts, strict=True) if isinstance(part, Marker)),
        start=starts[len(before)],
        stop=starts[len(before)] + len(chunk),
    )


def _ids(part: Marker | str, vocabulary: Vocabulary) -> list[int]:
    if isinstance(part, Marker):
        return [marker_id(part, vocabulary)]
    return [int(token) for token in vocabulary.encode(part)]


def slices(ids: Sequence[int], ends: frozenset[int], size: int) -> list[tuple[int, int]]:
    """Chunks [start, stop) of at most `size` tokens, cut after the last sentence end that fits.

    Implements: IN-SLICES

    Source: Section 3.5, the 2 x 2; an empty set of ends gives its arbitrary slices of a fixed count.

    Raises:
        SpecError: for a size below 1.
    """
    if size < 1:
        raise SpecError("size", size, "must be at least 1 token")
    found, start = [], 0
    while start < len(ids):
        stop = min(start + size, len(ids))
        clean = [at + 1 for at in range(start, stop) if ids[at] in ends]
        stop = clean[-1] if clean and stop < len(ids) else stop
        found.append((start, stop))
        start = stop
    return found
