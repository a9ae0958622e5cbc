"""Check the imports between packages and inside packages: `python -m lab.layers`.

The command reads every import and returns 1 if one is forbidden. `ALLOWED` lists the packages that each package may
import. `SUBPACKAGES` orders the parts of a package, and a part may import only parts before it. Circular imports are
forbidden. Imports that only annotations use count too.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from conformance.paths import ROOT

PACKAGES = (
    "spec", "reference", "accelerated", "models_integration", "experiments", "conformance", "kvspec", "tests", "lab",
)

# The packages that each package may import. Inside accelerated, triton_gpu may also import numba_cpu.
ALLOWED: dict[str, set[str]] = {
    "spec": set(),
    "reference": {"spec"},
    "accelerated": {"spec"},
    "models_integration": {"spec", "reference"},
    "experiments": {"spec", "reference", "models_integration"},
    "conformance": {"spec", "reference", "accelerated", "models_integration", "kvspec"},
    "kvspec": {"spec", "reference", "models_integration", "experiments", "conformance"},
    "tests": {*PACKAGES},
    "lab": {*PACKAGES},
}

# `import reference` must work with only NumPy and jaxtyping installed. Only tables.py may use pandera.
LIGHT = {"spec": {"numpy", "jaxtyping"}, "reference": {"numpy", "jaxtyping"}}
EXEMPT = {"spec/tables.py"}

# Modules that test any backend, including those of other projects, bottom to top. The rest is for this repository.
SUITE = (
    "paths", "items", "exceptions", "abstentions", "engine", "oracles", "tolerances", "strategies", "vectors",
    "methods", "checks", "calls", "plugin", "witness", "policy_suite", "suite", "verify",
)
SUITE_NEEDS = {"spec", "reference", "numpy", "pytest", "hypothesis", "jaxtyping"}

# The parts of a package, bottom to top: a part may import only the parts before it.
SUBPACKAGES: dict[str, tuple[str, ...]] = {
    "models_integration": (
        "model", "pocket", "cache", "attention", "session", "policies", "engines", "archive",
    ),
    "experiments": ("tasks", "studies"),
    "conformance": (*SUITE, "cache_suite", "server_suite"),
}
# Packages that export names for users and load them on first use. Modules inside the package must not import them.
PUBLIC_PACKAGES = {"models_integration"}
# What only the repository has: their folders may use each other, their modules not in circles.
LOOSE = {"tests", "lab"}


@dataclass(frozen=True)
class Module:
    """Module and the dotted names that it imports, each with a line number."""

    name: str
    source: str
    imports: tuple[tuple[int, str], ...]

    @property
    def package(self) -> str:
        """Name of the package that contains the module."""
        return self.name.partition(".")[0]


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of each import. The name of a relative import begins with dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{home}.{alias.name}") for alias in node.names)


def read_modules(root: Path) -> dict[str, Module]:
    """Return all modules of the packages under `root`, by dotted name."""
    result = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            source = path.relative_to(root)
            parts = source.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            result[name] = Module(name, source.as_posix(), tuple(imported_names(path.read_text(encoding="utf-8"))))
    return result


def subpackage_of(name: str) -> str:
    """Return the part of the package that contains a module: a folder, or a file at the top of the package."""
    return name.partition(".")[2].partition(".")[0]


def module_of(name: str, modules: Mapping[str, Module]) -> str | None:
    """Return the module of the tree that an imported name is or belongs to. None: the name is from outside the tree."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def package_refusal(module: Module, name: str) -> str | None:
    """Return the reason why the package of `module` must not import `name`, or None if it may."""
    package, top = module.package, name.partition(".")[0]
    if not top:
        return "an import names its module in full"
    if top in PACKAGES:
        if top != package and top not in ALLOWED[package]:
            return f"{package} must not import {top}"
        if name.startswith("accelerated.triton_gpu") and "numba_cpu" in module.source:
            return "numba_cpu must not import triton_gpu"
    elif package in LIGHT and module.source not in EXEMPT and top not in sys.stdlib_module_names | LIGHT[package]:
        return f"{package} needs NumPy and jaxtyping alone, not {top}"
    return None


def subpackage_refusal(module: Module, name: str, target: str | None) -> str | None:
    """Return the reason why the part of the package that contains `module` must not import `name`, or None if it may.

    Args:
        target: module of the tree that contains `name`. None: there is none.
    """
    package, subpackage, top = module.package, subpackage_of(module.name), name.partition(".")[0]
    if package == "conformance" and subpackage in SUITE and top != package:
        return None if top in SUITE_NEEDS | sys.stdlib_module_names else f"the suite must not import {top}"
    if target is None or top != package or package not in SUBPACKAGES or module.name in PUBLIC_PACKAGES:
        return None
    if target in PUBLIC_PACKAGES:
        return f"{package} is the users' door: inside, name the module"
    order, other = SUBPACKAGES[package], subpackage_of(target)
    if subpackage in order and other in order and order.index(subpackage) < order.index(other):
        return f"{package}.{subpackage} stands below {other} and must not import it"
    return None


def circles(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the cycles of a graph as `a -> b -> a`.

    If several cycles end with the same import, only one of them is yielded.
    """
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        try:
            TopologicalSorter({name: sorted(left[name]) for name in sorted(left)}).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]
            yield " -> ".join(circle)
            left[circle[-2]].discard(circle[-1])
        else:
            return


def circle_problems(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield the cycles of modules, and the cycles of the parts of packages without an order."""
    graph: dict[str, set[str]] = {}
    used: dict[str, set[str]] = {}
    for module in modules.values():
        targets = {module_of(name, modules) for _, name in module.imports} - {None, module.name}
        graph[module.name] = set() if module.name in PUBLIC_PACKAGES else {target for target in targets if target}
        here = f"{module.package}.{subpackage_of(module.name)}"
        for target in graph[module.name]:
            there = f"{modules[target].package}.{subpackage_of(target)}"
            if module.package == modules[target].package not in LOOSE | SUBPACKAGES.keys() and here != there:
                used.setdefault(here, set()).add(there)
    yield from (f"circle of modules: {circle}" for circle in circles(graph))
    yield from (f"circle of rooms: {circle}" for circle in circles(used))


def forbidden_imports(root: Path) -> list[str]:
    """Return one line for each forbidden import, as `file:line: reason`, followed by the circular imports."""
    modules = read_modules(root)
    problems = []
    for module in modules.values():
        subpackage = subpackage_of(module.name)
        if subpackage and module.package in SUBPACKAGES and subpackage not in SUBPACKAGES[module.package]:
            problems.append(f"{module.source}:1: {subpackage} is no room of {module.package}")
        for line, name in module.imports:
            reason = package_refusal(module, name) or subpackage_refusal(module, name, module_of(name, modules))
            if reason:
                problems.append(f"{module.source}:{line}: {reason}")
    return [*dict.fromkeys(problems), *circle_problems(modules)]


def main() -> int:
    """Print the forbidden imports of the checkout. Return 1 if there is one."""
    problems = forbidden_imports(ROOT)
    print("\n".join(problems) or "layers: every import is allowed")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
