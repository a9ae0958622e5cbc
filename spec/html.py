"""HTML of results in notebooks."""

from collections.abc import Mapping
from html import escape

__all__ = ["html_table"]


def html_table(title: str, values: Mapping[str, object]) -> str:
    """Return a table with a title and one line for each value. Text is escaped."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in values.items())
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"
