"""`python -m conformance.assurance.saboteurs`: every saboteur against the tests of its item, and how subtle each is.

Exit 1 unless each is killed by an assertion, and enough agree with the reference on half of random inputs.
"""

import argparse
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from time import perf_counter

from conformance.assurance.saboteurs import SABOTEURS
from conformance.assurance.saboteurs.registry import Saboteur
from conformance.assurance.saboteurs.subtlety import INPUTS, agreement, outcomes, subject_of
from conformance.assurance.saboteurs.verdict import Verdict, judge, warm
from spec import SPEC_VERSION

__all__ = ["main"]

SUBTLE_AT_LEAST = 40
REPORT = Path("results", "saboteurs.md")


def selected(part: str | None, item: str | None) -> list[Saboteur]:
    """The saboteurs whose name holds `part`, of the item."""
    return [
        saboteur for saboteur in SABOTEURS.values()
        if (part or "").upper().replace("-", "_") in saboteur.name and item in (None, saboteur.item)
    ]


# What the reference does, by the name of a subject; filled before trials are forked.
_right: dict[str, list[str]] = {}


def right(item: str) -> tuple[str, list[str]]:
    """What the reference does on the inputs of the item's subject."""
    subject = subject_of(item)
    return subject.name, outcomes(subject)


def trial(name: str) -> tuple[Verdict, int]:
    """The agreement first, then the tests; the saboteur stays in this process."""
    saboteur = SABOTEURS[name]
    agrees = agreement(saboteur, _right[subject_of(saboteur.item).name])
    verdict = judge(name, saboteur.item)
    # What this process and those that its tests started have used.
    verdict.seconds = sum(os.times()[:4])
    return verdict, agrees


def trials(names: list[str], workers: int) -> Iterator[tuple[Verdict, int]]:
    """Each in a process of its own, forked where nothing is patched and what all need is known."""
    warm()
    items = {subject_of(SABOTEURS[name].item).name: SABOTEURS[name].item for name in names}
    fork = multiprocessing.get_context("fork")
    with fork.Pool(workers) as pool:
        _right.update(pool.imap_unordered(right, items.values()))
    with fork.Pool(workers, maxtasksperchild=1) as pool:
        yield from pool.imap(trial, names, chunksize=1)
    gc.unfreeze()  # torch's libraries count what is left at the end


def described(saboteur: Saboteur) -> str:
    """A line of the list."""
    size = f" (right up to {saboteur.beyond.size})" if saboteur.beyond else ""
    return f"{saboteur.name:55} {saboteur.reading}{size}"


def line(saboteur: Saboteur, verdict: Verdict, agrees: int) -> str:
    """A row of the table."""
    by = verdict.test if verdict.any_backend else f"{verdict.test} (reference)"
    why = by if verdict.killed else saboteur.reading
    return f"{saboteur.name:55} {agrees:4}/{INPUTS} {verdict.seconds:6.1f} s  {verdict.outcome:9} {why}"


def summary(results: list[tuple[Verdict, int]], wall: float) -> tuple[str, bool]:
    """The score, and whether all were killed."""
    killed = [verdict for verdict, _ in results if verdict.killed]
    subtle = sum(agrees >= INPUTS / 2 for _, agrees in results)
    by_stage = sum(verdict.any_backend for verdict in killed)
    used = sum(os.times()[:4])
    text = (
        f"saboteurs: {len(killed)} of {len(results)} killed by an assertion of their item"
        f" ({by_stage} by a test that judges any backend), {subtle} agree with the reference on half or more"
        f" of {INPUTS} random inputs, {wall:.0f} s in which {used:.0f} s of processor time were used"
    )
    return text, len(killed) == len(results)


def report(rows: list[str], score: str) -> str:
    """The page of a whole run."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "hypothesis", "pytest"))
    return f"""# Saboteurs: how strong the suite is

`nox -s saboteurs`, {date.today()}, spec {SPEC_VERSION}, profile ci,
Python {python_version()}, {versions}, {os.cpu_count()} CPU cores.

{score}.

Each is the reference with one item wrong. Columns: name; of {INPUTS} random inputs of its item's kind, on how many it
has the reference's result to the bit (prefills end to end, lives of a cache, kept sets of policies, or the item alone:
conformance/assurance/saboteurs/subtlety.py); processor seconds; verdict; the test that killed it, "(reference)" where
that test judges the reference alone. 200 of {INPUTS} means that no random input tells them apart: a chosen one does.

```
{chr(10).join(rows)}
```
"""


def main(arguments: list[str] | None = None) -> int:
    """Try the selected saboteurs; print a row for each and the score."""
    parser = argparse.ArgumentParser(prog="conformance.assurance.saboteurs", description=__doc__)
    parser.add_argument("-k", metavar="PART", help="those whose name holds PART")
    parser.add_argument("--item", metavar="ID", help="those of one item")
    parser.add_argument("--list", action="store_true", help="name them and what they get wrong")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--report", metavar="FILE.md", type=Path, default=REPORT, help=f"where a run of all writes its table; {REPORT}"
    )
    options = parser.parse_args(arguments)
    chosen = selected(options.k, options.item)
    if not chosen:
        parser.error("no saboteur is selected")
    if options.list:
        print("\n".join(map(described, chosen)))
        return 0
    whole = [saboteur.name for saboteur in chosen] == list(SABOTEURS)
    start, results, rows = perf_counter(), list[tuple[Verdict, int]](), list[str]()
    for saboteur, result in zip(chosen, trials([s.name for s in chosen], options.workers), strict=True):
        results.append(result)
        rows.append(line(saboteur, *result))
        print(rows[-1], flush=True)
    text, every = summary(results, perf_counter() - start)
    print(text)
    if whole:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(report(rows, text), encoding="utf-8")
    few = whole and sum(a >= INPUTS / 2 for _, a in results) < SUBTLE_AT_LEAST
    return int(few or not every)


if __name__ == "__main__":
    sys.exit(main())
