"""Figures of the house: `python -m conformance.measure.house [MODULE.py ...]`, a table in Markdown, and what is in it.

- Files entered: see `house_runs`.
- Circles: sets of modules, or of rooms, that reach each other by imports, wherever an import stands: in functions and
  under TYPE_CHECKING too. A room is a folder right below the package; a module beside them is a room of its own.
- Methods of a class outside conformance and test files: functions and properties of its own body and of its mixins;
  no dunders, and no overrides of what a class of transformers defines. A mixin is a base of ours that is no kind of a
  transformers class itself: what RaggedLayer inherits of RetainedLayer, a layer by itself, is listed beside the count.
- Branches: if, conditional expression, for, while, except, case, each `for` of a comprehension, and each `and` or `or`
  (of three operands, two). They are counted in the modules of the session's room but its stopwatch; before there was
  such a room, in the nine modules that became it. Modules that are named on the command line are counted apart.
- Words as `wc -w` counts them, in Markdown files under version control.
- Lines of the Python files that [tool.hatch.build.targets.wheel] packs of those under version control.

`--fail` exits 1 on a circle, a class of more than 15 methods, or more than 3 modules at the top of models_integration.
"""

import argparse
import ast
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from conformance.measure.house_runs import SCENARIOS, entered
from spec.errors import BackendUnavailable

__all__ = ["branches", "circles", "main", "methods", "room_of"]

ROOT = Path(__file__).resolve().parents[2]
CODE = ("spec", "reference", "accelerated", "models_integration")
MOST_METHODS, MOST_AT_TOP = 15, 3
SESSION_WAS = (
    "session", "segments", "steps", "places", "later", "decoding", "generation", "inputs", "streams",
)

Graph: TypeAlias = dict[str, set[str]]


def tracked(*patterns: str) -> list[str]:
    """Files under version control that are there, as git's patterns select them."""
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True, text=True)
    return sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def modules_of(package: str) -> dict[str, Path]:
    """Dotted names of a package's modules, the package itself included, and their files."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_of(name: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """Which of these modules one of them imports, itself left out."""
    targets: set[str] = set()
    parts = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                targets.add(inner if inner in modules else source)
    return targets & modules.keys() - {name}


def room_of(module: str) -> str:
    """The folder right below the package, or the module that stands beside such folders."""
    return ".".join(module.split(".")[:2])


def by_room(graph: Graph) -> Graph:
    """The same imports between rooms."""
    rooms: Graph = {room_of(module): set() for module in graph}
    for module, targets in graph.items():
        rooms[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Sets of nodes, more than one, that reach each other: the strongly connected components."""
    reach = {node: _reached(graph, node) for node in graph}
    sets = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return sorted(sorted(circle) for circle in sets if len(circle) > 1)


def _reached(graph: Graph, start: str) -> set[str]:
    reached, todo = set[str](), [start]
    while todo:
        new = graph[todo.pop()] - reached
        reached |= new
        todo += new
    return reached


def branches(file: Path) -> int:
    """Branches of one module."""
    single = (
        ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.comprehension,
    )
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return sum(isinstance(node, single) for node in nodes) + operands


def session_modules() -> list[Path]:
    """The session's room, or the modules that became it."""
    package = ROOT / "models_integration"
    if not (package / "session").is_dir():
        return [package / f"{name}.py" for name in SESSION_WAS]
    return [file for file in sorted((package / "session").rglob("*.py")) if file.name != "stopwatch.py"]


def classes() -> Iterator[type]:
    """Classes outside conformance and test files; a module whose device is not here is left out, and named."""
    for package in CODE:
        for name, file in modules_of(package).items():
            if file.name == "__main__.py" or file.name.startswith("test_"):
                continue
            try:
                module = import_module(name)
            except BackendUnavailable:
                print(f"not counted, as its device is not here: {name}", file=sys.stderr)
                continue
            yield from (value for value in vars(module).values()
                        if inspect.isclass(value) and value.__module__ == name)


