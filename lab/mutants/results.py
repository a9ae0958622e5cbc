"""Results of mutants as JSON lines, which a later run continues."""

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.mutants.sites import Mutant
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
        return self.outcome != "survived"

    @property
    def undecided(self) -> bool:
        """True if the mutant survived the cheap profile, and was not tried under the other profile."""
        return not self.killed and self.profile != PROFILES[-1]


def append(folder: Path, result: Result) -> None:
    """Append one line to the file in the folder. Make the folder if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def read(folder: Path, digests: Mapping[str, str]) -> dict[str, Result]:
    """Return the last verdict on each mutant that still has this digest. Skip incomplete lines of a killed run."""
    found, path = {}, folder / FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if digests.get(result.key) == result.digest:
            found[result.key] = result
    return found


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
    backend: str
    accepts: Callable[[pytest.Item], bool]
    patch: Callable[[], None]
    rank: Callable[[pytest.Item], Any] | None = None
    """Sort key of the tests. None: the order of collection."""
    profiles: tuple[str, ...] = PROFILES
    by_assertion: bool = False
    """True if only a failed assertion kills the mutant, not a different error."""

    def left(self, result: Result | None, profile: str) -> bool:
        """Return True if the mutant must still be tried under a profile."""
        if profile not in self.profiles:
            return False
        if result is None:
            return True
        killed = result.outcome == "assertion" if self.by_assertion else result.killed
        return not killed and PROFILES.index(result.profile) < PROFILES.index(profile)


def run(root: Path, trials: Sequence[Trial], files: Sequence[str], folder: Path, *options: str) -> dict[str, Result]:
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
        for backend in sorted({trial.backend for trial in trials}):
            done = read(folder, digests)
            todo = [one for one in trials if one.backend == backend and one.left(done.get(one.key), profile)]
            if todo:
                collected(root, files, backend, profile, lambda suite: _try(suite, todo, profile, folder), *options)  # noqa: B023
    return read(folder, digests)


def _try(suite: Suite, todo: Sequence[Trial], profile: str, folder: Path) -> None:
    for number, trial in enumerate(todo, 1):
        if trial.rank:
            suite.items.sort(key=trial.rank)
        found = suite.judge(trial.accepts, trial.patch)
        append(folder, Result(
            trial.key, trial.digest, found.outcome, profile, found.test, found.raised, found.ran,
            round(found.seconds, 2), found.any_backend,
        ))
        line = f"{number}/{len(todo)} {found.outcome:9} {found.seconds:6.1f} s  {trial.key}"
        print(f"{line}  {found.test.rpartition('/')[2]}", file=sys.__stdout__, flush=True)


LIST = Path(__file__).resolve().parent / "survivors.toml"
KINDS = ("equivalent", "admitted")
OUTCOMES = ("assertion", "error", "timeout")


@dataclass(frozen=True)
class Explanation:
    """Reason why no test kills a mutant: it is equivalent to the reference, or it is a reading that the text admits."""

    mutant: str
    kind: str
    why: str


def explanations(text: str) -> dict[str, Explanation]:
    """Return the explanations in a committed list, by key.

    Raises:
        ValueError: for an entry with wrong fields, or for a duplicate key.
    """
    found: dict[str, Explanation] = {}
    for entry in tomllib.loads(text).get("survivor", []):
        if set(entry) != {"mutant", "kind", "why"} or entry["kind"] not in KINDS or not entry["why"].strip():
            raise ValueError(f"{entry}: give mutant, kind ({' or '.join(KINDS)}) and why")
        if entry["mutant"] in found:
            raise ValueError(f"{entry['mutant']}: explained twice")
        found[entry["mutant"]] = Explanation(**entry)
    return found


def problems(
    sampled: Sequence[Mutant], every: Iterable[Mutant], results: Mapping[str, Result],
    explained: Mapping[str, Explanation],
) -> list[str]:
    """Return all problems: untried mutants, survivors without explanation, and explanations without survivor."""
    untried = [m for m in sampled if m.key not in results or results[m.key].undecided]
    found = [f"untried: {mutant.key}" for mutant in untried]
    found += [
        f"survived, unexplained: {mutant.key}\n    {mutant.id}" for mutant in sampled
        if mutant not in untried and not results[mutant.key].killed and mutant.key not in explained
    ]
    keys = {mutant.key for mutant in every}
    for key in explained:
        if key not in keys:
            found.append(f"explained, but no mutant: {key}")
        elif key in results and results[key].killed:
            found.append(f"explained, but killed: {key}")
    return found


def table(
    sampled: Sequence[Mutant], every: Iterable[Mutant], results: Mapping[str, Result],
    explained: Mapping[str, Explanation],
) -> str:
    """Return a table of killed and tried mutants for each module and in total.

    The lines after the table list the kinds of errors, and the survivors with their explanations.
    """
    population = Counter(mutant.path for mutant in every)
    tried = [(mutant, results[mutant.key]) for mutant in sampled if mutant.key in results]
    lines = [
        "| module | mutants | tried | killed | by assertion | by another error | by time | killed, % | 95 % interval |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for path in sorted({mutant.path for mutant, _ in tried}):
        mine = [result for mutant, result in tried if mutant.path == path]
        lines.append(_row(path, population[path], mine))
    if tried:
        lines.append(_row("**all**", population.total(), [result for _, result in tried]))
    left = [result for mutant, result in tried if not _equivalent(mutant, explained)]
    if left and len(left) < len(tried):
        lines.append(_row("without the equivalent ones", population.total(), left))
    errors = Counter(result.raised.partition(":")[0] for _, result in tried if result.outcome == "error")
    lines += ["", "Killed by an error that is no assertion: " + (
        ", ".join(f"{name} {count}" for name, count in errors.most_common()) or "none") + "."]
    late = sum(result.killed and result.profile == "ci" for _, result in tried)
    lines += ["", f"Killed by the ci profile alone: {late}.", ""]
    for mutant, result in tried:
        if not result.killed:
            reason = explained.get(mutant.key)
            lines.append(f"- `{mutant.key}`: " + (f"{reason.kind}. {reason.why.strip()}" if reason else "unexplained."))
    return "\n".join(lines)


def _equivalent(mutant: Mutant, explained: Mapping[str, Explanation]) -> bool:
    return mutant.key in explained and explained[mutant.key].kind == "equivalent"


def _row(name: str, population: int, tried: Sequence[Result]) -> str:
    killed = sum(result.killed for result in tried)
    from reference.statistics import wilson  # imported only here, after the import hook of jaxtyping

    low, high = wilson(killed, len(tried))
    by = [sum(result.outcome == outcome for result in tried) for outcome in OUTCOMES]
    cells = [name, population, len(tried), killed, *by, f"{100 * killed / len(tried):.1f}",
             f"{100 * low:.1f} to {100 * high:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"
