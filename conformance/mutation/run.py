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
from conformance.mutation.results import Result, digest

__all__ = ["NotJudged", "run"]

SPARE = 20.0  # processor seconds that any mutant has
TIMES = 8.0  # and how many times those of the unmutated code under the cheap profile; the other has 3 times its cases


class NotJudged(RuntimeError):
    """The unmutated code fails its own tests: then no verdict means anything."""


@dataclass
class _Court:
    """Knows the suite, and what it costs on the unmutated code."""

    root: Path
    files: dict[str, set[str]]
    tests: dict[str, list[worker.Test]] = field(default_factory=dict)

    def control(self, selection: Selection, profile: str) -> list[worker.Test]:
        """What the tests cost where nothing is mutated.

        Raises:
            NotJudged: when one fails.
        """
        verdict = self.trial(selection, profile, None, 3600.0)
        if verdict.trouble or verdict.outcome != "survived":
            raise NotJudged(f"unmutated, {profile}: {verdict.test} {verdict.raised} {verdict.trouble}")
        return verdict.tests

    def trial(
        self, selection: Selection, profile: str, mutated: tuple[str, str, CodeType] | None, seconds: float,
    ) -> worker.Verdict:
        """One fork."""
        files = set().union(*(self.files.get(item, set()) for item in selection.items), selection.files)
        try:
            found: worker.Verdict = worker.in_a_fork(
                lambda: worker.trial(self.root, selection, sorted(files), profile, mutated), seconds
            )
        except TimeoutError:
            return worker.Verdict("timeout", seconds=seconds)
        return found

    def judge(self, selection: Selection, mutated: tuple[str, str, CodeType]) -> tuple[worker.Verdict, str]:
        """The cheap profile, and where a mutant survives it the other."""
        usual = sum(t.seconds for t in self.tests[selection.backend] if selection.takes(t.items, t.file))
        for profile in worker.PROFILES:
            verdict = self.trial(selection, profile, mutated, SPARE + TIMES * usual)
            if verdict.trouble:
                raise NotJudged(f"{mutated[0]}: {verdict.trouble}")
            if verdict.outcome != "survived":
                break
        if profile != worker.PROFILES[0] and verdict.outcome != "survived":
            self.control(selection, profile)
        return verdict, profile


def run(root: Path, mutants: list[Mutant], folder: Path, again: bool) -> None:
    """Try those without a verdict on their module's present text; with `again`, survivors too.

    Raises:
        NotJudged: when the tests of an item fail on the unmutated code.
    """
    sources = {mutant.path: (root / mutant.path).read_text(encoding="utf-8") for mutant in mutants}
    done = results.read(root, folder)
    todo = [m for m in mutants if m.key not in done or (again and not done[m.key].killed)]
    print(f"mutation: {len(mutants)} mutants, {len(mutants) - len(todo)} tried before, {len(todo)} to try", flush=True)
    if not todo:
        return
    # Every fork imports the suite; its rewritten assertions are compiled once, whatever the environment says.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str((folder / "bytecode").resolve())
    judges, known = read_code(root), known_signatures(root)
    found: worker.Survey = worker.in_a_fork(lambda: worker.survey(root), 600.0)
    worker.preload(found.third_party)
    gc.freeze()
    court, chosen = _Court(root, found.files), [judges.of(mutant) for mutant in todo]
    for backend in sorted({selection.backend for selection in chosen}):
        mine = [selection for selection in chosen if selection.backend == backend]
        items, files = frozenset[str]().union(*(s.items for s in mine)), frozenset[str]().union(*(s.files for s in mine))
        whole = Selection(backend, items, files)
        court.tests[backend] = court.control(whole, worker.PROFILES[0])
    with _progress(len(todo)) as shown:
        for mutant, selection in zip(todo, chosen, strict=True):
            source = sources[mutant.path]
            code = compiled(mutant, source, known)
            verdict, profile = court.judge(selection, (mutant.module, str(root / mutant.path), code))
            result = Result(
                mutant.key, digest(source), verdict.outcome, profile, verdict.test, verdict.raised, verdict.ran,
                round(verdict.seconds, 2),
            )
            results.append(folder, result)
            shown(mutant, result)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Mutant, Result], None]]:
    """A bar where rich is, and a line for each survivor; else a line for each mutant."""
    if not find_spec("rich"):
        yield lambda mutant, result: print(f"{result.outcome:9} {mutant.key}", flush=True)
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("mutants", total=total)

        def shown(mutant: Mutant, result: Result) -> None:
            if not result.killed:
                bar.console.print(f"survived: {mutant.key}", markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)

        yield shown


