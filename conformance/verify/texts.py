"""What a row of a certificate is about: an item, a column of policies, or `family: kind of kept sets` of caches."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from conformance.checks.promises import PROPERTIES
from conformance.items import items_of
from conformance.paths import SPEC

__all__ = ["COMPOSED", "PROMISES", "families", "families_of", "must"]

COMPOSED = "compositions"
"""Where items stand that no family has: doors and compositions, the same code for every engine, on its stages."""

PROMISES = "promises"
"""Where the columns of a policy stand."""
EVICTION = "say behind a compacted cache what the model says where the evicted tokens are masked."

_ROW = re.compile(r"^\| (\w+) \| `\w+` \| ((?:[A-Z]+-[A-Z0-9-]+(?:, )?)+) \|$", re.MULTILINE)
_MUST = re.compile(r"\*\*MUST\*\*(.*?)(?=\n\*\*|\Z)", re.DOTALL)
_SENTENCES = re.compile(r"(?<=[.;:])\s+(?=[A-Z`])")
_LONGEST = 240
_REFUSAL = re.compile(r"refus|SpecError")
_NOT_REFUSED = re.compile(r"refus|DID NOT RAISE")
"""In a sentence that asks for a refusal; in the name of a test of one, or in what it found."""


@cache
def families() -> dict[str, list[str]]:
    """The items of each stage family, from the table of spec/implementing.md."""
    found: dict[str, list[str]] = {}
    for family, names in _ROW.findall((SPEC / "implementing.md").read_text(encoding="utf-8")):
        items = found.setdefault(family, [])
        items += [name for name in names.split(", ") if name not in items]
    return found


def families_of(item: str) -> list[str]:
    """The stage families of an item, `promises` of a column, the model's family of kept sets."""
    if item in PROPERTIES:
        return [PROMISES]
    family, of_a_cache, _ = item.partition(": ")
    if of_a_cache:
        return [family]
    return [family for family, items in families().items() if item in items] or [COMPOSED]


@cache
def _texts() -> dict[str, str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted(SPEC.glob("*.md"))]
    return {name: text for page in pages for name, text in items_of(page)}


def must(item: str, row: Mapping[str, Any] | None = None) -> str:
    """What a row demands, on one line: an item by its first sentences, or by those on refusals if such a test fails."""
    if item in PROPERTIES or ": " in item:
        return PROPERTIES[item].says if item in PROPERTIES else EVICTION
    found = [_SENTENCES.split(" ".join(text.split())) for text in _MUST.findall(_texts().get(item, ""))]
    if not found:
        return ""
    if row and _NOT_REFUSED.search(f"{row.get('test')} {row.get('found')}"):
        refusals = [sentence for sentences in found for sentence in sentences if _REFUSAL.search(sentence)]
        found = [refusals, *found] if refusals else found
    text = " ".join(found[0][:2])
    return text if len(text) <= _LONGEST else found[0][0][:_LONGEST]
