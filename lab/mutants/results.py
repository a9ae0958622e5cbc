"""Results of mutants as JSON lines, which a later run continues."""

import json
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.mutants.worker import Suite, collected

FILE = "results.jsonl"
PROFILES = ("dev", "ci")  # the cheaper profile first


@dataclass(frozen=True)
class Result:
    """Verdict on one mutant.

    Attributes:
        outcome: "assertion", "error" (a test raised a different error), "timeout" or "survived".
    """

    key: str
    digest: str
    outcome: str
    profile: str
    test: str
    raised: str
    ran: int
    seconds: float
    any_backend: bool = False

    @property
    def killed(self) -> bool:
        """True if an assertion failed. A different error does not kill a mutant."""
        return self.outcome == "assertion"


def append(folder: Path, result: Result) -> None:
    """Append one line to the file in the folder. Make the folder if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def read(folder: Path, digests: Mapping[str, str]) -> dict[str, Result]:
    """Return the last verdict on each mutant that still has this digest. Skip incomplete lines of a killed run."""
    results, path = {}, folder / FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if digests.get(result.key) == result.digest:
            results[result.key] = result
    return results


def forget(folder: Path, keys: Container[str]) -> None:
    """Remove the verdicts on the mutants with these keys, so that they are tried again."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    left = [line for line in lines if json.loads(line)["key"] not in keys]
    if lines:
        path.write_text("".join(left), encoding="utf-8")


@dataclass(frozen=True)
class Trial:
    """Mutant to try: `patch` puts it into a process, and `accepts` selects the tests that must detect it."""

    key: str
    digest: str
    accepts: Callable[[pytest.Item], bool]
    patch: Callable[[], None]
    rank: Callable[[pytest.Item], Any]
    """Sort key of the tests."""
    profiles: tuple[str, ...] = PROFILES

    def left(self, result: Result | None, profile: str) -> bool:
        """Return True if the mutant must still be tried under a profile."""
        if profile not in self.profiles:
            return False
        if result is None:
            return True
        return not result.killed and PROFILES.index(result.profile) < PROFILES.index(profile)


def run(root: Path, trials: Sequence[Trial], files: Sequence[str], folder: Path) -> dict[str, Result]:
    """Try the mutants without a verdict on their current text, and return the verdicts on all.

    All mutants are tried under the cheap profile first. The survivors are then tried under the other profile.

    Raises:
        NotJudged: if the suite cannot be run.
    """
    digests = {trial.key: trial.digest for trial in trials}
    before = read(folder, digests)
    left = sum(trial.left(before.get(trial.key), PROFILES[-1]) for trial in trials)
    print(f"mutants: {len(trials)} mutants, {len(trials) - left} tried before, {left} to try", flush=True)
    for profile in PROFILES:
        done = read(folder, digests)
        todo = [one for one in trials if one.left(done.get(one.key), profile)]
        if todo:
            collected(root, files, profile, lambda suite: _try(suite, todo, profile, folder))  # noqa: B023
    return read(folder, digests)


def _try(suite: Suite, todo: Sequence[Trial], profile: str, folder: Path) -> None:
    for number, trial in enumerate(todo, 1):
        suite.items.sort(key=trial.rank)
        result = suite.judge(trial.accepts, trial.patch)
        append(folder, Result(
            trial.key, trial.digest, result.outcome, profile, result.test, result.raised, result.ran,
            round(result.seconds, 2), result.any_backend,
        ))
        line = f"{number}/{len(todo)} {result.outcome:9} {result.seconds:6.1f} s  {trial.key}"
        print(f"{line}  {result.test.rpartition('/')[2]}", file=sys.__stdout__, flush=True)
