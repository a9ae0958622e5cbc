"""Trying the written mutants: which tests judge each, which have changed since the last accepted run, and the page."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import pytest

from conformance.assurance.mutants.edits import Edit, function_of, replace_code
from conformance.assurance.mutants.results import PROFILES, Result, Trial
from conformance.assurance.mutants.table import MUTANTS, WrittenMutant
from conformance.assurance.mutants.worker import file_of, judges_any_backend, marked
from conformance.assurance.trace import LOCK, read_lock
from conformance.paths import ROOT
from spec import SPEC_VERSION

KILLED = Path(__file__).resolve().parent / "killed.lock"
# Whose tests are not about the reference, or are about this package.
OTHERS = (
    "conformance/measure", "conformance/own/conformance", "conformance/own/accelerated/triton",
    "conformance/cache_suite", "conformance/policy_suite",
)
MODELS = "conformance/own/models_integration/session"


def judging_files() -> list[str]:
    """Return the test modules that may judge a mutant of the reference."""
    paths = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "conformance").rglob("test_*.py")))
    return [path for path in paths if not path.startswith(OTHERS)]


def digests() -> dict[str, str]:
    """Return the digest of each mutant, under the accepted texts of the items."""
    lock = read_lock((ROOT / LOCK).read_text(encoding="ascii"))
    return {name: mutant.digest(lock) for name, mutant in MUTANTS.items()}


def changed() -> list[WrittenMutant]:
    """Return the mutants whose edited function or item is not that of the last accepted run."""
    accepted = _accepted()
    return [MUTANTS[name] for name, digest in digests().items() if accepted.get(name, ("",))[0] != digest]


def _accepted() -> dict[str, tuple[str, str]]:
    lines = (line.split(maxsplit=2) for line in KILLED.read_text(encoding="utf-8").splitlines())
    return {name: (digest, test) for name, digest, test in lines}


def accept(verdicts: Mapping[str, Result]) -> None:
    """Write which test killed each mutant; those without a verdict stay as they were."""
    found = {name: line for name, line in _accepted().items() if name in MUTANTS}
    found |= {name: (one.digest, one.test) for name, one in verdicts.items() if one.outcome == "assertion"}
    lines = (f"{name} {digest} {test}\n" for name, (digest, test) in sorted(found.items()))
    KILLED.write_text("".join(lines), encoding="utf-8")


def trials(mutants: Iterable[WrittenMutant]) -> list[Trial]:
    """Return what is tried of each mutant: any test of its item, by any backend's tests first."""
    digest = digests()
    return [
        Trial(
            mutant.name, digest[mutant.name], "numpy", partial(_accepts, mutant.item), partial(_put, mutant.edit),
            partial(_rank, bool(mutant.beyond)), PROFILES[-1:] if mutant.beyond else PROFILES, by_assertion=True,
        )
        for mutant in mutants
    ]


def _accepts(name: str, item: pytest.Item) -> bool:
    return name in marked(item)


def _put(edit: Edit) -> None:
    replace_code(function_of(edit.of), edit.code())


def _rank(by_size: bool, item: pytest.Item) -> tuple[bool, bool, bool, bool]:
    """Models last; of a mutant by size the scale lane first, its long prompts after the others."""
    file = file_of(item)
    return (
        file.startswith(MODELS), ("/test_scale_" in file) != by_size, file.endswith("test_scale_prefill.py"),
        not judges_any_backend(item),
    )


def verdict_line(result: Result) -> str:
    """Return why a mutant is not killed: by no assertion of its item."""
    mutant = MUTANTS[result.key]
    return f"{result.key}: {result.outcome} {result.raised}\n    {mutant.edit.of}: {mutant.why}"


def page(verdicts: Sequence[Result], seconds: float) -> str:
    """Return the figures of a run of all, as a paragraph of docs/results."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "hypothesis", "pytest"))
    killed = [one for one in verdicts if one.outcome == "assertion"]
    by_any = sum(one.any_backend for one in killed)
    sized = sum(bool(MUTANTS[one.key].beyond) for one in verdicts)
    late = ", ".join(f"{number} by profile {name}" for name, number in Counter(one.profile for one in killed).items())
    return (
        f"{date.today()}, spec {SPEC_VERSION}, Python {python_version()}, {versions}, {os.cpu_count()} CPU cores.\n"
        f"{len(killed)} of {len(verdicts)} killed by an assertion of their item ({late}), {by_any} of them by a test"
        f" that judges any backend; {sized} are right up to a size. {seconds:.0f} s."
    )
