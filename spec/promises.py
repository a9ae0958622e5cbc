"""Promises of the published policies. The table in policies.md is the only source of these promises."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from spec.policy import NOTHING_PROMISED, Promises

__all__ = ["field_of", "promise_table", "promises_of"]

PAGE = Path(__file__).with_name("policies.md")


@cache
def promise_table() -> Mapping[str, Mapping[str, str]]:
    """Return `yes`, `no: REASON` or `N/A: REASON` by policy and column. If policies.md is missing, return {}."""
    if not PAGE.exists():
        return {}
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    start = next(at for at, cells in enumerate(lines) if cells[:2] == ["policy", "budget exact"])
    columns, found = lines[start][1:], {}
    for name, *cells in lines[start + 2 : lines.index([""], start)]:
        found[name] = dict(zip(columns, cells, strict=True))
    return found


def field_of(column: str) -> str:
    """Return the name of the `Promises` field that belongs to a column of the table."""
    return column.replace(" ", "_").replace("-", "_").lower()


def promises_of(name: str) -> Promises:
    """Return the promises in the row of a policy in the table. A policy without a row promises nothing."""
    row = promise_table().get(name)
    if row is None:
        return NOTHING_PROMISED
    return Promises(**{field_of(column): cell.partition(":")[0] for column, cell in row.items()})  # type: ignore[arg-type]
