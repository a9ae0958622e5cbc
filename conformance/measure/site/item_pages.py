"""A page of an item: its text, its implementations side by side, and everything that checks it; and the index."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby

from conformance.assurance.trace import STAGES, stage_items
from conformance.measure.site.evidence import Evidence, Function, Marked
from conformance.paths import ROOT

__all__ = ["index", "linked", "page"]

TABS = {
    "Reference": ("spec", "reference"), "Numba": ("accelerated/numba_cpu",), "Triton": ("accelerated/triton_gpu",),
}
# The trace fails on an item of a stage without a function, unless it is taken from the host.
TAKEN_FROM_HOST = "the host's, which is Numba's where there is Numba, else the reference's"

# What an id is not made a link in: a block of code, a code span, a link.
_OPAQUE = re.compile(r"(^ *```.*?^ *```|`[^`]*`|\[[^\]]*\]\([^)]*\)|^#.*?$)", re.MULTILINE | re.DOTALL)
_ID = re.compile(r"\b[A-Z]{2}(?:-[A-Z0-9]+)+\b")
_RELATIVE = re.compile(r"\]\((?!\w+:|#)")


def linked(markdown: str, known: Mapping[str, Evidence], folder: str) -> str:
    """The text with a link from each id to its page in `folder`."""
    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}]({folder}{match[0]}.md)" if match[0] in known else match[0]

    parts = _OPAQUE.split(markdown)
    return "".join(part if i % 2 else _ID.sub(link, part) for i, part in enumerate(parts))


def page(one: Evidence, known: Mapping[str, Evidence]) -> str:
    """The page of one item, which stands in a folder beside the pages of spec/."""
    text = linked(_RELATIVE.sub("](../", one.text), known, "")
    parts = [
        f"# {one.item}", f"From [{one.page}](../{one.page}#{one.item.lower()}).", text.strip(), "## Implementations",
        *(tab(name, tops, one) for name, tops in TABS.items()), "## Checks", *checks(one),
    ]
    return "\n\n".join(parts) + "\n"


def tab(name: str, tops: tuple[str, ...], one: Evidence) -> str:
    """The functions below some folders, or why there is none."""
    found = [function for function in one.functions if function.path.startswith(tops)]
    served = stage_items((ROOT / STAGES).read_text(encoding="utf-8"))
    why = TAKEN_FROM_HOST if one.item in served else "no stage computes it, so it is the same for every backend"
    body = "\n\n".join(map(shown, found)) or f"None: {why}."
    return f'=== "{name}"\n\n' + textwrap.indent(body, "    ")


def shown(function: Function) -> str:
    return f"`{function.path}`: `{function.name}`\n\n````python\n{function.source}\n````"


def checks(one: Evidence) -> Iterator[str]:
    """Lists of what would fail if an implementation got the item wrong."""
    yield listed("Properties", "Hypothesis draws the inputs", map(test_line, filter(_is_drawn, one.tests)))
    yield listed("Tests", "", (test_line(test) for test in one.tests if not test.drawn))
    yield listed(
        "Mutants", "wrong readings, each of which the tests above kill",
        (mutant.why + (f" (wrong beyond {mutant.beyond})" if mutant.beyond else "") for mutant in one.mutants),
    )
    lemmas = [claim.name for claim in one.claims if claim.true]
    yield listed("Proofs", f"by z3; {len(one.claims) - len(lemmas)} false claims beside them are refuted", lemmas)
    yield listed("Theorems", "in Coq, about a model of the item", [f"`{a.name}` in `{a.file}`" for a in one.theorems])
    files = groupby(one.vectors, key=lambda vector: vector[0])
    yield listed("Vectors", "", (f"`{file}`, tcId {', '.join(case for _, case in cases)}" for file, cases in files))


def _is_drawn(test: Marked) -> bool:
    return test.drawn


def test_line(test: Marked) -> str:
    return f"`{test.name or 'a table of parameters'}` in `{test.path}`"


def listed(title: str, says: str, lines: Iterator[str] | list[str]) -> str:
    """A heading with its list, or with the word none."""
    body = "\n".join(f"- {line}" for line in lines)
    return f"### {title}\n\n" + ((f"{says[0].upper()}{says[1:]}.\n\n" if says else "") + body if body else "None.")


def index(known: Mapping[str, Evidence]) -> str:
    """All items, by the page that they stand on, with the number of functions, tests and mutants of each."""
    parts = [f"# Items\n\nThe {len(known)} items of the specification, each beside its implementations and checks."]
    for source, items in groupby(known.values(), key=lambda one: one.page):
        rows = [
            f"| [{one.item}]({one.item}.md) | {len(one.functions)} | {len(one.tests)} | {len(one.mutants)} |"
            f" {sum(claim.true for claim in one.claims)} | {len(one.vectors)} |" for one in items
        ]
        head = "| item | functions | tests | mutants | proofs | vectors |\n| --- | --- | --- | --- | --- | --- |"
        parts.append(f"## {source}\n\n{head}\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"
