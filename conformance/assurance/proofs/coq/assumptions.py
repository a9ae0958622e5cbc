"""What the theorems rest on: nothing, but for those over the reals, which rest on the axioms of Coq's Reals.

Three judges: `Print Assumptions` of every theorem, every line of which counts; `coqchk`, Coq's separate checker, over
the compiled files; and the sources, in which no command may switch off a check of the kernel.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from conformance.assurance.proofs.coq.build import FILES, HERE, run_coq
from conformance.assurance.proofs.coq.theorems import stated

__all__ = ["OVER_THE_REALS", "REALS", "assumed", "checked", "rests_on", "surprises", "unsafe"]

OVER_THE_REALS = ("Masking", "DecodingTheorems", "LimitTheorems", "RealCounterexamples", "Binary64Order")
REALS = frozenset({
    "ClassicalDedekindReals.sig_forall_dec", "ClassicalDedekindReals.sig_not_dec",
    "FunctionalExtensionality.functional_extensionality_dep", "Classical_Prop.classic",
})
"""The axioms of Coq's Reals: two choices on decidable predicates, equality of functions, and the excluded middle."""

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


def assumed(said: str) -> frozenset[str]:
    """What `Print Assumptions` prints: names of axioms, and as it is any line that says something else."""
    entries = [line for line in said.splitlines() if line.strip() and not line[0].isspace()]
    found = {line for line in entries if line != "Closed under the global context" and not _HEADING.fullmatch(line)}
    return frozenset(name[1] if (name := _AXIOM.fullmatch(line)) else line for line in found)


def rests_on(home: Path, module: str, names: list[str]) -> frozenset[str]:
    """What any of these theorems of a compiled file assumes."""
    pairs = "I" + "".join(f", @{name}" for name in names)
    text = f"From Kvspec Require Import {module}.\nDefinition all := ({pairs}).\nPrint Assumptions all.\n"
    (home / f"Assumptions{module}.v").write_text(text, encoding="utf-8")
    return assumed(run_coq(home, f"Assumptions{module}"))


def checked(home: Path, files: tuple[str, ...] = FILES) -> Iterator[str]:
    """What coqchk says against compiled files: axioms beside Coq's own, and whatever the kernel did not check."""
    named = [word for name in files for word in ("-norec", f"Kvspec.{name}")]
    asked = ["coqchk", "-silent", "-o", "-Q", ".", "Kvspec", *named]
    done = subprocess.run(asked, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = {title: {line.strip() for line in body.splitlines()} - {"", "<none>"}
             for title, body in _SECTION.findall(done.stdout)}
    if done.returncode or not found:
        yield f"coqchk: {done.stdout.strip()}"
    for title, entries in found.items():
        odd = {one for one in entries if not one.startswith("Coq.")} - {"Set is predicative"}
        if odd:
            yield f"coqchk: {title}: {', '.join(sorted(odd))}"


def unsafe(text: str) -> list[str]:
    """Commands in a source that assume something or switch off a check."""
    while (bare := _COMMENT.sub(" ", text)) != text:
        text = bare
    return [found[0].strip() for found in _UNSAFE.finditer(text)]


def surprises(home: Path) -> list[str]:
    """Whatever the three judges have to say of the compiled files."""
    names: dict[str, list[str]] = {}
    for path, _, name in stated(HERE / "proofs"):
        names.setdefault(path.stem, []).append(name)
    sources = {name: (home / f"{name}.v").read_text(encoding="utf-8") for name in FILES}
    return [
        *(f"{name}: {line}" for name, text in sources.items() for line in unsafe(text)),
        *_surprises(home, names), *checked(home),
    ]


def _surprises(home: Path, names: dict[str, list[str]]) -> Iterator[str]:
    for module, known in names.items():
        expected = REALS if module in OVER_THE_REALS else frozenset()
        found = rests_on(home, module, known)
        if found - expected:
            yield f"{module}: rests on {', '.join(sorted(found - expected))}"
