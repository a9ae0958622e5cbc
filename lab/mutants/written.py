"""Written mutants: rows of `rows/*.toml`, one for each reading that the specification rejects.

The module also selects the tests of each mutant, and finds the mutants that have changed since the last accepted run.
"""

import ast
import hashlib
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.exceptions import items_marked
from conformance.paths import ROOT
from lab.mutants.edits import Edit, function_of, replace_code
from lab.mutants.worker import PROFILES, Trial, Verdict, file_of, judges_any_backend
from lab.trace import LOCK, read_lock
from spec.errors import SpecError

HERE = Path(__file__).resolve().parent
ROWS, TABLE, KILLED = HERE / "rows", HERE / "sizes.toml", HERE / "killed.lock"
EDITS = ("find", "start", "body")


@dataclass(frozen=True)
class WrittenMutant:
    """Mutant of the reference with an error in one item.

    Attributes:
        name: The item and the row's name, in capitals.
        item: The item whose tests must fail.
        why: The rejected reading, one sentence.
        edit: The error, as an edit of one function.
        beyond: The size up to which the mutant equals the reference. "" if there is no such size.
    """

    name: str
    item: str
    why: str
    edit: Edit
    beyond: str = ""

    def digest(self, lock: Mapping[str, str]) -> str:
        """Return a hash of the edited function without docstring, and of the accepted text of the item.

        A verdict is valid for one digest.
        """
        text = textwrap.dedent(self.edit.function())
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        words = ast.get_docstring(function, clean=False)
        subject = f"{self.edit.of} {text.replace(words, '', 1) if words else text} {lock.get(self.item)}"
        return hashlib.sha256(subject.encode()).hexdigest()[:12]


def read_rows(path: Path) -> list[WrittenMutant]:
    """Read the mutants of one file.

    Raises:
        SpecError: if a row has unknown fields, or does not have exactly one of `find`, `start` and `body`.
    """
    known = {"name", "item", "why", "beyond", *(field.name for field in fields(Edit))}
    result = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
        if unknown := sorted(set(row) - known):
            raise SpecError(f"{path.name}: {row['name']}", unknown, f"must be some of {', '.join(sorted(known))}")
        if sum(name in row for name in EDITS) != 1:
            raise SpecError(f"{path.name}: {row['name']}", sorted(row), f"must have one of {', '.join(EDITS)}")
        edit = Edit(**{field.name: row[field.name] for field in fields(Edit) if field.name in row})
        name = f"{row['item']}-{row['name']}".replace("-", "_").upper()
        result.append(WrittenMutant(name, row["item"], row["why"], edit, row.get("beyond", "")))
    return result


def sized_mutants() -> Iterator[WrittenMutant]:
    """Yield each mutant of the table: [kind, argument or value, axis, N, ...] of each function."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    for function in table["function"]:
        for kind, argument, axis, *sizes in function["mutants"]:
            for N in sizes:
                yield _mutant(function["item"], function["of"], kind, table["kind"][kind], argument, axis, N)


def _mutant(
    item: str, of: str, kind: str, template: Mapping[str, str], argument: str, axis: int, N: int,
) -> WrittenMutant:
    names = function_of(of).__code__.co_varnames[: function_of(of).__code__.co_argcount]
    cut = argument.split("+")  # arrays that are cut into blocks together
    before = ":, " * axis
    words: dict[str, Any] = {
        "a": cut[0], "axis": axis, "N": N, "before": before, "call": ", ".join(names),
        "cut": ", ".join(f"{name}[{before}at : at + {N}]" if name in cut else name for name in names),
    }
    form = "body" if "body" in template else "start"
    label = "_".join([item, of.rpartition(":")[2], kind, *cut, str(axis), str(N)]).replace("-", "_").replace(".", "_")
    sentence = template["why"].format(**words)
    edit = Edit(of, **{form: template[form].format(**words)})
    return WrittenMutant(label.upper(), item, f"{sentence[0].upper()}{sentence[1:]}.", edit, str(N))


_WRITTEN = [mutant for path in sorted(ROWS.glob("*.toml")) for mutant in read_rows(path)]
MUTANTS: dict[str, WrittenMutant] = {mutant.name: mutant for mutant in [*_WRITTEN, *sized_mutants()]}

# Folders whose tests do not test the reference, or that test this package.
OTHERS = (
    "tests/lab", "tests/conformance", "tests/accelerated/triton",
    "conformance/cache_suite", "conformance/policy_suite",
)
MODELS = "tests/models_integration/session"


def _tests() -> list[Path]:
    return [*(ROOT / "conformance").rglob("test_*.py"), *(ROOT / "tests").rglob("test_*.py")]


def judging_files() -> list[str]:
    """Return the test modules that may detect a mutant of the reference."""
    paths = (path.relative_to(ROOT).as_posix() for path in sorted(_tests()))
    return [path for path in paths if not path.startswith(OTHERS)]


def digests() -> dict[str, str]:
    """Return the digests of all mutants, computed with the accepted texts of the items."""
    lock = read_lock((ROOT / LOCK).read_text(encoding="ascii"))
    return {name: mutant.digest(lock) for name, mutant in MUTANTS.items()}


def changed() -> list[WrittenMutant]:
    """Return the mutants whose edited function or item has changed since the last accepted run."""
    accepted = _accepted()
    return [MUTANTS[name] for name, digest in digests().items() if accepted.get(name, ("",))[0] != digest]


def _accepted() -> dict[str, tuple[str, str]]:
    lines = (line.split(maxsplit=2) for line in KILLED.read_text(encoding="utf-8").splitlines())
    return {name: (digest, test) for name, digest, test in lines}


def accept(verdicts: Mapping[str, Verdict]) -> None:
    """Write the test that killed each mutant to killed.lock. Entries of mutants without a verdict stay unchanged."""
    result, now = {name: line for name, line in _accepted().items() if name in MUTANTS}, digests()
    result |= {name: (now[name], one.test) for name, one in verdicts.items() if one.killed}
    lines = (f"{name} {digest} {test}\n" for name, (digest, test) in sorted(result.items()))
    KILLED.write_text("".join(lines), encoding="utf-8")


def trials(mutants: Iterable[WrittenMutant]) -> list[Trial]:
    """Return a trial for each mutant: all tests of its item, beginning with the tests that run for any backend."""
    return [
        Trial(
            mutant.name, partial(_accepts, mutant.item), partial(_put, mutant.edit),
            partial(_rank, bool(mutant.beyond)), PROFILES[-1:] if mutant.beyond else PROFILES,
        )
        for mutant in mutants
    ]


def _accepts(name: str, item: pytest.Item) -> bool:
    return name in items_marked(item)


def _put(edit: Edit) -> None:
    replace_code(function_of(edit.of), edit.code())


def _rank(by_size: bool, item: pytest.Item) -> tuple[bool, bool, bool, bool]:
    """Return the sort key of a test: tests of models last.

    For a mutant that differs only above a size, tests of large inputs run first, and long prompts run last among them.
    """
    file = file_of(item)
    return (
        file.startswith(MODELS), ("/test_scale_" in file) != by_size, file.endswith("test_scale_prefill.py"),
        not judges_any_backend(item),
    )
