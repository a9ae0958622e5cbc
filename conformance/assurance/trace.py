"""Items, functions and tests, held together: `python -m conformance.assurance.trace` prints the matrix, fails on a gap.

An item is a heading `### CC-NAME` in spec/*.md. Its normative text is everything up to `**Rationale**`; spec/items.lock
holds a hash of it. A function names its items in its docstring (`Implements: CC-NAME`), a test in its marker
(`@pytest.mark.spec("CC-NAME")`), a vector in its `items`, a mutant in its row, a theorem of Coq by how its
name begins (`CC_NAME_balance`). An item needs a function in
the reference and, if spec/implementing.md has it in a stage, in each backend that is there; a test, a vector and two
mutants.
`--accept CC-NAME` or `--accept all` takes over a text that was read again.
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

from conformance.assurance.proofs.coq.build import theorems
from conformance.items import items_of
from conformance.paths import ROOT

IMPLEMENTING = ("spec", "reference", "accelerated")
TRUSTED = ("spec", "reference")
BACKENDS = ("accelerated/numba_cpu", "accelerated/triton_gpu")
LOCK, STAGES = Path("spec", "items.lock"), Path("spec", "implementing.md")
THEOREMS = Path("conformance", "assurance", "proofs", "coq", "proofs")
MUTANTS = 2  # of each item, at least

# Stages that a device backend takes from the host: their data is a few thousand trunks, tokens or scores.
# accelerated/triton_gpu/backend.py has the reasons.
ON_HOST = {
    "impact", "trunks", "graph", "score", "dissolve", "decay", "activation", "resonance", "hebbian", "segment_graph",
    "segment_crystallization", "diverse", "best_tokens",
}
DEVICES = ("accelerated/triton_gpu",)
TORCH = "accelerated/torch_device"
"""Plain torch: Triton takes its stages of policies, and it has twins of scores, which no other backend must have."""

_ID = re.compile(r"[A-Z]{2}(-[A-Z0-9]+)+")
_MARKED = re.compile(r"(?:pytest\.mark\.spec|Brute|Case)\(")
_IMPLEMENTS = re.compile(r"^[ \t]*Implements: (.+)$", re.MULTILINE)

Places = dict[str, list[str]]
Documented: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class Trace:
    """One reading of a tree: item hashes, the lock, and where each id is implemented and tested."""

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
        """Every reason to fail, one line each, by id."""
        found = [f"{name}: defined twice" for name in self.repeated]
        for name, digest in self.items.items():
            if not any(place.startswith(TRUSTED) for place in self.functions.get(name, [])):
                found.append(f"{name}: no reference function")
            if name not in self.tests:
                found.append(f"{name}: no test")
            found += [f"{name}: no function in {backend}" for backend in self.backends if self.lacks(name, backend)]
            if name not in self.vectors:
                found.append(f"{name}: no vector")
            if len(self.mutants.get(name, [])) < MUTANTS:
                found.append(f"{name}: fewer than {MUTANTS} mutants")
            if name not in self.lock:
                found.append(f"{name}: not in {LOCK.as_posix()}; read it, then --accept {name}")
            elif self.lock[name] != digest:
                found.append(f"{name}: text changed; read it again, then --accept {name}")
        named = (
            ("implemented", self.functions), ("tested", self.tests), ("shown", self.vectors),
            ("mutated", self.mutants), ("proved", self.theorems),
        )
        for kind, places in named:
            for name in places.keys() - self.items.keys():
                found.append(f"{name}: unknown id, {kind} by {', '.join(places[name])}")
        found += [f"{name}: locked, but no item" for name in self.lock.keys() - self.items.keys()]
        return sorted(found)

    def lacks(self, name: str, backend: str) -> bool:
        """Whether a backend has no function for an item that is a stage's."""
        if name not in (self.on_device if backend in DEVICES else self.served):
            return False
        homes = (backend, TORCH) if backend in DEVICES else (backend,)
        return not any(place.startswith(homes) for place in self.functions.get(name, []))

    def matrix(self) -> str:
        """A row per item: id, hash, then how many functions, tests, vectors, mutants and theorems of Coq it has."""
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
    """The items of the stages, from the table of spec/implementing.md: every backend that has a family serves them."""
    rows = re.findall(r"^\| \w+ \| `(\w+)` \| ([A-Z].*) \|$", page, re.MULTILINE)
    return frozenset(name for stage, row in rows if stage not in left_out for name in row.split(", "))


