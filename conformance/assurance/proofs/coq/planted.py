"""Errors planted in the model, or in its twins in Python, and which of three ways finds each.

The rows are data: planted.toml, or any file of its form. In the model (Coq) an error may be found by a theorem that no
longer holds, by a vector that the kernel computes otherwise, and by comparison: the extracted engine stands alone. In a
twin it may be found by z3's proofs over the source, by a published vector, and by comparison with the extracted engine.

`python -m conformance.assurance.proofs.coq.planted ENGINE ITEM FILE NUMBER` is started for a twin, in a copy of the
packages that has the error: it prints one line of JSON.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from conformance.assurance.item_vectors import ITEMS
from conformance.assurance.mutants.edits import replaced
from conformance.assurance.mutants.written import MUTANTS
from conformance.assurance.proofs.__main__ import source_claims
from conformance.assurance.proofs.coq.build import (
    FILES,
    HERE,
    MODEL,
    ProofFailure,
    affected,
    compile_all,
    compile_engine,
    fresh,
)
from conformance.assurance.proofs.coq.three_way import (
    Side,
    differences,
    extracted,
    in_reference,
    independent,
    questions,
)
from conformance.assurance.proofs.coq.vectors import check_vectors
from conformance.assurance.proofs.source import Code, NotUnderstood, decide
from conformance.checks.vector_checks import BOUNDED, problems
from conformance.engine.process import EngineFailure
from conformance.paths import ROOT
from conformance.vectors.files import published
from conformance.vectors.subject import STAGES
from spec.backend import resolve
from spec.errors import SpecError

ROWS = HERE / "planted.toml"
PACKAGES = ("spec", "reference", "accelerated", "conformance")
TWINS = frozenset({
    "CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-TRUNKS", "CC-TRUNK-IMPACT",
    "CC-BUDGET-FORMS", "CC-BUDGET", "CC-PROTECTED", "CC-CUT", "CC-ALLOCATE", "CC-KEEP-COUNT", "CC-DISSOLVE",
    "CC-DISSOLVE-D", "CC-NORMALISED-IMPACT", "CC-SCORE", "PO-TOP-UNITS", "PO-BEST-BLOCKS", "PO-WHOLE-SHARES",
    "PO-PYRAMID-BUDGET", "DV-COSINE", "DV-GREEDY",
})
"""Items of which every mutant must show in the comparison."""
INVISIBLE: Mapping[str, str] = {
    "CC_DISSOLVE_PROTECTED_FIRST": "the stage sorts the positions that it is given",
    "CC_BUDGET_FORMS_A_BOOL_IS_A_NUMBER": "the model reads text",
    "DV_COSINE_EPSILON_IN_THE_ROOT": "the model has the inner product, not the unit rows",
    "CC_NORMALISED_IMPACT_IN_SINGLE_PRECISION": "scores are compared on a grid, as libraries' logarithms differ",
}
QUESTIONS = 1000
NOTHING = "nothing"


@dataclass(frozen=True)
class Planted:
    """An error: the item that it makes wrong, what it is, its file, and the text that becomes another there.

    A file NAME.v is the model's, another one a path from the root.
    """

    item: str
    what: str
    file: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        return HERE / "model" / Path(self.file).name if self.in_model else ROOT / self.file

    @property
    def in_model(self) -> bool:
        return self.file.endswith(".v")

    def edit(self, path: Path) -> None:
        """Put the error into a copy of its file."""
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Found:
    """What finds an error, by way; empty where that way does not."""

    proof: str = ""
    vector: str = ""
    comparison: str = ""


def read_rows(path: Path) -> tuple[Planted, ...]:
    """The errors of a file.

    Raises:
        SpecError: where a row has other members than planted.toml's, or its old text does not occur once.
    """
    names = [field.name for field in fields(Planted)]
    rows = []
    for row in tomllib.loads(path.read_text(encoding="utf-8")).get("error", []):
        if sorted(row) != sorted(names):
            raise SpecError(path.name, row, f"each [[error]] must have {', '.join(names)} and nothing else")
        rows.append(found := Planted(**row))
        times = found.path.read_text(encoding="utf-8").count(found.old) if found.path.is_file() else 0
        if times != 1:
            raise SpecError(path.name, found.old, f"must occur once in {found.file}, not {times} times")
    return tuple(rows)


def _refused(check: Callable[[], object]) -> str:
    """The statement that Coq refuses while a check runs; empty where it refuses none."""
    try:
        check()
    except ProofFailure as failure:
        return failure.statement
    return ""


def _compared(program: Path, number: int) -> str:
    """The first question on which the extracted model stands alone, or how it fails."""
    engine, coq = extracted(program)
    try:
        sides = {"coq": coq, "independent": independent(), "reference": in_reference()}
        return next(differences(sides, questions(1, number)), "")
    except EngineFailure as failure:
        return failure.reason
    finally:
        engine.stop()


def found_by(error: Planted, compiled: Path, home: Path, number: int = QUESTIONS) -> Found:
    """What finds an error once it stands in a copy of what is compiled, or of the packages.

    Raises:
        ProofFailure: where the model with the error is no model: Coq refuses a definition.
    """
    shutil.rmtree(home, ignore_errors=True)
    return (_in_model if error.in_model else _in_twin)(error, compiled, home, number)


def _in_model(error: Planted, compiled: Path, home: Path, number: int) -> Found:
    shutil.copytree(compiled, home)
    error.edit(home / error.path.name)
    files = affected(home, error.path.stem, FILES)
    compile_all(home, tuple(name for name in files if name in MODEL))
    theorem = _refused(lambda: compile_all(home, tuple(name for name in files if name not in MODEL)))
    vector = _refused(lambda: check_vectors(home))
    try:
        program = compile_engine(home)
    except ProofFailure:  # its type is another one, so that engine.ml cannot ask it
        return Found(theorem, vector)
    return Found(theorem, vector, _compared(program, number))


def _in_twin(error: Planted, compiled: Path, home: Path, number: int) -> Found:
    """In a process of its own, which imports the copy; Numba's functions run as they are written there."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, home / package, ignore=shutil.ignore_patterns("__pycache__"))
    error.edit(home / error.file)
    module = "conformance.assurance.proofs.coq.planted"
    asked = [sys.executable, "-m", module, str(compiled / "engine"), error.item, error.file, str(number)]
    environment = {**os.environ, "PYTHONPATH": str(home), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(asked, cwd=home, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Found(comparison=f"the packages do not work: {complaint}")
    return Found(**json.loads(last))


def _row(error: Planted, compiled: Path, folder: Path) -> tuple[Planted, Found | str]:
    """What found an error; text where the error is none that could be planted."""
    home = folder / f"planted-{os.getpid()}"
    try:
        return error, found_by(error, compiled, home)
    except ProofFailure as failure:
        return error, f"Coq refuses the definition: {failure.statement}"


def _table(rows: Sequence[Planted], compiled: Path, folder: Path, jobs: int) -> Iterator[str]:
    """Print the table; the errors that nothing finds, and those that cannot be planted."""
    print("| file | item | error | proof | vector | comparison |\n| --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(jobs) as pool:
        for error, found in pool.map(partial(_row, compiled=compiled, folder=folder), rows):
            ways = [found] if isinstance(found, str) else [found.proof, found.vector, found.comparison]
            cells = " | ".join(way.replace("|", "\\|") or NOTHING for way in ways)
            print(f"| {error.file} | {error.item} | {error.what} | {cells} |", flush=True)
            if isinstance(found, str) or not any(ways):
                yield f"{error.file}: {error.what}"


def _mutants(compiled: Path) -> Iterator[str]:
    """The mutants of the model's items: extracted model, brute force and the wrong reference are asked."""
    engine, coq = extracted(compiled / "engine")
    third = independent()
    print("\n| item | error in the reference | comparison |\n| --- | --- | --- |")
    for mutant in MUTANTS.values():
        if mutant.item not in TWINS or mutant.beyond or mutant.name in INVISIBLE:
            continue
        with replaced(mutant.edit):
            sides: dict[str, Side] = {"coq": coq, "independent": third, "reference": in_reference()}
            found = next(differences(sides, questions(1, QUESTIONS)), NOTHING)
        print(f"| {mutant.item} | {mutant.why} | {found} |", flush=True)
        if not found.endswith(": reference stands alone"):
            yield mutant.name
    engine.stop()


def planted(files: Sequence[Path] = (), jobs: int | None = None) -> int:
    """Print what finds the errors of the files, of planted.toml and of the mutants if there are none; 1 where one
    is not found.

    Raises:
        SpecError: as `read_rows`.
    """
    rows = [row for path in files or [ROWS] for row in read_rows(path)]
    with TemporaryDirectory() as folder:
        compiled = Path(folder) / "compiled"
        fresh(compiled)
        compile_all(compiled)
        compile_engine(compiled)
        lost = [*_table(rows, compiled, Path(folder), jobs or os.cpu_count() or 1)]
        lost += [] if files else _mutants(compiled)
    print(f"coq: {'; '.join(lost) or 'none'} of the planted errors not found")
    return int(bool(lost))


def failing_lemmas() -> Iterator[str]:
    """Lemmas of z3's that the sources no longer have."""
    try:
        for claim in source_claims(Code()):
            if claim.true and decide(claim).surprising:
                yield f"{claim.item}: {claim.name}"
    except NotUnderstood as error:
        yield f"not understood: {error}"


def failing_vectors(item: str, backend: str = "numpy") -> Iterator[str]:
    """Published vectors of an item that the packages fail: of stages by a backend, of items by the reference."""
    for _, group, test in published():
        operation = group["operation"]
        if item not in test["items"]:
            continue
        run = partial(STAGES[operation], resolve(backend)) if operation in STAGES else ITEMS[operation]
        try:
            failed = bool(problems(group, test, run, BOUNDED, "float64"))
        except (Exception, pytest.fail.Exception):
            failed = True
        if failed:
            yield f"{operation} {test['tcId']}"


def _found_here(program: str, item: str, file: str, number: str) -> Found:
    """What finds the error of a twin that these packages have."""
    try:
        compared = _compared(Path(program), int(number))
    except Exception as error:
        compared = f"{type(error).__name__}: {error}"
    backend = "numba" if file.startswith("accelerated/numba_cpu") else "numpy"
    return Found(next(failing_lemmas(), ""), next(failing_vectors(item, backend), ""), compared)


if __name__ == "__main__":
    print(json.dumps(asdict(_found_here(*sys.argv[1:]))))
