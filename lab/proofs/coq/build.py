"""Compilation of the model, its proofs and its engine, and the list of theorems with their assumptions."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.paths import ROOT

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
"""Time limit for one file, because a planted error may cause an endless computation."""

_PLACE = re.compile(r'File "\./(\w+)\.v", line (\d+)')
_REQUIRED = re.compile(r"^From Kvspec Require (?:Import|Export) ([\w ]+)\.$", re.MULTILINE)
_STATED = re.compile(r"^\s*(?:Theorem|Lemma|Instance|#\[global\] Instance) (\w+)", re.MULTILINE)


class ProofFailure(Exception):
    """Error if Coq does not accept a file, with the file, the failed statement, and the output of Coq."""

    def __init__(self, file: str, statement: str, output: str) -> None:
        self.file, self.statement = file, statement
        super().__init__(f"{file}.v: {statement} does not hold\n{output}")


def missing() -> str:
    """Return one line that names the missing programs and how to install them. Empty if nothing is missing."""
    gone = [tool for tool in TOOLS if shutil.which(tool) is None] or [name for name in LIBRARIES if not _library(name)]
    if not gone and not _flocq_is_there():
        gone = ["Flocq"]
    return f"{' and '.join(gone)} not found: {INSTALL}" if gone else ""


def _flocq_is_there() -> bool:
    where = subprocess.run(["coqc", "-where"], capture_output=True, text=True, check=True).stdout.strip()
    return Path(where, "user-contrib", "Flocq").is_dir()


def _library(name: str) -> bool:
    """Return True if OCaml can link a library. The shared libraries that come with Coq have no archive to link."""
    home = subprocess.run(["ocamlfind", "query", name], capture_output=True, text=True, check=False).stdout.strip()
    return bool(home) and (Path(home) / f"{name}.cmxa").exists()


def fresh(home: Path) -> None:
    """Copy all sources into a new folder."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for folder in ("model", "proofs", "engine"):
        for source in [*(HERE / folder).glob("*.v"), *(HERE / folder).glob("*.ml")]:
            shutil.copy(source, home)


def affected(home: Path, name: str, files: tuple[str, ...] = FILES) -> tuple[str, ...]:
    """Return a file and all files that require it, directly or indirectly, in the order of compilation."""
    result = [name]
    for other in files:
        lines = _REQUIRED.findall((home / f"{other}.v").read_text(encoding="utf-8"))
        if other != name and set(result) & set(" ".join(lines).split()):
            result.append(other)
    return tuple(result)


def run_coq(home: Path, name: str) -> str:
    """Compile a file, and return the output of Coq.

    Raises:
        ProofFailure: if Coq does not accept the file.
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
    """Return the last statement before the line of Coq's error."""
    place = _PLACE.search(output)
    lines = (home / f"{name}.v").read_text(encoding="utf-8").splitlines()
    before = "\n".join(lines[: int(place[2]) if place else len(lines)])
    stated = _STATED.findall(before)
    return stated[-1] if stated else name


def compile_all(home: Path, files: tuple[str, ...] = FILES) -> None:
    """Compile files in the given order, until one fails.

    Raises:
        ProofFailure: as `run_coq`.
    """
    for name in files:
        run_coq(home, name)


