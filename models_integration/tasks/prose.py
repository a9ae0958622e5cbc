"""Running text for contexts: separate windows of the text, for any tokenizer.

The text that comes with kvspec is from the King James Version of the Bible (Genesis, Joshua to 2 Kings), as in Debian's
bible-kjv-text 4.38. Each line is a verse without its number. The copyright has expired, and the text has no digits.
"""

import lzma
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

from models_integration.tasks.assembly import Anchor, Assembled, TaskTokenizer, encode, joiner
from models_integration.tasks.samples import generator
from spec.errors import SpecError

__all__ = ["NARRATIVE", "Prose", "read_prose", "read_text", "weave"]

NARRATIVE = Path(__file__).parent / "assets" / "kjv_narrative.txt.xz"


@dataclass(frozen=True)
class Prose:
    """A text as tokens.

    Attributes:
        name: name of the file.
        tokens: tokens of all lines. Each line is tokenized as if it followed a different sentence.
        stops: positions at which lines end, ascending.
    """

    name: str
    tokens: tuple[int, ...]
    stops: tuple[int, ...]

    def windows(self, length: int) -> int:
        """Return the number of contexts with `length` tokens that have no token of the text in common.

        Raises:
            SpecError: if the length is below 1, or if the text is shorter than the length.
        """
        if not 1 <= length <= len(self.tokens):
            raise SpecError("length", length, f"must lie in [1, {len(self.tokens)}], the tokens of {self.name}")
        return len(self.tokens) // length

    def window(self, length: int, index: int, seed: int) -> int:
        """Return the index of the window for sample number `index`. The seed sets the order of the windows.

        Raises:
            SpecError: as in `windows`, or if the index or the seed is negative.
        """
        if index < 0:
            raise SpecError("index", index, "must not be negative")
        count = self.windows(length)
        return int(generator((seed, length)).permutation(count)[index % count])


def read_text(path: Path) -> str:
    """Read a text file, plain or .xz.

    Raises:
        SpecError: if the file cannot be read.
    """
    try:
        data = path.read_bytes()
        return (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise SpecError("path", str(path), f"must be a readable text file: {error}") from error


def read_prose(tokenizer: TaskTokenizer, path: Path = NARRATIVE) -> Prose:
    """Read a text file, plain or .xz, and tokenize it. A million characters take about a second.

    Raises:
        SpecError: if the file cannot be read or is empty.
    """
    space = joiner(tokenizer)
    lines = [encode(tokenizer, space + line.strip()) for line in read_text(path).splitlines() if line.strip()]
    if not any(lines):
        raise SpecError("path", str(path), "must not be empty")
    return Prose(path.name, tuple(chain.from_iterable(lines)), tuple(accumulate(map(len, lines))))


def weave(
    tokenizer: TaskTokenizer, prose: Prose, window: int, opening: Sequence[int], anchors: Sequence[Anchor], length: int
) -> Assembled:
    """Join opening tokens and a window of the text. Insert each anchor after the line that ends nearest to its place.

    The text continues between anchors. Lines may be cut only at the start and the end of the window.

    Raises:
        SpecError: if opening tokens and anchors alone are longer than `length` tokens.
    """
    space, first = joiner(tokenizer), window * length
    encoded = [encode(tokenizer, space + anchor.text) for anchor in anchors]
    room = length - len(opening) - sum(map(len, encoded))
    if room < 0:
        raise SpecError("length", length, f"the sentences of the task alone need {length - room} tokens")
    stops = [stop - first for stop in prose.stops if first < stop <= first + room] or [0]
    ids, spans, read = list(opening), [(0, 0)] * len(anchors), 0
    for index in sorted(range(len(anchors)), key=lambda i: anchors[i].fraction):
        place = max(read, _nearest(stops, anchors[index].fraction * room))
        ids.extend(prose.tokens[first + read : first + place])
        read, spans[index] = place, (len(ids), len(ids) + len(encoded[index]))
        ids.extend(encoded[index])
    ids.extend(prose.tokens[first + read : first + room])
    return Assembled(tuple(ids), tuple(spans))


def _nearest(stops: Sequence[int], place: float) -> int:
    """Return the stop nearest to a place, at a tie the smaller stop."""
    at = bisect_left(stops, place)
    return min(stops[max(0, at - 1) : at + 1], key=lambda stop: abs(stop - place))
