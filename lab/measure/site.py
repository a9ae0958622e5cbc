"""Write the pages of the site, or check the built pages: `python -m lab.measure.site write build/docs`.

After the build, run `check site`. Each item of the specification has a page with its code, tests and other checks. An
index lists all items.
"""

import argparse
import ast
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from conformance.items import items_of
from conformance.paths import ROOT, SPEC
from lab.mutants.written import MUTANTS, WrittenMutant
from lab.proofs.__main__ import source_claims
from lab.proofs.coq.build import HERE, Theorem, theorems
from lab.proofs.source import Claim, Code
from lab.trace import (
    IMPLEMENTING,
    STAGES,
    Documented,
    implementing,
    markers,
    stage_items,
    vector_items,
)


@dataclass(frozen=True)
class Function:
    """Function (or class) that implements an item, with its file, name and source text."""

    path: str
    name: str
    source: str


@dataclass(frozen=True)
class Marked:
    """Test of an item, with file and name. `drawn` is True if Hypothesis draws the inputs."""

    path: str
    name: str
    drawn: bool


@dataclass(frozen=True)
class Evidence:
    """Item with its page of spec/, its text, and all code and checks that name it."""

    item: str
    page: str
    text: str
    functions: list[Function] = field(default_factory=list)
    tests: list[Marked] = field(default_factory=list)
    mutants: list[WrittenMutant] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    theorems: list[Theorem] = field(default_factory=list)
    vectors: list[tuple[str, str]] = field(default_factory=list)
    """Files and tcIds."""


def gathered() -> Mapping[str, Evidence]:
    """Return all items of this checkout, in the order of their pages."""
    result = {
        item: Evidence(item, page.name, text)
        for page in sorted(SPEC.glob("*.md")) for item, text in items_of(page.read_text(encoding="utf-8"))
    }
    for path, source in sources(IMPLEMENTING):
        for item, node in implementing(source):
            result[item].functions.append(Function(path, *text_of(node, source)))
    for path, source in sources(["conformance", "tests", "lab"]):
        for item, test in marked(path, source):
            if item in result and test not in result[item].tests:
                result[item].tests.append(test)
    for mutant in MUTANTS.values():
        result[mutant.item].mutants.append(mutant)
    for claim in source_claims(Code()):
        result[claim.item].claims.append(claim)
    for theorem in theorems(HERE / "proofs", result):
        result[theorem.item].theorems.append(theorem)
    for file in sorted((SPEC / "vectors").glob("*.json")):
        for item, case in vector_items(file.read_text(encoding="utf-8")):
            result[item].vectors.append((file.name, case))
    return result