def _function(value: object) -> object:
    """What a property or a bound kind of method calls, without its decorators."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    return inspect.unwrap(value) if callable(value) else value


def _own_methods(owner: type) -> set[str]:
    """Names that the body of a class defines as functions or properties; what is generated has no file of ours."""
    names = set()
    for name, value in vars(owner).items():
        code = getattr(_function(value), "__code__", None)
        dunder = name.startswith("__") and name.endswith("__")
        if code is not None and code.co_filename.startswith(f"{ROOT}/") and not dunder:
            names.add(name)
    return names


def _is_from(owner: type, packages: Sequence[str]) -> bool:
    return owner.__module__.split(".")[0] in packages


def methods(owner: type) -> tuple[int, int]:
    """Methods of a class with its mixins, and with all its bases of ours."""
    theirs = [base for base in owner.__mro__ if _is_from(base, ("transformers",))]
    ours = [base for base in owner.__mro__ if _is_from(base, CODE)]
    mixins = [base for base in ours if not any(_is_from(above, ("transformers",)) for above in base.__mro__)]
    taken = {name for base in theirs for name in vars(base)}
    counted = [
        {name for base in bases for name in _own_methods(base)} - taken for bases in ([owner, *mixins], ours)
    ]
    return len(counted[0]), len(counted[1])


def wheel_files() -> list[str]:
    """Python files under version control that the wheel carries.

    Raises:
        ValueError: for an option of the wheel that this reading does not know.
    """
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    options = build["targets"]["wheel"]
    if unknown := (options.keys() | build.keys()) - {"packages", "exclude", "targets"}:
        raise ValueError(f"wheel options that house.py does not read: {', '.join(sorted(unknown))}")
    # Both take patterns of gitignore's form: -i lists what they exclude.
    excluded = [f"--exclude={pattern}" for each in (build, options) for pattern in each.get("exclude", [])]
    left_out = set(tracked("-c", "-i", *excluded)) if excluded else set()
    return [name for name in tracked(*options["packages"]) if name.endswith(".py") and name not in left_out]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


class Report:
    """The table's rows, and under each figure what is in it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []
        self.details: list[tuple[str, Sequence[str]]] = []

    def add(self, figure: str, value: int | str, aim: int | str = "", details: Sequence[str] = ()) -> None:
        self.rows.append((figure, str(value), str(aim)))
        self.details.append((figure, details))

    def __str__(self) -> str:
        rows = [("figure", "here", "at most"), ("---", "---:", "---:"), *self.rows]
        parts = ["\n".join(f"| {' | '.join(row)} |" for row in rows)]
        parts += [f"{figure}:\n" + "\n".join(f"- {line}" for line in lines) for figure, lines in self.details if lines]
        return "\n\n".join(parts)


def add_runs(report: Report) -> None:
    for name, (scenario, aim) in SCENARIOS.items():
        files = entered(scenario)
        report.add(f"files of models_integration entered by {name}", len(files), aim, [", ".join(files)])


def add_circles(report: Report) -> int:
    """Circles of both packages; how many there are."""
    total = 0
    for package in ("models_integration", "conformance"):
        modules = modules_of(package)
        graph = {name: imports_of(name, file, modules) for name, file in modules.items()}
        for kind, own in (("modules", graph), ("rooms", by_room(graph))):
            lines = [f"{len(circle)}: {', '.join(name.removeprefix(f'{package}.') for name in circle)}"
                     for circle in circles(own)]
            report.add(f"circles of {kind} in {package} ({len(own)} {kind})", len(lines), 0, lines)
            total += len(lines)
    return total


def add_methods(report: Report) -> int:
    """The classes with most methods; how many each of them has, the largest number."""
    counts = sorted(((*methods(owner), owner.__qualname__) for owner in set(classes())), reverse=True)
    lines = [
        f"{name}: {own}" + ("" if own == every else f"; {every} with what its bases of ours are by themselves")
        for own, every, name in counts if every > MOST_METHODS
    ]
    large = sum(own > MOST_METHODS for own, _, _ in counts)
    report.add(f"classes of more than {MOST_METHODS} methods", large, 0, lines)
    report.add("methods of the three largest classes", ", ".join(str(own) for own, _, _ in counts[:3]), MOST_METHODS)
    return counts[0][0]


def add_branches(report: Report, extra: Sequence[Path]) -> None:
    for figure, files, aim in (("the session's modules", session_modules(), "180"), ("modules named", extra, "")):
        counts = [(file.resolve().relative_to(ROOT).as_posix(), branches(file)) for file in files]
        if counts:
            lines = [f"{name}: {count}" for name, count in counts]
            report.add(f"branches of {figure}", sum(count for _, count in counts), aim, lines)


def add_sizes(report: Report) -> None:
    words = {name: len(_text(name).split()) for name in tracked("*.md")}
    outside = sum(count for name, count in words.items() if not name.startswith("spec/"))
    report.add("Markdown words outside spec/", outside, 11905)
    report.add("Markdown words", sum(words.values()))
    report.add("Python lines that the wheel carries", sum(_text(name).count("\n") for name in wheel_files()), 36000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if --fail is given and something is too much."""
    parser = argparse.ArgumentParser(prog="python -m conformance.measure.house", description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", type=Path, help="modules whose branches are counted apart")
    parser.add_argument("--fail", action="store_true", help="exit 1 on a circle, a large class, or a full top")
    options = parser.parse_args(arguments)
    report = Report()
    add_runs(report)
    circle_count = add_circles(report)
    top = [file.name for file in sorted((ROOT / "models_integration").glob("*.py")) if file.name != "__init__.py"]
    report.add("modules at the top of models_integration", len(top), MOST_AT_TOP, [", ".join(top)] if top else [])
    most = add_methods(report)
    add_branches(report, options.modules)
    add_sizes(report)
    print(report)
    return int(options.fail and bool(circle_count or most > MOST_METHODS or len(top) > MOST_AT_TOP))


if __name__ == "__main__":
    sys.exit(main())
