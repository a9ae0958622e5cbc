"""Which tests judge a mutant: those marked with the items of the function that it is in.

A function's items are those of its docstring (`Implements:`); a backend's stages have those of the functions they
name. One without any takes the items of the functions that name it, in its module and else in its package, and so on
upwards. Where that ends nowhere (a policy's parts), the test modules judge it that import its module, or else those
that import a module that does; and where there is none, all items of its package.
"""

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

from conformance import trace
from conformance.mutation.mutants import SUBJECTS, Mutant, module_name, source_files

__all__ = ["Judges", "Selection", "read_code"]

MODULE = "<module>"
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
    """Of a package: items of its functions, and what each names."""

    items: dict[Function, set[str]] = field(default_factory=dict)
    names: dict[Function, set[str]] = field(default_factory=dict)

    def above(self, at: Function, named: set[str]) -> set[str]:
        """Items of those who name it, the nearest first."""
        reached, seen = self._namers(at[0], named), {at}
        while reached:
            items = set().union(*(self.items[one] for one in reached))
            if items:
                return items
            seen |= reached
            above = (self._namers(path, {_plain_name(name)}) for path, name in reached if name != MODULE)
            reached = set().union(*above) - seen
        return set()

    def _namers(self, path: str, names: set[str]) -> set[Function]:
        """Functions that name one of them: of the module, or if there is none, of the package."""
        found = {one for one, named in self.names.items() if named & names and _plain_name(one[1]) not in names}
        return {one for one in found if one[0] == path} or found

    def below(self, at: Function) -> set[str]:
        """Items of the functions that it names."""
        named = (one for one in self.items if _plain_name(one[1]) in self.names[at] and one[0] != at[0])
        return set().union(*(self.items[one] for one in named))


@dataclass(frozen=True)
class Judges:
    """Finds the selection of a mutant."""

    packages: dict[str, _Code]
    importers: dict[str, set[str]]  # of a module or test module's name, who imports it

    def of(self, mutant: Mutant) -> Selection:
        """The tests that must notice it."""
        folder = next(folder for folder in SUBJECTS if mutant.path.startswith(f"{folder}/"))
        code = self.packages[folder]
        at = (mutant.path, _listed(mutant, code))
        named = _assigned(mutant) if at[1] == MODULE else {_plain_name(at[1])}
        items = code.items[at] or code.above(at, named)
        files = set() if items else self._test_modules(mutant.module)
        if not items and not files:
            items = set().union(*code.items.values())
        return Selection(mutant.backend, frozenset(items), frozenset(files))

    def _test_modules(self, module: str) -> set[str]:
        reached, seen = {module}, set[str]()
        while reached:
            seen |= reached
            reached = set().union(*(self.importers.get(one, set()) for one in reached)) - seen
            tests = {one for one in reached if one.startswith("test_")}
            if tests:
                return tests
        return set()


def read_code(root: Path) -> Judges:
    """Read the mutated packages and who imports whom, up to the test modules."""
    packages = {}
    for folder in SUBJECTS:
        code = packages[folder] = _Code()
        paths = {path.relative_to(root).as_posix(): path for path in sorted((root / folder).rglob("*.py"))}
        for name, path in paths.items():
            _read_module(code, name, path.read_text(encoding="utf-8"))
        for at in code.items:
            if at[0].endswith("/backend.py"):
                code.items[at] = code.items[at] or code.below(at)
    importers: dict[str, set[str]] = {}
    for path in [*source_files(root), *sorted((root / "conformance").glob("test_*.py"))]:
        test = path.name.startswith("test_")
        who = path.name if test else module_name(path.relative_to(root).as_posix())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers.setdefault(module, set()).add(who)
    return Judges(packages, importers)


def _read_module(code: _Code, path: str, source: str) -> None:
    tree = ast.parse(source)
    whole = {line for line in tree.body if not isinstance(line, ast.FunctionDef | ast.ClassDef)}
    code.items[path, MODULE] = set()
    code.names[path, MODULE] = {name for line in whole for name in _named(line)}
    for name, node in _functions(tree):
        found = trace.implementations(ast.unparse(node))
        code.items[path, name] = {item for item, owner in found if owner == node.name}
        code.names[path, name] = _names_of(node)


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
    """Names that the mutated statement of a module gives."""
    target = ast.parse(mutant.source.partition("=")[0].partition(":")[0].strip() or "_", mode="eval")
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
