"""Which tests judge a mutant: those marked with the items of the function that it is in.

A function's items are those of its docstring (`Implements:`); a backend's stages have those of the functions they
name. One without any takes the items of the functions that name it, in its module and else in those that import it,
and so on upwards. Where that ends nowhere (a policy's parts), the test modules judge it that import its module or
one that does. What is exported, or has none of all these, is judged by all items of its module, too.
`trials` are of mutants that operators make: the tests, and how the changed module is put into a process.
"""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from conformance.assurance import trace
from conformance.assurance.mutants.edits import replace_module
from conformance.assurance.mutants.operators import Signatures
from conformance.assurance.mutants.results import Trial
from conformance.assurance.mutants.sites import (
    Mutant,
    compiled,
    digest,
    known_signatures,
    module_name,
    source_files,
)
from conformance.assurance.mutants.worker import file_of
from conformance.exceptions import items_marked
from conformance.items import items_of

MODULE = "<module>"
OTHERS = (
    "conformance/measure", "conformance/own/conformance", "conformance/own/accelerated/triton",
    "conformance/own/models_integration/session",
)
# What may stand between a test module and the module that it judges.
BETWEEN = (
    "conformance/strategies", "conformance/vectors", "conformance/own/reference",
    "conformance/own/models_integration/archive",
)
Function = tuple[str, str]  # path, qualified name


@dataclass(frozen=True)
class Selection:
    """What runs against a mutant: the tests of some items and whole test modules, under a backend's name."""

    backend: str
    items: frozenset[str]
    files: frozenset[str]

    def takes(self, items: Set[str], file: str) -> bool:
        """Whether a test of these items, in this module, is among them."""
        return bool(self.items & items) or file in self.files


@dataclass
class _Code:
    """Items of functions, what each names, and who imports a module (or is a test module that does)."""

    items: dict[Function, set[str]] = field(default_factory=dict)
    names: dict[Function, set[str]] = field(default_factory=dict)
    exported: set[Function] = field(default_factory=set)
    importers: dict[str, set[str]] = field(default_factory=dict)

    def above(self, at: Function, named: set[str]) -> set[str]:
        """Items of those who name it, the nearest first; and what judges those on the way that have none."""
        reached, seen, on_the_way = self._namers(at[0], named), {at}, set[str]()
        while reached:
            items = set().union(*(self.items[one] for one in reached))
            on_the_way |= set().union(*(self.of_module(one) for one in reached if not self.items[one]))
            if items:
                return items | on_the_way
            seen |= reached
            above = (self._namers(path, {_plain_name(name)}) for path, name in reached if name != MODULE)
            reached = set().union(*above) - seen
        return on_the_way

    def _namers(self, path: str, names: set[str]) -> set[Function]:
        """Functions that name one of them: of the module, or if there is none, of those that import it."""
        found = {one for one, named in self.names.items() if named & names and _plain_name(one[1]) not in names}
        own = {one for one in found if one[0] == path}
        return own or {one for one in found if self._imports(one[0], path)}

    def _imports(self, path: str, other: str) -> bool:
        return module_name(path) in self.importers.get(module_name(other), set())

    def of_module(self, at: Function) -> set[str]:
        """For what a module exports without an item of its own, and its methods: all items of the module."""
        exported = (at[0], at[1].partition(".")[0]) in self.exported
        return set().union(*(items for (path, _), items in self.items.items() if path == at[0] and exported))

    def below(self, at: Function) -> set[str]:
        """Items of the functions that it names."""
        named = (one for one in self.items if _plain_name(one[1]) in self.names[at] and self._imports(at[0], one[0]))
        return set().union(*(self.items[one] for one in named))


@dataclass(frozen=True)
class Judges:
    """Finds the selection of a mutant."""

    code: _Code

    def of(self, mutant: Mutant) -> Selection:
        """The tests that must notice it."""
        at = (mutant.path, _listed(mutant, self.code))
        named = _assigned(mutant) if at[1] == MODULE else {_plain_name(at[1])}
        items = self.code.items[at] or self.code.above(at, named)
        files = set() if items else self._test_modules(mutant.module)
        if not self.code.items[at]:
            items = items | self.code.of_module(at)
        if not items and not files:
            items = set().union(*(found for (path, _), found in self.code.items.items() if path == mutant.path))
        return Selection(mutant.backend, frozenset(items), frozenset(files))

    def reach(self, mutant: Mutant) -> bool:
        """Whether an item of the specification, or a test module, stands above it: else nothing could kill it."""
        selection = self.of(mutant)
        return bool(selection.items or selection.files)

    def _test_modules(self, module: str) -> set[str]:
        reached, seen = {module}, set[str]()
        while reached:
            seen |= reached
            reached = set().union(*(self.code.importers.get(one, set()) for one in reached)) - seen
        return {one for one in seen if one.endswith(".py")}


