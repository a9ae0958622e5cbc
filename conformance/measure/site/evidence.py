"""What the repository has of each item of the specification: text, functions, tests, mutants, proofs, vectors."""

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from conformance.assurance.mutants.table import MUTANTS, WrittenMutant
from conformance.assurance.proofs.claims import Claim
from conformance.assurance.proofs.coq.build import HERE, Theorem, theorems
from conformance.assurance.proofs.report import source_claims
from conformance.assurance.proofs.source import Code
from conformance.assurance.trace import IMPLEMENTING, Documented, implementing, markers, vector_items
from conformance.items import items_of
from conformance.paths import ROOT, SPEC

__all__ = ["Evidence", "Function", "Marked", "gathered"]


@dataclass(frozen=True)
class Function:
    """A function (or class) that implements an item: its file, its name and its source text."""

    path: str
    name: str
    source: str


@dataclass(frozen=True)
class Marked:
    """A test of an item: its file and name; `drawn` says that Hypothesis draws its inputs."""

    path: str
    name: str
    drawn: bool


@dataclass(frozen=True)
class Evidence:
    """One item: the page of spec/ that it stands on, its text, and all that bears its id."""

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
    """All items of this checkout, in the order of their pages."""
    found = {
        item: Evidence(item, page.name, text)
        for page in sorted(SPEC.glob("*.md")) for item, text in items_of(page.read_text(encoding="utf-8"))
    }
    for path, source in sources(IMPLEMENTING):
        for item, node in implementing(source):
            found[item].functions.append(Function(path, *text_of(node, source)))
    for path, source in sources(["conformance"]):
        for item, test in marked(path, source):
            if item in found and test not in found[item].tests:
                found[item].tests.append(test)
    for mutant in MUTANTS.values():
        found[mutant.item].mutants.append(mutant)
    for claim in source_claims(Code()):
        found[claim.item].claims.append(claim)
    for theorem in theorems(HERE / "proofs", found):
        found[theorem.item].theorems.append(theorem)
    for file in sorted((SPEC / "vectors").glob("*.json")):
        for item, case in vector_items(file.read_text(encoding="utf-8")):
            found[item].vectors.append((file.name, case))
    return found


def sources(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Path from the root and text of each module."""
    for package in packages:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def text_of(node: Documented, source: str) -> tuple[str, str]:
    """Name and text, with decorators, at the left margin; of a module the whole."""
    if isinstance(node, ast.Module):
        return "the module", source
    return node.name, textwrap.dedent("\n".join(source.splitlines()[first_line(node) - 1 : node.end_lineno]))


def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def marked(path: str, source: str) -> Iterator[tuple[str, Marked]]:
    """Item and test of each marker; one that stands in a table of parameters goes with the module alone."""
    tests = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for item, line in markers(source):
        inside = (test for test in tests if first_line(test) <= line <= (test.end_lineno or 0))
        test = next(inside, None)
        decorators = test.decorator_list if test else []
        drawn = any(ast.unparse(decorator).startswith("given(") for decorator in decorators)
        yield item, Marked(path, test.name if test else "", drawn)