def compile_engine(home: Path) -> Path:
    """Compile the engine's program from the compiled model.

    Raises:
        ProofFailure: if OCaml rejects it, because a planted error may change the type of the extracted code.
    """
    run_coq(home, "Extract")
    (home / "model.mli").unlink()
    flags = ["-O3", "-w", "-a", "-package", ",".join(LIBRARIES), "-linkpkg"]
    command = ["ocamlfind", "ocamlopt", *flags, "model.ml", "engine.ml", "-o", "engine"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise ProofFailure("Extract", "engine.ml", done.stderr)
    return home / "engine"


_THEOREM = re.compile(r"^\s*Theorem ([A-Z]{2}_\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Theorem:
    """Theorem with item, name, file and line. The item is "" if the name begins with no item."""

    item: str
    name: str
    file: str
    line: int


def stated(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and name of each theorem whose name begins like an item."""
    for path in sorted(folder.glob("*.v")):
        text = path.read_text(encoding="utf-8")
        for match in _THEOREM.finditer(text):
            yield path, text.count("\n", 0, match.start(1)) + 1, match[1]


def theorems(folder: Path, items: Iterable[str]) -> Iterator[Theorem]:
    """Yield each theorem with the longest item that its name begins with."""
    longest = sorted(items, key=len, reverse=True)
    for path, line, name in stated(folder):
        item = next((item for item in longest if name.startswith(item.replace("-", "_") + "_")), "")
        yield Theorem(item, name, path.name, line)


OVER_THE_REALS = ("Masking", "DecodingTheorems", "LimitTheorems", "RealCounterexamples", "Binary64Order")
REALS = frozenset({
    "ClassicalDedekindReals.sig_forall_dec", "ClassicalDedekindReals.sig_not_dec",
    "FunctionalExtensionality.functional_extensionality_dep", "Classical_Prop.classic",
})
"""Axioms of Coq's Reals: two choices on decidable predicates, equality of functions, and the excluded middle."""

_AXIOM = re.compile(r"([\w.']+)(?: :.*)?")
_HEADING = re.compile(r"[A-Z][\w /()-]*:")
_UNSAFE = re.compile(
    r"^\s*(?:(?:Local|Global|#\[[^]]*\])\s+)*(?:Axioms?|Parameters?|Conjectures?|Admit Obligations|Load|"
    r"Declare ML Module|Add (?:Rec )?LoadPath|Primitive)\b.*"
    r"|\bAdmitted\b|\badmit\b|\bgive_up\b|\bbypass_check\b|\btype-in-type\b"
    r"|\b(?:Set|Unset)\s+(?:Guard|Positivity|Universe)\s+Checking\b|\bUnset\s+(?:Kernel|Universe)\b.*",
    re.MULTILINE,
)
_COMMENT = re.compile(r"\(\*(?:(?!\(\*|\*\)).)*\*\)", re.DOTALL)
_SECTION = re.compile(r"^\* ([^\n:]+):((?:[^\n]|\n(?!\*))*)", re.MULTILINE)


def assumed(text: str) -> frozenset[str]:
    """Return the names of the axioms in the output of `Print Assumptions`. Unknown lines are returned unchanged."""
    entries = [line for line in text.splitlines() if line.strip() and not line[0].isspace()]
    match = {line for line in entries if line != "Closed under the global context" and not _HEADING.fullmatch(line)}
    return frozenset(name[1] if (name := _AXIOM.fullmatch(line)) else line for line in match)


def rests_on(home: Path, module: str, names: list[str]) -> frozenset[str]:
    """Return the assumptions of these theorems of a compiled file."""
    pairs = "I" + "".join(f", @{name}" for name in names)
    text = f"From Kvspec Require Import {module}.\nDefinition all := ({pairs}).\nPrint Assumptions all.\n"
    (home / f"Assumptions{module}.v").write_text(text, encoding="utf-8")
    return assumed(run_coq(home, f"Assumptions{module}"))


def checked(home: Path, files: tuple[str, ...] = FILES) -> Iterator[str]:
    """Yield the objections of coqchk to compiled files.

    These are axioms that are not from Coq itself, and parts that the kernel did not check.
    """
    named = [word for name in files for word in ("-norec", f"Kvspec.{name}")]
    asked = ["coqchk", "-silent", "-o", "-Q", ".", "Kvspec", *named]
    done = subprocess.run(asked, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    result = {title: {line.strip() for line in body.splitlines()} - {"", "<none>"}
             for title, body in _SECTION.findall(done.stdout)}
    if done.returncode or not result:
        yield f"coqchk: {done.stdout.strip()}"
    for title, entries in result.items():
        odd = {one for one in entries if not one.startswith("Coq.")} - {"Set is predicative"}
        if odd:
            yield f"coqchk: {title}: {', '.join(sorted(odd))}"


def unsafe(text: str) -> list[str]:
    """Return the commands in a source that assume something or disable a check."""
    while (bare := _COMMENT.sub(" ", text)) != text:
        text = bare
    return [match[0].strip() for match in _UNSAFE.finditer(text)]


def surprises(home: Path) -> list[str]:
    """Return all problems of the compiled files, from three checks: the sources, `Print Assumptions` and coqchk."""
    names: dict[str, list[str]] = {}
    for path, _, name in stated(HERE / "proofs"):
        names.setdefault(path.stem, []).append(name)
    sources = {name: (home / f"{name}.v").read_text(encoding="utf-8") for name in FILES}
    result = [f"{name}: {line}" for name, text in sources.items() for line in unsafe(text)]
    for module, known in names.items():
        if odd := rests_on(home, module, known) - (REALS if module in OVER_THE_REALS else frozenset()):
            result.append(f"{module}: rests on {', '.join(sorted(odd))}")
    return [*result, *checked(home)]
