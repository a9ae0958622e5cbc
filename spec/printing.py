"""Texts on a terminal: numbers with nouns, and texts of other people, such as names in rows and answers of engines."""

import os
import sys
from collections.abc import Sized
from unicodedata import category

__all__ = ["counted", "end_of_reader", "printable", "printable_lines", "short"]

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


def end_of_reader() -> int:
    """Discard further output after the reader of a pipe has ended, as in `| head`. Return the exit code of SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def counted(number: int | str, noun: str) -> str:
    """Return a number with a noun, such as "1 item" or "2 items"."""
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"


def short(value: object, longest: int = 80) -> str:
    """Return the repr of a value or the name of a function. A long repr becomes the type with the number of entries."""
    text: str = getattr(value, "__name__", None) or repr(value)
    if len(text) <= longest and "\n" not in text:
        return text
    entries = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"<{type(value).__name__}{entries}>"
