"""Who may import whom: `python -m conformance.assurance.layers` reads every import and fails on a forbidden one."""

import ast
import sys
from pathlib import Path

from conformance.paths import ROOT

__all__ = ["ALLOWED", "forbidden_imports", "main"]

PACKAGES = ("spec", "reference", "accelerated", "conformance", "models_integration")

# The siblings that each package may import; inside accelerated, triton_gpu may also import numba_cpu.
ALLOWED: dict[str, set[str]] = {
    "spec": set(),
    "reference": {"spec"},
    "accelerated": {"spec"},
    "models_integration": {"spec", "reference"},
    "conformance": {"spec", "reference", "accelerated", "models_integration"},
}

# `import reference` must work with NumPy and jaxtyping alone; tables.py is the border where pandera is allowed.
LIGHT = {"spec": {"numpy", "jaxtyping"}, "reference": {"numpy", "jaxtyping"}}
EXEMPT = {"spec/tables.py"}


def imported_modules(source: str) -> list[tuple[int, str]]:
    """Line and dotted name of every absolute import in a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module))
    return found


def refusal(package: str, name: str, source: str) -> str | None:
    """Why `package` may not import `name` from the file `source`; None where it may."""
    top = name.partition(".")[0]
    if top in PACKAGES:
        if top != package and top not in ALLOWED[package]:
            return f"{package} must not import {top}"
        if name.startswith("accelerated.triton_gpu") and "numba_cpu" in source:
            return "numba_cpu must not import triton_gpu"
    elif package in LIGHT and source not in EXEMPT and top not in sys.stdlib_module_names | LIGHT[package]:
        return f"{package} needs NumPy and jaxtyping alone, not {top}"
    return None


def forbidden_imports(root: Path) -> list[str]:
    """One line per import that breaks the layering, as `file:line: reason`."""
    problems = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            source = path.relative_to(root).as_posix()
            for line, name in imported_modules(path.read_text(encoding="utf-8")):
                reason = refusal(package, name, source)
                if reason:
                    problems.append(f"{source}:{line}: {reason}")
    return problems


def main() -> int:
    """Print the forbidden imports of the checkout; 1 if there is one."""
    problems = forbidden_imports(ROOT)
    print("\n".join(problems) or "layers: every import is allowed")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