def read_code(root: Path) -> Judges:
    """Read what is mutated, and who imports whom, up to the test modules."""
    code, tests = _Code(), set(test_modules(root))
    between = (path for folder in BETWEEN for path in sorted((root / folder).rglob("*.py")))
    for path in {*source_files(root), *tests, *between}:
        name = path.relative_to(root).as_posix()
        who = name if path in tests else module_name(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    code.importers.setdefault(module, set()).add(who)
    pages = [path.read_text(encoding="utf-8") for path in sorted((root / "spec").glob("*.md"))]
    known = {name for page in pages for name, _ in items_of(page)}
    for path in source_files(root):
        _read_module(code, known, path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    for at in code.items:
        if at[0].endswith("/backend.py"):
            code.items[at] = code.items[at] or code.below(at)
    return Judges(code)


def test_modules(root: Path) -> list[Path]:
    """The test modules that judge mutants; not those that run models or another backend, nor tests of the tools."""
    every = (root / "conformance").rglob("test_*.py")
    return sorted(path for path in every if not path.relative_to(root).as_posix().startswith(OTHERS))


def _read_module(code: _Code, known: set[str], path: str, source: str) -> None:
    tree = ast.parse(source)
    whole = {line for line in tree.body if not isinstance(line, ast.FunctionDef | ast.ClassDef)}
    code.exported |= {(path, name) for line in whole for name in _exported(line)}
    code.items[path, MODULE] = set()
    code.names[path, MODULE] = {name for line in whole for name in _named(line)}
    for name, node in _functions(tree):
        found = trace.implementations(ast.unparse(node))
        code.items[path, name] = {item for item, owner in found if owner == node.name} & known
        code.names[path, name] = _names_of(node)


def _exported(line: ast.stmt) -> list[str]:
    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__":
        return list(ast.literal_eval(line.value))
    return []


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def _named(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr


def _names_of(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Of a class without its methods, of a function without its parameters."""
    if isinstance(node, ast.ClassDef):
        return {name for line in node.body if not isinstance(line, ast.FunctionDef) for name in _named(line)}
    return set(_named(node)) - {argument.arg for argument in (*node.args.posonlyargs, *node.args.args)}


def _listed(mutant: Mutant, code: _Code) -> str:
    """The function that is listed: a nested one belongs to the one around it."""
    name = mutant.function
    while name != MODULE and (mutant.path, name) not in code.items:
        name = name.rpartition(".")[0]
    return name


def _plain_name(name: str) -> str:
    """What callers write: a special method is reached by its class."""
    owner, _, last = name.rpartition(".")
    return owner if last.startswith("__") else last


def _assigned(mutant: Mutant) -> set[str]:
    """Names that the mutated statement of a module gives, as far as its first line tells."""
    try:
        target = ast.parse(mutant.source.partition("=")[0].partition(":")[0].strip() or "_", mode="eval")
    except SyntaxError:  # a later line of a statement
        return set()
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def trials(root: Path, mutants: Sequence[Mutant], judges: Judges) -> list[Trial]:
    """Return what is tried of each: the tests of its function's items, with the changed module in the process."""
    known = known_signatures(root)
    sources = {mutant.path: (root / mutant.path).read_text(encoding="utf-8") for mutant in mutants}
    return [
        Trial(
            mutant.key, digest(sources[mutant.path]), mutant.backend, partial(_accepts, judges.of(mutant)),
            partial(_put, mutant, sources[mutant.path], known),
        )
        for mutant in mutants
    ]


def _accepts(selection: Selection, item: pytest.Item) -> bool:
    return selection.takes({*items_marked(item)}, file_of(item))


def _put(mutant: Mutant, source: str, known: Signatures) -> None:
    replace_module(mutant.module, compiled(mutant, source, known))
