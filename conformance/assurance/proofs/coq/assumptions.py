"""What the theorems rest on: nothing, but for those over the reals, which rest on the axioms of Coq's Reals."""

import re
from collections.abc import Iterator
from pathlib import Path

from conformance.assurance.proofs.coq.build import HERE, run_coq
from conformance.assurance.proofs.coq.theorems import stated

__all__ = ["OVER_THE_REALS", "REALS", "rests_on", "surprises"]

OVER_THE_REALS = ("Masking", "DecodingTheorems", "LimitTheorems", "RealCounterexamples", "Binary64Order")
REALS = frozenset({
    "ClassicalDedekindReals.sig_forall_dec", "ClassicalDedekindReals.sig_not_dec",
    "FunctionalExtensionality.functional_extensionality_dep", "Classical_Prop.classic",
})
"""The axioms of Coq's Reals: two choices on decidable predicates, equality of functions, and the excluded middle."""

_AXIOM = re.compile(r"^([\w.]+)(?: :|$)", re.MULTILINE)


def rests_on(home: Path, module: str, names: list[str]) -> frozenset[str]:
    """The axioms that any of these theorems of a compiled file uses."""
    pairs = "I" + "".join(f", @{name}" for name in names)
    text = f"From Kvspec Require Import {module}.\nDefinition all := ({pairs}).\nPrint Assumptions all.\n"
    (home / f"Assumptions{module}.v").write_text(text, encoding="utf-8")
    said = run_coq(home, f"Assumptions{module}")
    if said.startswith("Closed under the global context"):
        return frozenset()
    return frozenset(_AXIOM.findall(said)) - {"Axioms"}


def surprises(home: Path) -> list[str]:
    """Files of which a theorem rests on more than it may, or which have none."""
    names: dict[str, list[str]] = {}
    for path, _, name in stated(HERE / "proofs"):
        names.setdefault(path.stem, []).append(name)
    return list(_surprises(home, names))


def _surprises(home: Path, names: dict[str, list[str]]) -> Iterator[str]:
    for module, known in names.items():
        expected = REALS if module in OVER_THE_REALS else frozenset()
        found = rests_on(home, module, known)
        if found - expected:
            yield f"{module}: rests on {', '.join(sorted(found - expected))}"