def normative_hash(text: str) -> str:
    """12 hex digits of the sha256 of the text before `**Rationale**`, with every run of whitespace as one space."""
    normative = " ".join(text.partition("**Rationale**")[0].split())
    return hashlib.sha256(normative.encode()).hexdigest()[:12]


def implementing(source: str) -> Iterator[tuple[str, Documented]]:
    """Each id of each `Implements:` line in a docstring, and what bears that docstring."""
    for node in ast.walk(ast.parse(source)) if "Implements:" in source else ():
        if isinstance(node, Documented):
            for line in _IMPLEMENTS.findall(ast.get_docstring(node) or ""):
                for name in line.split(","):
                    yield name.strip(), node


def implementations(source: str) -> Iterator[tuple[str, str]]:
    """Id and function (or class, or module) name of each `Implements:` line in a docstring."""
    for name, node in implementing(source):
        yield name, getattr(node, "name", "<module>")


def markers(source: str) -> Iterator[tuple[str, int]]:
    """Each literal id of each `pytest.mark.spec("...", ...)` and its line.

    `Brute("...", ...)` and `Case("...", ...)` are rows of common tests.
    """
    for node in ast.walk(ast.parse(source)) if _MARKED.search(source) else ():
        if isinstance(node, ast.Call) and _MARKED.fullmatch(f"{ast.unparse(node.func)}("):
            for name in node.args:
                if isinstance(name, ast.Constant) and _ID.fullmatch(str(name.value)):
                    yield str(name.value), node.lineno


def mutated(text: str) -> Iterator[tuple[str, str]]:
    """Item and name of each mutant of a file of rows that is wrong on small inputs too."""
    for row in tomllib.loads(text).get("mutant", []):
        if not row.get("beyond"):
            yield row["item"], row["name"]


def vector_items(text: str) -> Iterator[tuple[str, str]]:
    """Item and tcId of each vector of a file."""
    for group in json.loads(text).get("testGroups", []):
        for test in group["tests"]:
            for name in test["items"]:
                yield name, str(test["tcId"])


def read_lock(text: str) -> dict[str, str]:
    """Hash by id; one `id hash` per line."""
    return dict(line.split() for line in text.splitlines() if line.strip())


def read_tree(root: Path) -> Trace:
    """Read the specification, the code and the tests under `root`."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((root / "spec").glob("*.md"))]
    found = [item for page in pages for item in items_of(page)]
    names = [name for name, _ in found]
    proved: Places = {}
    for theorem in theorems(root / THEOREMS, names):
        proved.setdefault(theorem.item or theorem.name, []).append(f"{theorem.file}:{theorem.line}")
    lock = root / LOCK
    page = (root / STAGES).read_text(encoding="utf-8") if (root / STAGES).exists() else ""
    return Trace(
        {name: normative_hash(text) for name, text in found},
        read_lock(lock.read_text(encoding="ascii")) if lock.exists() else {},
        _places(root, (path for package in IMPLEMENTING for path in (root / package).rglob("*.py")), implementations),
        _places(root, (root / "conformance").rglob("*.py"), markers),
        _places(root, (root / "spec" / "vectors").glob("*.json"), vector_items),
        _places(root, (root / "conformance" / "assurance" / "mutants").rglob("*.toml"), mutated),
        tuple(backend for backend in BACKENDS if (root / backend).is_dir()),
        tuple(sorted({name for name in names if names.count(name) > 1})),
        proved,
        stage_items(page),
        stage_items(page, ON_HOST),
    )


def _places(root: Path, files: Iterable[Path], read: Callable[[str], Iterable[tuple[str, object]]]) -> Places:
    """Where the texts of files have each id, as `file:place`."""
    found: Places = {}
    for path in sorted(files):
        for name, place in read(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(f"{path.relative_to(root).as_posix()}:{place}")
    return found


def accept(root: Path, wanted: list[str]) -> list[str]:
    """Take over the present text of the wanted ids ("all": of every id) into the lock; say what changed.

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
    """Print the matrix and the problems (exit 1 if there is one), or accept texts."""
    parser = argparse.ArgumentParser(prog="conformance.assurance.trace", description=__doc__)
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
