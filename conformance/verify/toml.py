"""TOML as it is written here; Python reads it and does not write it."""

import json
import re
from collections.abc import Mapping
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
    if isinstance(value, Mapping):
        return f"{{{', '.join(_lines(value))}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else str(value)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in table.items()]


def written(table: Mapping[str, Any]) -> str:
    """A table of texts, numbers, dates, lists and tables: what is below the first level stands on one line."""
    lines = _lines({name: value for name, value in table.items() if not isinstance(value, Mapping)})
    for name, value in table.items():
        lines += ["", f"[{_key(name)}]", *_lines(value)] if isinstance(value, Mapping) else []
    return "\n".join(lines) + "\n"
