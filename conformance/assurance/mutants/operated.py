"""Trying the mutants that operators make: which tests judge each, and how it is put into a process."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from conformance.assurance.mutants.edits import replace_module
from conformance.assurance.mutants.items import Judges, Selection
from conformance.assurance.mutants.operators import Signatures
from conformance.assurance.mutants.results import Trial
from conformance.assurance.mutants.sites import Mutant, compiled, digest, known_signatures
from conformance.assurance.mutants.worker import file_of, marked


def trials(root: Path, mutants: Sequence[Mutant], judges: Judges) -> list[Trial]:
    """Return what is tried of each: the tests of its function's items, with the changed module in the process."""
    known = known_signatures(root)
    sources = {mutant.path: (root / mutant.path).read_text(encoding="utf-8") for mutant in mutants}
    return [
        Trial(
            mutant.key, digest(sources[mutant.path]), mutant.backend, partial(_accepts, judges.of(mutant)),
            partial(_put, mutant, sources[mutant.path], known),
        )
        for mutant in mutants
    ]


def _accepts(selection: Selection, item: pytest.Item) -> bool:
    return selection.takes(marked(item), file_of(item))


def _put(mutant: Mutant, source: str, known: Signatures) -> None:
    replace_module(mutant.module, compiled(mutant, source, known))
