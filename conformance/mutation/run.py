"""Trying a list of mutants, one after the other, each verdict stored as soon as it is known."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

from conformance.mutation import results, worker
from conformance.mutation.items import Selection, read_code
from conformance.mutation.mutants import Mutant, compiled, known_signatures
from conformance.mutation.results import PROFILES, Result, digest

__all__ = ["NotJudged", "run"]

SPARE = 20.0  # processor seconds that any mutant has
TIMES = 8.0  # and how many times those of the unmutated code under the cheap profile; the other has 3 times its cases


class NotJudged(RuntimeError):
    """The suite could not be run: then no verdict means anything."""


@dataclass
class _Court:
    """Knows the suite, what it costs on the unmutated code, and which tests fail there: those judge nothing."""

    root: Path
    files: dict[str, set[str]]
    tests: dict[str, list[worker.Test]] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)

    def control(self, selection: Selection, profile: str) -> list[worker.Test]:
        """Run the tests where nothing is mutated.

        Raises:
            NotJudged: when they cannot be run.
        """
        verdict = self.trial(selection, profile, None, 3600.0)
        if verdict.trouble or verdict.test.startswith("import of"):
            raise NotJudged(f"unmutated, {profile}: {verdict.test} {verdict.raised} {verdict.trouble}")
        for test in verdict.tests:
            if test.failed:
                self.failing.add(test.name)
                print(f"fails unmutated under {profile}, so it judges nothing: {test.name}", flush=True)
        return verdict.tests

    def measure(self, selections: list[Selection]) -> None:
        """Run all that will be needed once, under the cheap profile."""
        for backend in sorted({selection.backend for selection in selections}):
            mine = [selection for selection in selections if selection.backend == backend]
            items = frozenset[str]().union(*(selection.items for selection in mine))
            files = frozenset[str]().union(*(selection.files for selection in mine))
            self.tests[backend] = self.control(Selection(backend, items, files), PROFILES[0])

    def trial(
        self, selection: Selection, profile: str, mutated: tuple[str, str, CodeType] | None, seconds: float,
    ) -> worker.Verdict:
        """One fork."""
        files = set().union(*(self.files.get(item, set()) for item in selection.items), selection.files)
        try:
            found: worker.Verdict = worker.in_a_fork(
                lambda: worker.trial(self.root, selection, sorted(files), profile, mutated, self.failing), seconds
            )
        except TimeoutError:
            return worker.Verdict("timeout", seconds=seconds)
        return found

    def judge(self, selection: Selection, profile: str, mutated: tuple[str, str, CodeType]) -> worker.Verdict:
        """The verdict on one mutant.

        Raises:
            NotJudged: when the suite could not be run.
        """
        usual = sum(t.seconds for t in self.tests[selection.backend] if selection.takes(t.items, t.file))
        verdict = self.trial(selection, profile, mutated, SPARE + TIMES * usual)
        if verdict.trouble:
            raise NotJudged(f"{mutated[0]}: {verdict.trouble}")
        if profile == PROFILES[0] or verdict.outcome in ("survived", "timeout"):
            return verdict
        # Dead under the second profile alone: not where the tests fail unmutated under it.
        before = len(self.failing)
        self.control(selection, profile)
        return verdict if len(self.failing) == before else self.judge(selection, profile, mutated)


def run(root: Path, mutants: list[Mutant], folder: Path, again: bool) -> None:
    """Try those without a verdict on their module's present text; with `again`, survivors too.

    All meet the cheap profile first; those that survive it then meet the other.

    Raises:
        NotJudged: when the suite cannot be run.
    """
    done = results.read(root, folder)
    forgotten = {key for key, result in done.items() if again and not result.killed}
    done = {key: result for key, result in done.items() if key not in forgotten}
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
    court.measure([judges.of(mutant) for mutant in left])
    for profile in PROFILES:
        todo = [mutant for mutant in left if not _judged(done.get(mutant.key), profile)]
        with _progress(f"mutants, {profile}", len(todo)) as shown:
            for mutant in todo:
                source = (root / mutant.path).read_text(encoding="utf-8")
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


