"""Selection of the tests that must detect a mutant: the tests marked with the items of the mutated function.

The items of a function come from its docstring (`Implements:`). A stage in a backend has the items of the functions
that it names. A function without items takes the items of the functions that name it: first those in the same module,
otherwise those in modules that import it. This is repeated upwards until items are found.

If no items are found, as for parts of a policy, the test modules that import the mutated module are selected,
directly or through other modules. An exported function without items, or code without items and test modules, is also
tested by all items of its module.

`trials` makes the trials of the mutants that operators make.
"""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from conformance.exceptions import items_marked
from conformance.items import items_of
from lab import trace
from lab.mutants.edits import replace_module
from lab.mutants.operators import Signatures
from lab.mutants.results import Trial
from lab.mutants.sites import (
    Mutant,
    compiled,
    digest,
    known_signatures,
    module_name,
    source_files,
)
from lab.mutants.worker import file_of

MODULE = "<module>"
OTHERS = (
    "tests/lab", "tests/conformance", "tests/accelerated/triton",
    "tests/models_integration/session",
)
# Folders through which a test module may import the mutated module.
BETWEEN = (
    "conformance/strategies", "conformance/vectors", "tests/reference",
    "tests/models_integration/archive",
)
Function = tuple[str, str]  # path, qualified name


@dataclass(frozen=True)
class Selection:
    """Tests that run against a mutant: the tests of some items and whole test modules, for one backend."""

    backend: str
    items: frozenset[str]
    files: frozenset[str]

    def takes(self, items: Set[str], file: str) -> bool:
        """Return True if a test of these items, in this file, is selected."""
        return bool(self.items & items) or file in self.files


@dataclass
class _Code:
    """Items of all functions, the names that each function uses, and the importers of each module.

    An importer is a module, or the path of a test module.
    """

    items: dict[Function, set[str]] = field(default_factory=dict)
    names: dict[Function, set[str]] = field(default_factory=dict)
    exported: set[Function] = field(default_factory=set)
    importers: dict[str, set[str]] = field(default_factory=dict)

    def above(self, at: Function, named: set[str]) -> set[str]:
        """Return the items of the nearest functions that use one of the names.

        Functions without items on the way there add the items of their module if they are exported.
        """
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
        """Return the functions of the module that use one of the names, otherwise those of modules that import it."""
        found = {one for one, named in self.names.items() if named & names and _plain_name(one[1]) not in names}
        own = {one for one in found if one[0] == path}
        return own or {one for one in found if self._imports(one[0], path)}

    def _imports(self, path: str, other: str) -> bool:
        return module_name(path) in self.importers.get(module_name(other), set())

    def of_module(self, at: Function) -> set[str]:
        """Return all items of the module if the function, or the class of the method, is exported."""
        exported = (at[0], at[1].partition(".")[0]) in self.exported
        return set().union(*(items for (path, _), items in self.items.items() if path == at[0] and exported))

    def below(self, at: Function) -> set[str]:
        """Return the items of the functions that this function names."""
        named = (one for one in self.items if _plain_name(one[1]) in self.names[at] and self._imports(at[0], one[0]))
        return set().union(*(self.items[one] for one in named))


@dataclass(frozen=True)
class Judges:
    """Selector of the tests for a mutant."""

    code: _Code

    def of(self, mutant: Mutant) -> Selection:
        """Return the tests that must detect the mutant."""
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
        """Return True if a spec item or a test module covers the mutant. Otherwise no test could kill it."""
        selection = self.of(mutant)
        return bool(selection.items or selection.files)

    def _test_modules(self, module: str) -> set[str]:
        reached, seen = {module}, set[str]()
        while reached:
            seen |= reached
            reached = set().union(*(self.code.importers.get(one, set()) for one in reached)) - seen
        return {one for one in seen if one.endswith(".py")}


def read_code(root: Path) -> Judges:
    """Read the mutated modules, and which modules import them, up to the test modules."""
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
    """Return the test modules that may detect mutants.

    Tests of models, of other backends and of the tools are left out.
    """
    every = [*(root / "conformance").rglob("test_*.py"), *(root / "tests").rglob("test_*.py")]
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
    """Return the names that a class uses outside its methods, or that a function uses besides its parameters."""
    if isinstance(node, ast.ClassDef):
        return {name for line in node.body if not isinstance(line, ast.FunctionDef) for name in _named(line)}
    return set(_named(node)) - {argument.arg for argument in (*node.args.posonlyargs, *node.args.args)}


def _listed(mutant: Mutant, code: _Code) -> str:
    """Return the listed function that contains the mutant. A nested function belongs to the function around it."""
    name = mutant.function
    while name != MODULE and (mutant.path, name) not in code.items:
        name = name.rpartition(".")[0]
    return name


def _plain_name(name: str) -> str:
    """Return the name that callers write. Callers reach a special method by the name of its class."""
    owner, _, last = name.rpartition(".")
    return owner if last.startswith("__") else last


def _assigned(mutant: Mutant) -> set[str]:
    """Return the names that the mutated statement of a module assigns, if its first line contains them."""
    try:
        target = ast.parse(mutant.source.partition("=")[0].partition(":")[0].strip() or "_", mode="eval")
    except SyntaxError:  # the line is not the first of its statement
        return set()
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def trials(root: Path, mutants: Sequence[Mutant], judges: Judges) -> list[Trial]:
    """Return a trial for each mutant: the tests of its items, and the changed module to put into the process."""
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
