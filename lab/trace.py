"""Check that every spec item is implemented, tested and mutated: `python -m lab.trace`.

The command prints a matrix of the items, and returns 1 if something is missing.

An item is a heading `### CC-NAME` in spec/*.md. Its normative text is everything up to `**Rationale**`. spec/items.lock
contains a hash of this text. The items are named in these places:

- The docstring of a function names its items (`Implements: CC-NAME`).
- A test names its items in its marker (`@pytest.mark.spec("CC-NAME")`).
- A vector has the field `items`, and a mutant has the field `item` in its row.
- The name of a Coq theorem begins with the item (`CC_NAME_balance`).

An item needs a function in the reference, a test, a vector and two mutants. If spec/implementing.md lists the item for
a stage, each backend in the tree needs a function too. After you have read a changed text again, update its hash with
`--accept CC-NAME` or `--accept all`.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from conformance.items import items_of
from conformance.paths import ROOT
from lab.proofs.coq.build import theorems

IMPLEMENTING = ("spec", "reference", "accelerated")
TESTING = ("conformance", "tests", "lab")
TRUSTED = ("spec", "reference")
BACKENDS = ("accelerated/numba_cpu", "accelerated/triton_gpu")
LOCK, STAGES = Path("spec", "items.lock"), Path("spec", "implementing.md")
THEOREMS = Path("lab", "proofs", "coq", "proofs")
MUTANTS = 2  # minimum for each item

# The stage that takes and returns arrays of the host, also in a device backend.
ON_HOST = {"best_tokens"}
DEVICES = ("accelerated/triton_gpu",)
TORCH = "accelerated/torch_device"
"""Folder of plain torch code. Triton uses its stages of policies. Its score functions are not required of a backend."""

_ID = re.compile(r"[A-Z]{2,3}(-[A-Z0-9]+)+")
_MARKED = re.compile(r"(?:pytest\.mark\.spec|Brute|Case)\(")
_IMPLEMENTS = re.compile(r"^[ \t]*Implements: (.+)$", re.MULTILINE)

Places = dict[str, list[str]]
Documented: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class Trace:
    """Contents of a tree: hashes of items, the lock, and the places that implement, test, show or mutate each item."""

    items: dict[str, str]
    lock: dict[str, str]
    functions: Places
    tests: Places
    vectors: Places
    mutants: Places
    backends: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    theorems: Places = field(default_factory=dict)
    served: frozenset[str] = frozenset()
    on_device: frozenset[str] = frozenset()

    def problems(self) -> list[str]:
        """Return all problems, one line each, sorted by item."""
        result = [f"{name}: defined twice" for name in self.repeated]
        for name, digest in self.items.items():
            if not any(place.startswith(TRUSTED) for place in self.functions.get(name, [])):
                result.append(f"{name}: no reference function")
            if name not in self.tests:
                result.append(f"{name}: no test")
            result += [f"{name}: no function in {backend}" for backend in self.backends if self.lacks(name, backend)]
            if name not in self.vectors:
                result.append(f"{name}: no vector")
            if len(self.mutants.get(name, [])) < MUTANTS:
                result.append(f"{name}: fewer than {MUTANTS} mutants")
            if name not in self.lock:
                result.append(f"{name}: not in {LOCK.as_posix()}; read it, then --accept {name}")
            elif self.lock[name] != digest:
                result.append(f"{name}: text changed; read it again, then --accept {name}")
        named = (
            ("implemented", self.functions), ("tested", self.tests), ("shown", self.vectors),
            ("mutated", self.mutants), ("proved", self.theorems),
        )
        for kind, places in named:
            for name in places.keys() - self.items.keys():
                result.append(f"{name}: unknown id, {kind} by {', '.join(places[name])}")
        result += [f"{name}: locked, but no item" for name in self.lock.keys() - self.items.keys()]
        return sorted(result)

    def lacks(self, name: str, backend: str) -> bool:
        """Return True if a stage uses the item, but the backend has no function that implements it."""
        if name not in (self.on_device if backend in DEVICES else self.served):
            return False
        homes = (backend, TORCH) if backend in DEVICES else (backend,)
        return not any(place.startswith(homes) for place in self.functions.get(name, []))

    def matrix(self) -> str:
        """Return a table with one row for each item.

        A row has the item, the hash, and the numbers of functions, tests, vectors, mutants and Coq theorems.
        """
        width = max(map(len, self.items), default=4)
        tops = (*TRUSTED, *self.backends)
        columns = [Path(top).name for top in tops] + ["tests", "vectors", "mutants", "theorems"]
        rows = [f"{'item':{width}}  {'hash':12}  " + "  ".join(columns)]
        for name, digest in self.items.items():
            places = self.functions.get(name, [])
            counts = [sum(place.startswith(top) for place in places) for top in tops]
            counts += [len(where.get(name, [])) for where in (self.tests, self.vectors, self.mutants, self.theorems)]
            cells = [
                f"{'N/A' if not count and top in self.backends and not self.lacks(name, top) else count:>{len(column)}}"
                for top, column, count in zip([*tops, "", "", "", ""], columns, counts, strict=True)
            ]
            rows.append(f"{name:{width}}  {digest}  " + "  ".join(cells))
        return "\n".join(rows)


def stage_items(page: str, left_out: Collection[str] = ()) -> frozenset[str]:
    """Return the items of all stages except `left_out`, from the table of spec/implementing.md.

    A backend that implements a family of stages must implement these items.
    """
    rows = re.findall(r"^\| \w+ \| `(\w+)` \| ([A-Z].*) \|$", page, re.MULTILINE)
    return frozenset(name for stage, row in rows if stage not in left_out for name in row.split(", "))


def normative_hash(text: str) -> str:
    """Return 12 hex digits of the sha256 of the text before `**Rationale**`. Runs of whitespace count as one space."""
    normative = " ".join(text.partition("**Rationale**")[0].split())
    return hashlib.sha256(normative.encode()).hexdigest()[:12]


def implementing(source: str) -> Iterator[tuple[str, Documented]]:
    """Yield each id of the `Implements:` lines in docstrings, and the node that has this docstring."""
    for node in ast.walk(ast.parse(source)) if "Implements:" in source else ():
        if isinstance(node, Documented):
            for line in _IMPLEMENTS.findall(ast.get_docstring(node) or ""):
                for name in line.split(","):
                    yield name.strip(), node


def implementations(source: str) -> Iterator[tuple[str, str]]:
    """Yield each id of the `Implements:` lines, and the name of the function, class or module."""
    for name, node in implementing(source):
        yield name, getattr(node, "name", "<module>")


def markers(source: str) -> Iterator[tuple[str, int]]:
    """Yield each literal id of `pytest.mark.spec("...", ...)`, and the line of the call.

    The calls `Brute("...", ...)` and `Case("...", ...)` make rows of tables of tests, so their ids count too.
    """
    for node in ast.walk(ast.parse(source)) if _MARKED.search(source) else ():
        if isinstance(node, ast.Call) and _MARKED.fullmatch(f"{ast.unparse(node.func)}("):
            for name in node.args:
                if isinstance(name, ast.Constant) and _ID.fullmatch(str(name.value)):
                    yield str(name.value), node.lineno


def mutated(text: str) -> Iterator[tuple[str, str]]:
    """Yield the item and the name of each mutant in a file of rows, without those that differ only above a size."""
    for row in tomllib.loads(text).get("mutant", []):
        if not row.get("beyond"):
            yield row["item"], row["name"]


def vector_items(text: str) -> Iterator[tuple[str, str]]:
    """Yield the item and the tcId of each vector in a file."""
    for group in json.loads(text).get("testGroups", []):
        for test in group["tests"]:
            for name in test["items"]:
                yield name, str(test["tcId"])


def read_lock(text: str) -> dict[str, str]:
    """Return the hashes by id. Each line of the lock is `id hash`."""
    return dict(line.split() for line in text.splitlines() if line.strip())


def read_tree(root: Path) -> Trace:
    """Read the specification, the code and the tests under `root`."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((root / "spec").glob("*.md"))]
    result = [item for page in pages for item in items_of(page)]
    names = [name for name, _ in result]
    proved: Places = {}
    for theorem in theorems(root / THEOREMS, names):
        proved.setdefault(theorem.item or theorem.name, []).append(f"{theorem.file}:{theorem.line}")
    lock = root / LOCK
    page = (root / STAGES).read_text(encoding="utf-8") if (root / STAGES).exists() else ""
    return Trace(
        {name: normative_hash(text) for name, text in result},
        read_lock(lock.read_text(encoding="ascii")) if lock.exists() else {},
        _places(root, (path for package in IMPLEMENTING for path in (root / package).rglob("*.py")), implementations),
        _places(root, (path for folder in TESTING for path in (root / folder).rglob("*.py")), markers),
        _places(root, (root / "spec" / "vectors").glob("*.json"), vector_items),
        _places(root, (root / "lab" / "mutants").rglob("*.toml"), mutated),
        tuple(backend for backend in BACKENDS if (root / backend).is_dir()),
        tuple(sorted({name for name in names if names.count(name) > 1})),
        proved,
        stage_items(page),
        stage_items(page, ON_HOST),
    )


