"""Trying a list of mutants, one after the other, each verdict stored as soon as it is known."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.assurance.mutants import results
from conformance.assurance.mutants.results import PROFILES, Result
from conformance.assurance.mutants.worker import Suite, collected

__all__ = ["Trial", "run"]


@dataclass(frozen=True)
class Trial:
    """A mutant and who judges it: what `patch` changes in a process, and which tests must notice."""

    key: str
    digest: str
    backend: str
    accepts: Callable[[pytest.Item], bool]
    patch: Callable[[], None]
    rank: Callable[[pytest.Item], Any] | None = None
    """Tests run in its order."""
    profiles: tuple[str, ...] = PROFILES
    by_assertion: bool = False
    """Whether only an assertion kills, and no other error."""

    def left(self, result: Result | None, profile: str) -> bool:
        """Whether it is still to be tried under a profile."""
        if profile not in self.profiles:
            return False
        if result is None:
            return True
        killed = result.outcome == "assertion" if self.by_assertion else result.killed
        return not killed and PROFILES.index(result.profile) < PROFILES.index(profile)


def run(root: Path, trials: Sequence[Trial], files: Sequence[str], folder: Path, *options: str) -> dict[str, Result]:
    """Try those without a verdict on their present text, and return the verdicts of all.

    All meet the cheap profile first; those that survive it then meet the other.

    Raises:
        NotJudged: when the suite cannot be run.
    """
    digests = {trial.key: trial.digest for trial in trials}
    before = results.read(folder, digests)
    left = sum(trial.left(before.get(trial.key), PROFILES[-1]) for trial in trials)
    print(f"mutants: {len(trials)} mutants, {len(trials) - left} tried before, {left} to try", flush=True)
    for profile in PROFILES:
        for backend in sorted({trial.backend for trial in trials}):
            done = results.read(folder, digests)
            todo = [one for one in trials if one.backend == backend and one.left(done.get(one.key), profile)]
            if todo:
                collected(root, files, backend, profile, lambda suite: _try(suite, todo, profile, folder), *options)  # noqa: B023
    return results.read(folder, digests)


def _try(suite: Suite, todo: Sequence[Trial], profile: str, folder: Path) -> None:
    for number, trial in enumerate(todo, 1):
        if trial.rank:
            suite.items.sort(key=trial.rank)
        found = suite.judge(trial.accepts, trial.patch)
        results.append(folder, Result(
            trial.key, trial.digest, found.outcome, profile, found.test, found.raised, found.ran,
            round(found.seconds, 2), found.any_backend,
        ))
        line = f"{number}/{len(todo)} {found.outcome:9} {found.seconds:6.1f} s  {trial.key}"
        print(f"{line}  {found.test.rpartition('/')[2]}", file=sys.__stdout__, flush=True)
