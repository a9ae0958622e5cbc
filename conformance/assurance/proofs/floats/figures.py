"""The last column of README.md's table, which `python -m conformance.assurance.proofs.floats --write` makes."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["README", "figure", "rewritten", "stale"]

README = Path(__file__).with_name("README.md")
MOVES = 1.25
"""By how much another machine's exponentials and logarithms may move a figure."""

_ROW = re.compile(r"^(\| `(\w+)` \| ([^|]+) \|.*\| )([^|]*)( \|)$", re.MULTILINE)
Key = tuple[str, str]


def figure(found: float) -> str:
    return f"{found:.2g}"


def _key(row: re.Match[str], found: Mapping[Key, float]) -> Key | None:
    return next((key for key in found if key[1] == row[2] and key[0] in row[3].split(", ")), None)


def rewritten(text: str, found: Mapping[Key, float]) -> str:
    """The page with the largest errors over bounds that were found, by item and bound."""
    def row(line: re.Match[str]) -> str:
        key = _key(line, found)
        return line[0] if key is None else f"{line[1]}{figure(found[key])}{line[5]}"

    return _ROW.sub(row, text)


def stale(text: str, found: Mapping[Key, float]) -> Iterator[str]:
    """Figures of the page that are not those found, by item."""
    written = {key: float(line[4]) for line in _ROW.finditer(text) if (key := _key(line, found)) is not None}
    for key, value in found.items():
        if key not in written or not written[key] / MOVES <= value <= written[key] * MOVES:
            yield f"{key[0]}: README.md says {written.get(key, 'nothing')}, found {figure(value)}: run with --write"
