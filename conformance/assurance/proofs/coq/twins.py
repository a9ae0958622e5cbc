"""What finds an error in a twin of the model, asked inside a copy of the packages that has it: `planted` starts this.

`python -m conformance.assurance.proofs.coq.twins ENGINE ITEM FILE NUMBER` prints one line of JSON.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from conformance.assurance.item_vectors.items import ITEMS
from conformance.assurance.proofs.__main__ import source_claims
from conformance.assurance.proofs.coq.planted import Found
from conformance.assurance.proofs.coq.questions import questions
from conformance.assurance.proofs.coq.three_way import differences, extracted, in_reference, independent
from conformance.assurance.proofs.source import Code, NotUnderstood, decide
from conformance.checks.vector_checks import BOUNDED, problems
from conformance.vectors.files import published
from conformance.vectors.subject import STAGES
from spec.backend import resolve


def proofs() -> Iterator[str]:
    """Lemmas of z3's that the sources no longer have."""
    try:
        for claim in source_claims(Code()):
            if claim.true and decide(claim).surprising:
                yield f"{claim.item}: {claim.name}"
    except NotUnderstood as error:
        yield f"not understood: {error}"


def vectors(item: str, backend: str = "numpy") -> Iterator[str]:
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


def main(arguments: list[str]) -> int:
    """Print what finds the error."""
    program, item, file, number = arguments
    engine, coq = extracted(Path(program))
    sides = {"coq": coq, "independent": independent(), "reference": in_reference()}
    try:
        compared = next(differences(sides, questions(1, int(number))), "")
    except Exception as error:
        compared = f"{type(error).__name__}: {error}"
    engine.stop()
    backend = "numba" if file.startswith("accelerated/numba_cpu") else "numpy"
    print(json.dumps(asdict(Found(next(proofs(), ""), next(vectors(item, backend), ""), compared))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
