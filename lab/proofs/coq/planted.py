"""Errors planted in the model or in its Python twins, and the checks that detect each error.

The rows are data: planted.toml, or a file of the same form. These checks may detect an error in the model (Coq):

- a theorem, which no longer holds;
- a vector, for which the kernel computes a different value;
- the comparison, if only the extracted engine gives its answer.

These checks may detect an error in a twin: z3's proofs over the source, a published vector, and the comparison with the
extracted engine.

For a twin, `python -m lab.proofs.coq.planted ENGINE ITEM FILE NUMBER` is started in a copy of the
packages that has the error. It prints one line of JSON.
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

from conformance.checks.vector_checks import BOUNDED, problems
from conformance.engine.process import EngineFailure
from conformance.paths import ROOT
from conformance.vectors.files import published
from conformance.vectors.subject import STAGES
from lab.item_vectors import ITEMS
from lab.mutants.edits import replaced
from lab.mutants.written import MUTANTS
from lab.proofs.__main__ import source_claims
from lab.proofs.coq.build import FILES, HERE, MODEL, ProofFailure, affected, compile_all, compile_engine, fresh
from lab.proofs.coq.three_way import Side, differences, extracted, in_reference, independent, questions
from lab.proofs.coq.vectors import check_vectors
from lab.proofs.source import Code, NotUnderstood, decide
from spec.backend import resolve
from spec.errors import SpecError

ROWS = HERE / "planted.toml"
PACKAGES = ("spec", "reference", "accelerated", "conformance", "lab")
TWINS = frozenset({
    "CC-SENTENCES", "CC-INTERFACE", "CC-INTERFACE-EDGES", "CC-MERGE", "CC-SPLIT", "CC-TRUNKS", "CC-TRUNK-IMPACT",
    "CC-BUDGET-FORMS", "CC-BUDGET", "CC-PROTECTED", "CC-CUT", "CC-ALLOCATE", "CC-KEEP-COUNT", "CC-DISSOLVE",
    "CC-DISSOLVE-D", "CC-NORMALISED-IMPACT", "CC-SCORE", "PO-TOP-UNITS", "PO-BEST-BLOCKS", "PO-WHOLE-SHARES",
    "PO-PYRAMID-BUDGET", "DV-COSINE", "DV-GREEDY",
})
"""Items for which the comparison must detect every mutant."""
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
    """Error: the wrong item, a description, the file, and the text to replace in the file.

    A file NAME.v belongs to the model. Any other file is a path from the root.
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
        """Put the error into a copy of the file."""
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Detection:
    """Checks that detect an error, empty if a check does not detect it."""

    proof: str = ""
    vector: str = ""
    comparison: str = ""


def read_rows(path: Path) -> tuple[Planted, ...]:
    """Read the errors of a file.

    Raises:
        SpecError: if a row has wrong members, or if its old text does not occur exactly once.
    """
    names = [field.name for field in fields(Planted)]
    rows = []
    for row in tomllib.loads(path.read_text(encoding="utf-8")).get("error", []):
        if sorted(row) != sorted(names):
            raise SpecError(path.name, row, f"each [[error]] must have {', '.join(names)} and nothing else")
        rows.append(result := Planted(**row))
        times = result.path.read_text(encoding="utf-8").count(result.old) if result.path.is_file() else 0
        if times != 1:
            raise SpecError(path.name, result.old, f"must occur once in {result.file}, not {times} times")
    return tuple(rows)


def _refused(check: Callable[[], object]) -> str:
    """Return the statement that Coq rejects during a check, or "" if Coq accepts all."""
    try:
        check()
    except ProofFailure as failure:
        return failure.statement
    return ""


def _compared(program: Path, number: int) -> str:
    """Return the first question for which only the extracted model gives its answer, or its failure."""
    engine, coq = extracted(program)
    try:
        sides = {"coq": coq, "independent": independent(), "reference": in_reference()}
        return next(differences(sides, questions(1, number)), "")
    except EngineFailure as failure:
        return failure.reason
    finally:
        engine.stop()


def detection_of(error: Planted, compiled: Path, home: Path, number: int = QUESTIONS) -> Detection:
    """Plant an error in a copy of the compiled model or the packages, and return the checks that detect it.

    Raises:
        ProofFailure: if Coq rejects a definition, so that the model with the error is not a model.
    """
    shutil.rmtree(home, ignore_errors=True)
    return (_in_model if error.in_model else _in_twin)(error, compiled, home, number)


