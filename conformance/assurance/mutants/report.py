"""The score of a sample, as Markdown, and whether each survivor is explained."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.assurance.mutants.results import Result
from conformance.assurance.mutants.sites import Mutant
from reference.statistics import wilson

__all__ = ["LIST", "Explanation", "explanations", "problems", "table"]

LIST = Path(__file__).resolve().parent / "survivors.toml"
KINDS = ("equivalent", "admitted")
OUTCOMES = ("assertion", "error", "timeout")


@dataclass(frozen=True)
class Explanation:
    """Why no test kills a mutant: it does the same on every input, or a reading that the text admits."""

    mutant: str
    kind: str
    why: str


def explanations(text: str) -> dict[str, Explanation]:
    """The committed list, by key.

    Raises:
        ValueError: for an entry of another form, or a key given twice.
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
    """Every reason to fail: untried mutants, survivors without a reason, reasons without a survivor."""
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
    """Killed of tried by module and in all, what the errors were, and the survivors with their reasons."""
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
    low, high = wilson(killed, len(tried))
    by = [sum(result.outcome == outcome for result in tried) for outcome in OUTCOMES]
    cells = [name, population, len(tried), killed, *by, f"{100 * killed / len(tried):.1f}",
             f"{100 * low:.1f} to {100 * high:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"
