"""Compiling the model, its proofs and its engine into a folder."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from conformance.paths import ROOT

__all__ = [
    "BUILD", "ENGINE", "FILES", "HERE", "INSTALL", "MODEL", "ProofFailure", "affected", "compile_all", "compile_engine",
    "fresh", "missing", "run_coq",
]

HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "coq"
ENGINE = BUILD / "engine"
MODEL = (
    "Lists", "Trunks", "Dissolution", "Budgets", "Selection", "Blocks", "Score", "Diversity", "Compaction", "Attention",
)
PROOFS = (
    "ListFacts", "Ranks", "TrunkTheorems", "PassTheorems", "EdgeTheorems", "DissolutionTheorems", "KeptTheorems",
    "CountTheorems", "SelectionTheorems", "BlockTheorems", "GrammarTheorems", "BudgetTheorems", "ScoreTheorems",
    "DiversityTheorems", "CompactionTheorems", "Counterexamples", "Masking", "DecodingTheorems", "LimitTheorems",
    "RealCounterexamples", "Binary64Order",
)
FILES = (*MODEL, *PROOFS)
INSTALL = "apt install coq libcoq-flocq ocaml-nox ocaml-findlib libyojson-ocaml-dev libzarith-ocaml-dev"
TOOLS = ("coqc", "ocamlfind")
LIBRARIES = ("yojson", "zarith")
COQC = ("coqc", "-q", "-w", "-extraction", "-Q", ".", "Kvspec")
SECONDS = 900
"""For one file: an error that is planted may compute for ever."""

_PLACE = re.compile(r'File "\./(\w+)\.v", line (\d+)')
_REQUIRED = re.compile(r"^From Kvspec Require (?:Import|Export) ([\w ]+)\.$", re.MULTILINE)
_STATED = re.compile(r"^\s*(?:Theorem|Lemma|Instance|#\[global\] Instance) (\w+)", re.MULTILINE)


class ProofFailure(Exception):
    """A file that Coq does not accept: the file, the statement that failed, and what Coq says."""

    def __init__(self, file: str, statement: str, output: str) -> None:
        self.file, self.statement = file, statement
        super().__init__(f"{file}.v: {statement} does not hold\n{output}")


def missing() -> str:
    """What to install, in one line; empty where all is there."""
    gone = [tool for tool in TOOLS if shutil.which(tool) is None] or [name for name in LIBRARIES if not _library(name)]
    if not gone and not _flocq_is_there():
        gone = ["Flocq"]
    return f"{' and '.join(gone)} not found: {INSTALL}" if gone else ""


def _flocq_is_there() -> bool:
    where = subprocess.run(["coqc", "-where"], capture_output=True, text=True, check=True).stdout.strip()
    return Path(where, "user-contrib", "Flocq").is_dir()


def _library(name: str) -> bool:
    """Whether OCaml can link a library: a shared one alone, which Coq brings, has no archive."""
    home = subprocess.run(["ocamlfind", "query", name], capture_output=True, text=True, check=False).stdout.strip()
    return bool(home) and (Path(home) / f"{name}.cmxa").exists()


def fresh(home: Path) -> None:
    """All sources in a new folder."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for source in _sources():
        shutil.copy(source, home)


def affected(home: Path, name: str, files: tuple[str, ...] = FILES) -> tuple[str, ...]:
    """A file and those that require it, at any remove, in the order in which they are compiled."""
    found = [name]
    for other in files:
        lines = _REQUIRED.findall((home / f"{other}.v").read_text(encoding="utf-8"))
        if other != name and set(found) & set(" ".join(lines).split()):
            found.append(other)
    return tuple(found)


def _sources() -> Iterator[Path]:
    for folder in ("model", "proofs", "engine"):
        yield from sorted((HERE / folder).glob("*.v"))
        yield from sorted((HERE / folder).glob("*.ml"))


def run_coq(home: Path, name: str) -> str:
    """What Coq prints while it compiles a file.

    Raises:
        ProofFailure: where it does not accept the file.
    """
    asked = [*COQC, f"{name}.v"]
    try:
        done = subprocess.run(asked, cwd=home, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ProofFailure(name, name, f"nothing within {SECONDS} s") from None
    if done.returncode:
        raise ProofFailure(name, _failed(home, done.stderr, name), done.stderr)
    return done.stdout


def _failed(home: Path, output: str, name: str) -> str:
    """The last statement before the line that Coq complains about."""
    place = _PLACE.search(output)
    lines = (home / f"{name}.v").read_text(encoding="utf-8").splitlines()
    before = "\n".join(lines[: int(place[2]) if place else len(lines)])
    stated = _STATED.findall(before)
    return stated[-1] if stated else name


def compile_all(home: Path, files: tuple[str, ...] = FILES) -> None:
    """Compile files in the order given; the first that fails ends it.

    Raises:
        ProofFailure: as `run_coq`.
    """
    for name in files:
        run_coq(home, name)


def compile_engine(home: Path) -> Path:
    """The engine's program, from the compiled model.

    Raises:
        ProofFailure: where OCaml refuses it, as a planted error may change the type of what is extracted.
    """
    run_coq(home, "Extract")
    (home / "model.mli").unlink()
    flags = ["-O3", "-w", "-a", "-package", ",".join(LIBRARIES), "-linkpkg"]
    command = ["ocamlfind", "ocamlopt", *flags, "model.ml", "engine.ml", "-o", "engine"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise ProofFailure("Extract", "engine.ml", done.stderr)
    return home / "engine"