def sources(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the path from the root and the text of each module."""
    for package in packages:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def text_of(node: Documented, source: str) -> tuple[str, str]:
    """Return name and unindented text of a function or class, with decorators. For a module, return the whole text."""
    if isinstance(node, ast.Module):
        return "the module", source
    return node.name, textwrap.dedent("\n".join(source.splitlines()[first_line(node) - 1 : node.end_lineno]))


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def marked(path: str, source: str) -> Iterator[tuple[str, Marked]]:
    """Yield item and test of each marker. A marker in a table of parameters has only the module."""
    result = list(markers(source))
    tests = [node for node in ast.walk(ast.parse(source)) if result and isinstance(node, ast.FunctionDef)]
    for item, line in result:
        inside = (test for test in tests if first_line(test) <= line <= (test.end_lineno or 0))
        test = next(inside, None)
        decorators = test.decorator_list if test else []
        drawn = any(ast.unparse(decorator).startswith("given(") for decorator in decorators)
        yield item, Marked(path, test.name if test else "", drawn)



TABS = {
    "Reference": ("spec", "reference"), "Numba": ("accelerated/numba_cpu",),
    "torch": ("accelerated/torch_device",), "Triton": ("accelerated/triton_gpu",),
}
# The trace fails on a stage's item without a function, unless the stage runs on the host.
TAKEN_FROM_HOST = "the host's, which is Numba's where there is Numba, else the reference's"

# Text in which ids do not become links: blocks of code, code spans, links and headings.
_OPAQUE = re.compile(r"(^ *```.*?^ *```|`[^`]*`|\[[^\]]*\]\([^)]*\)|^#.*?$)", re.MULTILINE | re.DOTALL)
_ID = re.compile(r"\b[A-Z]{2}(?:-[A-Z0-9]+)+\b")
_RELATIVE = re.compile(r"\]\((?!\w+:|#)")


def linked(markdown: str, known: Mapping[str, Evidence], folder: str) -> str:
    """Return the text with a link from each id to its page in `folder`."""
    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}]({folder}{match[0]}.md)" if match[0] in known else match[0]

    parts = _OPAQUE.split(markdown)
    return "".join(part if i % 2 else _ID.sub(link, part) for i, part in enumerate(parts))


def page(one: Evidence, known: Mapping[str, Evidence]) -> str:
    """Return the page of one item. It is in a folder next to the pages of spec/."""
    text = linked(_RELATIVE.sub("](../", one.text), known, "")
    parts = [
        f"# {one.item}", f"From [{one.page}](../{one.page}#{one.item.lower()}).", text.strip(), "## Implementations",
        *(tab(name, tops, one) for name, tops in TABS.items()), "## Checks", *checks(one),
    ]
    return "\n\n".join(parts) + "\n"


def tab(name: str, tops: tuple[str, ...], one: Evidence) -> str:
    """Return a tab with the functions below some folders, or with the reason why there is none."""
    result = [function for function in one.functions if function.path.startswith(tops)]
    served = stage_items((ROOT / STAGES).read_text(encoding="utf-8"))
    why = TAKEN_FROM_HOST if one.item in served else "no stage computes it, so it is the same for every backend"
    body = "\n\n".join(map(shown, result)) or f"None: {why}."
    return f'=== "{name}"\n\n' + textwrap.indent(body, "    ")


def shown(function: Function) -> str:
    return f"`{function.path}`: `{function.name}`\n\n````python\n{function.source}\n````"


def checks(one: Evidence) -> Iterator[str]:
    """Yield the lists of checks that fail if an implementation gets the item wrong."""
    yield listed("Properties", "Hypothesis draws the inputs", (test_line(test) for test in one.tests if test.drawn))
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


def test_line(test: Marked) -> str:
    return f"`{test.name or 'a table of parameters'}` in `{test.path}`"


def listed(title: str, says: str, lines: Iterator[str] | list[str]) -> str:
    """Return a heading with its list, or with the word "None"."""
    body = "\n".join(f"- {line}" for line in lines)
    return f"### {title}\n\n" + ((f"{says[0].upper()}{says[1:]}.\n\n" if says else "") + body if body else "None.")


def index(known: Mapping[str, Evidence]) -> str:
    """Return a page that lists all items by page, with the numbers of functions, tests, mutants, proofs and vectors."""
    parts = [f"# Items\n\nThe {len(known)} items of the specification, each beside its implementations and checks."]
    for source, items in groupby(known.values(), key=lambda one: one.page):
        rows = [
            f"| [{one.item}]({one.item}.md) | {len(one.functions)} | {len(one.tests)} | {len(one.mutants)} |"
            f" {sum(claim.true for claim in one.claims)} | {len(one.vectors)} |" for one in items
        ]
        head = "| item | functions | tests | mutants | proofs | vectors |\n| --- | --- | --- | --- | --- | --- |"
        parts.append(f"## {source}\n\n{head}\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


# The pages have the same paths as in the checkout, so that their links are valid.
SOURCES = ("*.md", "docs/**/*", "spec/*.md", "spec/vectors/README.md", "lab/proofs/coq/README.md",
           "lab/proofs/floats/README.md")
ITEMS = Path("spec", "items")

_HEADING = re.compile(r"^### ([A-Z]{2}(?:-[A-Z0-9]+)+)$", re.MULTILINE)
# Addresses that a browser fetches without a click.
_FETCHED = re.compile(r"<(?:script|img|iframe)[^>]* src=\"(https?:[^\"]+)|<link[^>]* href=\"(https?:[^\"]+)")


def write(out: Path) -> None:
    """Write the pages for the site: those of the checkout, with links to items, and a page for each item."""
    shutil.rmtree(out, ignore_errors=True)
    known = gathered()
    for source in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()):
        place = source.relative_to(ROOT)
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / place)
        if place.match("spec/*.md"):
            text = linked(source.read_text(encoding="utf-8"), known, "items/")
            text = _HEADING.sub(r"\g<0>\n\n[Implementations and checks](items/\1.md)", text)
            (out / place).write_text(text, encoding="utf-8")
    (out / ITEMS).mkdir()
    (out / ITEMS / "README.md").write_text(index(known), encoding="utf-8")
    for one in known.values():
        (out / ITEMS / f"{one.item}.md").write_text(page(one, known), encoding="utf-8")


def foreign(site: Path) -> Iterator[str]:
    """Yield each page that would fetch something from a different site, and the address."""
    for page in sorted(site.rglob("*.html")):
        for result in _FETCHED.findall(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(site)} fetches {''.join(result)}"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or check them. Return 1 if a built page needs a network."""
    parser = argparse.ArgumentParser(prog="lab.measure.site", description=__doc__)
    parser.add_argument("step", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.step == "write":
        write(options.folder)
        return 0
    result = list(foreign(options.folder))
    print("\n".join(result) or "site: no page needs a network")
    return int(bool(result))


if __name__ == "__main__":
    sys.exit(main())
