"""TOML as it is written here; Python reads it and does not write it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["written"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    """A basic string; its escapes are JSON's, which leaves DEL as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else str(value)


def written(table: Mapping[str, Any]) -> str:
    """A table of texts, numbers, dates, lists of them, tables and lists of tables."""
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Any], within: tuple[str, ...]) -> Iterator[str]:
    plain = {name: value for name, value in table.items() if not _is_table(value)}
    yield from (f"{_key(name)} = {_value(value)}" for name, value in plain.items())
    for name, value in table.items():
        if name in plain:
            continue
        path, several = (*within, _key(name)), isinstance(value, list)
        brackets = "[[{}]]" if several else "[{}]"
        for row in value if several else [value]:
            implied = not several and row and all(map(_is_table, row.values()))
            yield from (*(() if implied else ("", brackets.format(".".join(path)))), *_lines(row, path))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))
