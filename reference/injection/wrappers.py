"""Wrappers: token ids before and after a chunk in the archive, and the splitting of text into chunks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spec.errors import SpecError

__all__ = ["CELLS", "FORMS", "Form", "Marker", "Vocabulary", "Wrapped", "marker_id", "slices", "wrap"]


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer whose `encode` adds no special tokens, and whose `decode` keeps all special tokens."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Marker:
    """A special token of a chat template."""

    text: str


@dataclass(frozen=True)
class Form:
    """Text and markers around a chunk. The first `hidden` parts of the prefix are never spliced into a session."""

    prefix: tuple[Marker | str, ...] = ()
    suffix: tuple[Marker | str, ...] = ()
    hidden: int = 0


@dataclass(frozen=True)
class Wrapped:
    """Token ids of a wrapped chunk. The model computes keys and values for all ids of the wrapped chunk.

    The first `hidden` ids are not spliced into a session. `markers` contains the positions of the markers, ascending.
    The chunk itself has the positions [start, stop).
    """

    ids: tuple[int, ...]
    hidden: int
    markers: tuple[int, ...]
    start: int
    stop: int


_OPEN, _CLOSE = Marker("<|im_start|>"), Marker("<|im_end|>")
_SYSTEM = (_OPEN, "system\nYou are a helpful assistant.", _CLOSE, "\n")
_USER, _END = Marker("<|user|>"), Marker("<|end|>")

# The forms of Phi-3 have no newline after a marker, although Sections 3.5 and 3.6 print one. Phi-3's tokenizer drops
# this newline, and Appendix A counts two tokens.
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

# Cells of the 2 x 2 experiment: whether chunks end at sentence ends, and the form that wraps the chunks.
CELLS: Mapping[str, tuple[bool, str]] = {
    "A": (False, "raw"), "B": (False, "full"), "C": (True, "raw"), "D": (True, "full"),
}


def marker_id(marker: Marker, vocabulary: Vocabulary) -> int:
    """Return the token id of a marker.

    Implements: IN-MARKER

    Source: Appendix A. The paper's count of 3 tokens is correct only if each marker is one token.

    Raises:
        SpecError: if the tokenizer encodes the marker as several ids, or as an id that decodes to different text.
    """
    ids = [int(token) for token in vocabulary.encode(marker.text)]
    if len(ids) != 1 or vocabulary.decode(ids) != marker.text:
        raise SpecError("marker", marker.text, f"must be one token id of the tokenizer, but is {ids}")
    return ids[0]


def wrap(form: Form, chunk: Sequence[int], vocabulary: Vocabulary) -> Wrapped:
    """Return the ids of a chunk with the form's prefix and suffix. The ids of the chunk are not tokenised again.

    Implements: IN-WRAP

    Source: Sections 3.5 and 3.6, Appendix A.

    Raises:
        SpecError: if the chunk is empty, or if the tokenizer does not encode a marker as one id.
    """
    if len(chunk) == 0:
        raise SpecError("chunk", [], "must have at least one token id")
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
    """Split ids into chunks [start, stop) of at most `size` tokens. A chunk ends at the last sentence end that fits.

    Implements: IN-SLICES

    Source: Section 3.5, the 2 x 2 experiment. If `ends` is empty, the chunks are the paper's arbitrary slices of `size`
    tokens.

    Raises:
        SpecError: if the size is below 1.
    """
    if size < 1:
        raise SpecError("size", size, "must be at least 1 token")
    slices, start = [], 0
    while start < len(ids):
        stop = min(start + size, len(ids))
        clean = [at + 1 for at in range(start, stop) if ids[at] in ends]
        stop = clean[-1] if clean and stop < len(ids) else stop
        slices.append((start, stop))
        start = stop
    return slices
