"""What a terminal shows of a verdict: the families, each failing item in a few lines, how to repeat it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.verify.certificate import CERTIFIED, scope
from conformance.verify.texts import COMPOSED, must
from conformance.verify.verdicts import ABSTAINED

__all__ = ["by_family", "headline", "summary"]

_LINES, _WIDTH, _MOST = 6, 150, 12


def headline(made: Mapping[str, Any]) -> str:
    """The verdict in a sentence."""
    who = " ".join(part for part in (made["subject"]["name"], made["subject"].get("version", "")) if part)
    on = scope(made)
    if made["verdict"] == CERTIFIED:
        return f"{who} conforms to kvspec {made['spec']} on {on}" + _excepted(made)
    undecided = len(made["undecided"])
    wrong = ", ".join([*made["failing"], *([f"{undecided} items not decided"] if undecided else [])])
    otherwise = "tests without an item fail" if made["counts"]["failed"] else "there was nothing to judge"
    return f"{who} does not conform to kvspec {made['spec']} on {on}: {wrong or otherwise}"


def _excepted(made: Mapping[str, Any]) -> str:
    number = sum(row["verdict"] == "excepted" for row in made["items"].values())
    return f", {number} item{'s' if number > 1 else ''} excepted" if number else ""


def by_family(made: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The items of each family, and of what is composed of them, with their rows; none of a family that is not there.

    An item of two families is judged on those that are there.
    """
    there, found = (*made["families"], COMPOSED), dict[str, dict[str, Mapping[str, Any]]]()
    for item, row in made["items"].items():
        for family in row["families"]:
            rows = found.setdefault(family, {})
            if family in there or row["verdict"] in ABSTAINED:
                rows[item] = row
    return found


def summary(made: Mapping[str, Any]) -> Iterator[str]:
    """The lines."""
    counts = made["counts"]
    yield f"{counts['passed']} tests passed, {counts['failed']} failed; {counts['examples']} examples"
    for family, items in by_family(made).items():
        verdicts = Counter(row["verdict"] for row in items.values())
        told = [f"{number} {verdict}" for verdict, number in sorted(verdicts.items())]
        yield f"  {family:13} {', '.join(told) or 'not offered'}"
    shown: dict[str, str] = {}
    for item in made["failing"][:_MOST]:
        yield from _failing(item, made["items"][item], shown)
    if len(made["failing"]) > _MOST:
        yield f"\n... and {len(made['failing']) - _MOST} more items"
    if made["unneeded_exceptions"]:
        yield f"\nexceptions no longer needed: {', '.join(made['unneeded_exceptions'])}"
    yield f"\n{headline(made)}"


def _failing(item: str, row: Mapping[str, Any], shown: dict[str, str]) -> Iterator[str]:
    yield f"\n{item} fails, in {row['failed']} of its {row['tests']} tests"
    first = shown.setdefault(row["test"], item)
    if first != item:
        yield f"  by the same test as {first}"
        return
    yield f"  MUST    {must(item)}"
    yield f"  test    {row['test']}"
    for name in ("input", "found"):
        if row[name]:
            yield f"  {name:7} " + "\n          ".join(_short(row[name]))
    yield f"  repeat  {row['repeat']}"


def _short(text: str) -> list[str]:
    lines = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]} ..." for line in text.splitlines()]
    return lines if len(lines) <= _LINES else [*lines[:_LINES], "..."]
