"""Texts of other people, such as names in rows, certificates and answers of engines, on a terminal."""

from unicodedata import category

__all__ = ["printable", "printable_lines"]

_REPLACED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode: control characters, which can change the screen or type on the keyboard, format characters,
which can reverse the direction of writing, parts of characters, and separators of lines."""


def printable(text: str, longest: int | None = None) -> str:
    """Return a text on one line, without control characters of a terminal, and with at most `longest` characters."""
    return printable_lines(" ".join(text.split()))[:longest]


def printable_lines(text: str) -> str:
    """Return a text with "?" for each control character of a terminal. Line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join("?" if c not in "\n\t" and category(c) in _REPLACED else c for c in text)
