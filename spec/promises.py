"""Properties that the published policies guarantee. The only source is the table in policies.md."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from spec.policy import NOTHING_PROMISED, Promises

__all__ = ["field_of", "promise_table", "promises_of"]

PAGE = Path(__file__).with_name("policies.md")


@cache
def promise_table() -> Mapping[str, Mapping[str, str]]:
    """Return the table in policies.md by policy and column. Each cell is `yes`, `no: REASON` or `N/A: REASON`.

    If policies.md is missing, the result is {}.
    """
    if not PAGE.exists():
        return {}
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    start = next(at for at, cells in enumerate(lines) if cells[:2] == ["policy", "budget exact"])
    columns, table = lines[start][1:], {}
    for name, *cells in lines[start + 2 : lines.index([""], start)]:
        table[name] = dict(zip(columns, cells, strict=True))
    return table


def field_of(column: str) -> str:
    """Return the name of the `Promises` field that belongs to a column of the table."""
    return column.replace(" ", "_").replace("-", "_").lower()


def promises_of(name: str) -> Promises:
    """Return what a policy guarantees according to policies.md. A policy without a table row guarantees nothing."""
    row = promise_table().get(name)
    if row is None:
        return NOTHING_PROMISED
    return Promises(**{field_of(column): cell.partition(":")[0] for column, cell in row.items()})  # type: ignore[arg-type]
