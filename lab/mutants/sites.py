"""Mutants of a module, made from its syntax tree. The key of a mutant stays the same if lines move.

These parts are not mutated:

- docstrings, annotations and type aliases, imports, and `__all__`;
- decorators: without JIT they have no effect, and for records they only mean that the record is frozen;
- assertions, because they narrow types;
- `raise` statements, and the statements that make their messages.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from lab.mutants.operators import Place, Signatures, changes, signatures

# Mutated folders, and the backend for which their tests run.
SUBJECTS = {"reference": "numpy", "accelerated/numba_cpu": "numba"}


@dataclass(frozen=True)
class Mutant:
    """One change to one module."""

    path: str
    function: str  # "<module>" for code outside functions
    line: int
    column: int
    operator: str
    source: str  # the line without indent
    before: str
    after: str
    number: int  # index of the change in the order of the module
    twin: int  # index among the mutants of the module whose keys are otherwise equal

    @property
    def id(self) -> str:
        """Place and effect of the mutant, with line numbers."""
        return f"{self.path}:{self.line}:{self.column}:{self.operator}:{self.after}"

    @property
    def key(self) -> str:
        """Place and effect of the mutant, without line numbers."""
        again = f" #{self.twin}" if self.twin else ""
        return f"{self.path}::{self.function}: {self.source} [{self.operator}: {self.before} -> {self.after}]{again}"

    @property
    def change(self) -> tuple[int, str, str, str]:
        """Values that identify the mutant among the mutants of its module."""
        return self.number, self.operator, self.before, self.after

    @property
    def backend(self) -> str:
        """Name of the backend whose tests run."""
        return next(name for folder, name in SUBJECTS.items() if self.path.startswith(f"{folder}/"))

    @property
    def module(self) -> str:
        """Dotted name of the mutated module."""
        return module_name(self.path)


@dataclass(frozen=True)
class _Site:
    """Node of a syntax tree, and the place where a replacement goes."""

    node: ast.AST
    parent: ast.AST
    field: str
    at: int | None
    function: str
    place: Place

    def put(self, node: ast.AST) -> None:
        """Replace the node in the syntax tree."""
        if self.at is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.at] = node


def module_name(path: str) -> str:
    """Return the dotted name under which a file is imported."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def source_files(root: Path) -> list[Path]:
    """Return all modules that are mutated, including new files."""
    return [path for folder in SUBJECTS for path in sorted((root / folder).rglob("*.py"))]


def known_signatures(root: Path) -> Signatures:
    """Return the signatures of the mutated modules, and of the functions and records of `spec`."""
    files = [*sorted((root / "spec").rglob("*.py")), *source_files(root)]
    return signatures(ast.parse(path.read_text(encoding="utf-8")) for path in files)


def mutants_of(path: str, source: str, known: Signatures) -> list[Mutant]:
    """Return all mutants of a module, in the order of its syntax tree."""
    lines, found = source.splitlines(), []
    twins: dict[str, int] = {}
    for number, (site, operator, node) in enumerate(_numbered(ast.parse(source), known)):
        line, column = getattr(site.node, "lineno", 0), getattr(site.node, "col_offset", 0)
        if not line:  # a comprehension has no line number
            line, column = site.parent.lineno, site.parent.col_offset  # type: ignore[attr-defined]
        if isinstance(site.node, ast.Slice):
            line, column = site.parent.lineno, site.parent.col_offset  # type: ignore[attr-defined]
        mutant = Mutant(
            path, site.function, line, column, operator, lines[line - 1].strip(), _text(site.node), _text(node),
            number, 0,
        )
        if mutant.before == mutant.after:
            continue
        twin = twins[mutant.key] = twins.get(mutant.key, -1) + 1
        found.append(Mutant(**{**vars(mutant), "twin": twin}))
    return found


def mutants_of_tree(root: Path) -> list[Mutant]:
    """Return all mutants of all mutated modules."""
    known = known_signatures(root)
    paths = {path.relative_to(root).as_posix(): path for path in source_files(root)}
    return [m for name, path in paths.items() for m in mutants_of(name, path.read_text(encoding="utf-8"), known)]


def compiled(mutant: Mutant, source: str, known: Signatures) -> CodeType:
    """Return the code of the module with the change of the mutant."""
    tree = ast.parse(source)
    for number, (site, operator, node) in enumerate(_numbered(tree, known)):
        if (number, operator, _text(site.node), _text(node)) == mutant.change:
            site.put(ast.copy_location(node, site.node) if hasattr(site.node, "lineno") else node)
            return compile(ast.fix_missing_locations(tree), mutant.path, "exec")
    raise LookupError(f"{mutant.id} is not in the source any more")


def digest(source: str) -> str:
    """Return a hash of a module's text. A verdict is valid for one text."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _text(node: ast.AST) -> str:
    first = ast.unparse(node).splitlines()
    return first[0] if first else ""


def _numbered(tree: ast.Module, known: Signatures) -> Iterator[tuple[_Site, str, ast.AST]]:
    for site in list(_sites(tree, "<module>", Place(known, None))):
        for operator, node in changes(site.node, site.place):
            yield site, operator, node


def _sites(parent: ast.AST, function: str, place: Place) -> Iterator[_Site]:
    for field, value in ast.iter_fields(parent):
        if field in _SKIPPED_FIELDS.get(type(parent), ()):
            continue
        nodes: Iterable[tuple[int | None, object]] = enumerate(value) if isinstance(value, list) else [(None, value)]
        for at, node in nodes:
            if not isinstance(node, ast.AST) or _left_alone(node, parent):
                continue
            keyword = parent.arg if isinstance(parent, ast.keyword) else None
            here = Place(place.known, place.function, keyword)
            yield _Site(node, parent, field, at, function, here)
            if isinstance(node, ast.FunctionDef):
                yield from _sites(node, _inside(function, node.name), Place(place.known, node))
            elif isinstance(node, ast.ClassDef):
                yield from _sites(node, _inside(function, node.name), Place(place.known, None))
            else:
                yield from _sites(node, function, here)


_SKIPPED_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.FunctionDef: ("decorator_list", "returns"), ast.ClassDef: ("decorator_list", "bases", "keywords"),
    ast.arg: ("annotation",), ast.AnnAssign: ("annotation", "target"),
}


def _inside(function: str, name: str) -> str:
    return name if function == "<module>" else f"{function}.{name}"


def _left_alone(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Raise | ast.JoinedStr):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.ExceptHandler):
        return isinstance(node.body[-1], ast.Raise)
    if isinstance(node, ast.Assign):
        alias = isinstance(parent, ast.Module) and isinstance(node.value, ast.Subscript)
        return alias or ast.unparse(node.targets[0]) == "__all__"
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)


def _place(seed: int, mutant: Mutant) -> bytes:
    return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()


def sample(mutants: Iterable[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return at least `size` mutants, or all if there are fewer, stratified by module.

    The sample has at least one mutant of each function.
    """
    strata: dict[str, list[Mutant]] = {}
    for mutant in sorted(mutants, key=lambda one: _place(seed, one)):
        strata.setdefault(mutant.path, []).append(mutant)
    total = sum(map(len, strata.values()))
    chosen = []
    for path in sorted(strata):
        stratum = strata[path]
        share = -(-size * len(stratum) // total)
        first = {mutant.function: mutant for mutant in reversed(stratum)}.values()
        rest = [mutant for mutant in stratum if mutant not in first]
        chosen += [*first, *rest][: max(share, len(first))]
    return sorted(chosen, key=lambda one: _place(seed, one))
