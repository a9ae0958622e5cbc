"""A claim, and what z3 says of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import z3

from conformance.assurance.proofs.source import Term

OUTCOMES = {"unsat": "proved", "sat": "refuted"}
TIMEOUT_MS = 20_000
SMALL = (4, 12, 64)  # a counterexample is easier to read where its numbers are small


@dataclass(frozen=True)
class Claim:
    """A statement about the code that implements an item; `true` says what z3 is expected to find."""

    item: str
    name: str
    formula: Term
    true: bool = True


@dataclass(frozen=True)
class Verdict:
    """What came out: "proved", "refuted" or "unknown"."""

    claim: Claim
    outcome: str
    seconds: float
    counterexample: str = ""

    @property
    def surprising(self) -> bool:
        return self.outcome != ("proved" if self.claim.true else "refuted")

    def __str__(self) -> str:
        expected = "" if self.claim.true else "(false) "
        line = f"{self.outcome.upper()} {expected}{self.claim.item}: {self.claim.name} ({self.seconds * 1e3:.0f} ms)"
        return f"{line}\n    counterexample: {self.counterexample}" if self.counterexample else line


def decide(claim: Claim) -> Verdict:
    """Look for values for which the claim fails."""
    started = time.perf_counter()
    solver = z3.Solver()
    solver.set("timeout", TIMEOUT_MS)
    solver.add(z3.Not(claim.formula))
    answer = solver.check()
    outcome = OUTCOMES.get(str(answer), "unknown")
    shown = _readable_model(solver) if answer == z3.sat else ""
    return Verdict(claim, outcome, time.perf_counter() - started, shown)


def _readable_model(solver: z3.Solver) -> str:
    """The first model in a small box of integers, or else the one at hand."""
    model = solver.model()
    for limit in SMALL:
        solver.push()
        solver.add(*(z3.And(-limit <= x, x <= limit) for x in _integers(model)))
        found = solver.check() == z3.sat
        small = solver.model() if found else model
        solver.pop()
        if found:
            return _shown(small)
    return _shown(model)


def _integers(model: z3.ModelRef) -> Iterator[Term]:
    for declared in model.decls():
        if declared.arity() == 0 and declared.range() == z3.IntSort():
            yield declared()


def _shown(model: z3.ModelRef) -> str:
    constants = {str(d): model[d] for d in model.decls() if d.arity() == 0}
    return ", ".join(f"{name} = {constants[name]}" for name in sorted(constants))