def _places(root: Path, files: Iterable[Path], read: Callable[[str], Iterable[tuple[str, object]]]) -> Places:
    """Return the places of each id in the files, as `file:place`."""
    result: Places = {}
    for path in sorted(files):
        for name, place in read(path.read_text(encoding="utf-8")):
            result.setdefault(name, []).append(f"{path.relative_to(root).as_posix()}:{place}")
    return result


def accept(root: Path, wanted: list[str]) -> list[str]:
    """Write the hashes of the current texts of the wanted ids ("all": all ids) to the lock, and return the changes.

    Raises:
        KeyError: for an id that is neither an item nor in the lock.
    """
    trace = read_tree(root)
    known = trace.items.keys() | trace.lock.keys()
    names = known if wanted == ["all"] else set(wanted)
    if names - known:
        raise KeyError(", ".join(sorted(names - known)))
    lock, changes = dict(trace.lock), []
    for name in sorted(names):
        old, new = lock.pop(name, None), trace.items.get(name)
        if new:
            lock[name] = new
        if old != new:
            changes.append(f"{name}: {old or 'new'} -> {new or 'removed'}")
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(lock.items()))
    (root / LOCK).write_text(text, encoding="ascii")
    return changes


def main(arguments: list[str] | None = None, root: Path | None = None) -> int:
    """Print the matrix and the problems, or accept texts. Return 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="lab.trace", description=__doc__)
    parser.add_argument("--accept", nargs="+", metavar="ID", help="ids whose new text was read, or 'all'")
    wanted = parser.parse_args(arguments).accept
    root = root or ROOT
    if wanted:
        try:
            print("\n".join(accept(root, wanted)) or "trace: nothing has changed")
        except KeyError as unknown:
            parser.error(f"unknown id: {unknown.args[0]}")
        return 0
    trace = read_tree(root)
    problems = trace.problems()
    print(trace.matrix())
    print("\n".join(problems) or f"trace: {len(trace.items)} items, all implemented, tested, shown, mutated and read")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
