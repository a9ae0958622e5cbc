"""Trying a list of mutants, one after the other, each verdict stored as soon as it is known."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

from conformance.assurance.mutation import results, worker
from conformance.assurance.mutation.items import Selection, read_code
from conformance.assurance.mutation.mutants import Mutant, compiled, known_signatures
from conformance.assurance.mutation.results import PROFILES, Result, digest

__all__ = ["NotJudged", "run"]

# Processor seconds that a test may spend: several times what the longest needs unmutated.
LIMITS = {"dev": 30.0, "ci": 90.0}
WHOLE = 20.0  # times as long for all tests together


class NotJudged(RuntimeError):
    """The suite could not be run: then no verdict means anything."""


@dataclass
class _Court:
    """Knows the suite. No test kills that has not passed on the unmutated code, under the same profile."""

    root: Path
    files: dict[str, set[str]]
    sound: dict[tuple[str, str, str], bool] = field(default_factory=dict)  # backend, profile, test
    failing: set[str] = field(default_factory=set)

    def trial(
        self, selection: Selection, profile: str, mutated: tuple[str, str, CodeType] | None, only: str | None = None,
    ) -> worker.Verdict:
        """One fork.

        Raises:
            NotJudged: when pytest did not get as far as tests, and no mutant is to blame.
        """
        files = set().union(*(self.files.get(item, set()) for item in selection.items), selection.files)
        limit = LIMITS[profile]
        try:
            found: worker.Verdict = worker.in_a_fork(
                lambda: worker.trial(
                    self.root, selection, sorted(files), profile, mutated, self.failing, limit, only
                ),
                WHOLE * limit,
            )
        except TimeoutError:
            return worker.Verdict("timeout", seconds=WHOLE * limit)
        if found.trouble:
            raise NotJudged(found.trouble)
        return found

    def passes(self, test: str, selection: Selection, profile: str) -> bool:
        """Whether a test (with "", all of the selection) passes where nothing is mutated.

        Raises:
            NotJudged: when the suite cannot be imported, or takes too long, unmutated.
        """
        asked = (selection.backend, profile, test or str(sorted(selection.items | selection.files)))
        if asked not in self.sound:
            verdict = self.trial(selection, profile, None, test or None)
            if verdict.test.startswith(worker.IMPORT) or (verdict.outcome == "timeout" and not verdict.test):
                raise NotJudged(f"unmutated, {profile}: {verdict.outcome} {verdict.test} {verdict.raised}")
            self.sound[asked] = verdict.outcome == "survived"
            if test and not self.sound[asked]:
                self.failing.add(test)
                print(f"fails unmutated under {profile}, so it judges nothing: {test}", flush=True)
        return self.sound[asked]

    def judge(self, selection: Selection, profile: str, mutated: tuple[str, str, CodeType]) -> worker.Verdict:
        """The verdict on one mutant, by tests that pass without it."""
        verdict = self.trial(selection, profile, mutated)
        if verdict.outcome == "survived":
            return verdict
        by_a_test = bool(verdict.test) and not verdict.test.startswith(worker.IMPORT)
        if self.passes(verdict.test if by_a_test else "", selection, profile) or not by_a_test:
            return verdict
        return self.judge(selection, profile, mutated)


def run(root: Path, mutants: list[Mutant], folder: Path, again: bool) -> None:
    """Try those without a verdict on their module's present text; with `again`, only those that survived.

    All meet the cheap profile first; those that survive it then meet the other.

    Raises:
        NotJudged: when the suite cannot be run.
    """
    done = results.read(root, folder)
    if again:
        mutants = [mutant for mutant in mutants if mutant.key in done and not done[mutant.key].killed]
        done = {}
    left = [mutant for mutant in mutants if not _judged(done.get(mutant.key), PROFILES[-1])]
    print(f"mutation: {len(mutants)} mutants, {len(mutants) - len(left)} tried before, {len(left)} to try", flush=True)
    if not left:
        return
    # Every fork imports the suite; its rewritten assertions are compiled once, whatever the environment says.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str((folder / "bytecode").resolve())
    judges, known = read_code(root), known_signatures(root)
    found: worker.Survey = worker.in_a_fork(lambda: worker.survey(root), 600.0)
    worker.preload(found.third_party)
    gc.freeze()
    court = _Court(root, found.files)
    sources = {mutant.path: (root / mutant.path).read_text(encoding="utf-8") for mutant in left}
    for profile in PROFILES:
        todo = [mutant for mutant in left if not _judged(done.get(mutant.key), profile)]
        with _progress(f"mutants, {profile}", len(todo)) as shown:
            for mutant in todo:
                source = sources[mutant.path]
                mutated = (mutant.module, str(root / mutant.path), compiled(mutant, source, known))
                verdict = court.judge(judges.of(mutant), profile, mutated)
                result = Result(
                    mutant.key, digest(source), verdict.outcome, profile, verdict.test, verdict.raised, verdict.ran,
                    round(verdict.seconds, 2),
                )
                results.append(folder, result)
                done[mutant.key] = result
                shown(mutant, result)


def _judged(result: Result | None, profile: str) -> bool:
    """Whether a mutant is dead, or has survived this profile or a later one."""
    if result is None:
        return False
    return result.killed or PROFILES.index(result.profile) >= PROFILES.index(profile)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[Mutant, Result], None]]:
    """A bar where rich is, and a line for each survivor; else a line for each mutant."""
    if not find_spec("rich"):
        yield lambda mutant, result: print(f"{result.outcome:9} {mutant.key}", flush=True)
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(what, total=total)

        def shown(mutant: Mutant, result: Result) -> None:
            if not result.killed:
                bar.console.print(f"survived: {mutant.key}", markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)

        yield shown