def _in_model(error: Planted, compiled: Path, home: Path, number: int) -> Detection:
    shutil.copytree(compiled, home)
    error.edit(home / error.path.name)
    files = affected(home, error.path.stem, FILES)
    compile_all(home, tuple(name for name in files if name in MODEL))
    theorem = _refused(lambda: compile_all(home, tuple(name for name in files if name not in MODEL)))
    vector = _refused(lambda: check_vectors(home))
    try:
        program = compile_engine(home)
    except ProofFailure:  # the error changes a type, so engine.ml cannot call the model
        return Detection(theorem, vector)
    return Detection(theorem, vector, _compared(program, number))


def _in_twin(error: Planted, compiled: Path, home: Path, number: int) -> Detection:
    """Run the checks in a separate process, which imports the copy. Numba's functions run there as plain Python."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, home / package, ignore=shutil.ignore_patterns("__pycache__"))
    error.edit(home / error.file)
    module = "lab.proofs.coq.planted"
    asked = [sys.executable, "-m", module, str(compiled / "engine"), error.item, error.file, str(number)]
    environment = {**os.environ, "PYTHONPATH": str(home), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(asked, cwd=home, env=environment, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Detection(comparison=f"the packages do not work: {complaint}")
    return Detection(**json.loads(last))


def _row(error: Planted, compiled: Path, folder: Path) -> tuple[Planted, Detection | str]:
    """Return the checks that detect an error, or a text if the error cannot be planted."""
    home = folder / f"planted-{os.getpid()}"
    try:
        return error, detection_of(error, compiled, home)
    except ProofFailure as failure:
        return error, f"Coq refuses the definition: {failure.statement}"


def _table(rows: Sequence[Planted], compiled: Path, folder: Path, jobs: int) -> Iterator[str]:
    """Print the table. Yield the errors that no check detects, and those that cannot be planted."""
    print("| file | item | error | proof | vector | comparison |\n| --- | --- | --- | --- | --- | --- |")
    with ProcessPoolExecutor(jobs) as pool:
        for error, result in pool.map(partial(_row, compiled=compiled, folder=folder), rows):
            ways = [result] if isinstance(result, str) else [result.proof, result.vector, result.comparison]
            cells = " | ".join(way.replace("|", "\\|") or NOTHING for way in ways)
            print(f"| {error.file} | {error.item} | {error.what} | {cells} |", flush=True)
            if isinstance(result, str) or not any(ways):
                yield f"{error.file}: {error.what}"


def _mutants(compiled: Path) -> Iterator[str]:
    """Compare the extracted model, the brute force and the mutated reference, for each mutant of the model's items.

    Yield the mutants that the comparison does not detect.
    """
    engine, coq = extracted(compiled / "engine")
    third = independent()
    print("\n| item | error in the reference | comparison |\n| --- | --- | --- |")
    for mutant in MUTANTS.values():
        if mutant.item not in TWINS or mutant.beyond or mutant.name in INVISIBLE:
            continue
        with replaced(mutant.edit):
            sides: dict[str, Side] = {"coq": coq, "independent": third, "reference": in_reference()}
            result = next(differences(sides, questions(1, QUESTIONS)), NOTHING)
        print(f"| {mutant.item} | {mutant.why} | {result} |", flush=True)
        if not result.endswith(": reference stands alone"):
            yield mutant.name
    engine.stop()


def planted(files: Sequence[Path] = (), jobs: int | None = None) -> int:
    """Plant the errors of the files, print which checks detect each error, and return 1 if one is not detected.

    Without files, plant the errors of planted.toml and the mutants.

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
    """Yield the lemmas of z3 that no longer hold for the sources."""
    try:
        for claim in source_claims(Code()):
            if claim.true and decide(claim).surprising:
                yield f"{claim.item}: {claim.name}"
    except NotUnderstood as error:
        yield f"not understood: {error}"


def failing_vectors(item: str, backend: str = "numpy") -> Iterator[str]:
    """Yield the published vectors of an item that fail: stages on a backend, items on the reference."""
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


def _detection_here(program: str, item: str, file: str, number: str) -> Detection:
    """Return the checks that detect the error of a twin in these packages."""
    try:
        compared = _compared(Path(program), int(number))
    except Exception as error:
        compared = f"{type(error).__name__}: {error}"
    backend = "numba" if file.startswith("accelerated/numba_cpu") else "numpy"
    return Detection(next(failing_lemmas(), ""), next(failing_vectors(item, backend), ""), compared)


if __name__ == "__main__":
    print(json.dumps(asdict(_detection_here(*sys.argv[1:]))))
