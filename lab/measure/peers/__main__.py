"""Compare every press on 200 inputs: `python -m lab.measure.peers`.

The exit code is 1 if a difference has no reading.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version

from conformance.paths import DOCS
from lab.measure.peers.differences import READINGS
from lab.measure.peers.inputs import SMALL, Inputs, drawn
from lab.measure.peers.presses import PRESSES, VERSION, kept_by_press
from lab.measure.peers.table import OURS, needed

INPUTS = 200
PAGE = DOCS / "peers.md"
MOST = {"PyramidKV": 120}


@dataclass(frozen=True)
class Example:
    """Input that needs a reading, its other readings, and the first kept set that differs, of both sides."""

    inputs: Inputs
    others: tuple[str, ...]
    ours: list[int]
    theirs: list[int]

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.others), self.inputs.n, self.inputs.seed


@dataclass
class Report:
    """Result for one press: the number of equal inputs, the readings for the others, and the unexplained inputs."""

    press: str
    equal: int = 0
    unexplained: list[Inputs] = field(default_factory=list)
    smallest: dict[str, Example] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def compared(press: str, number: int) -> Report:
    report = Report(press)
    make, eager = PRESSES[press]
    ours, readings = OURS[press]
    for seed in range(number):
        inputs = drawn(seed, MOST.get(press, 40))
        theirs = kept_by_press(make, inputs, eager)
        some = needed(press, inputs, theirs, readings)
        if some is None or ours(inputs, frozenset(readings)) != theirs:
            report.unexplained.append(inputs)
            continue
        report.equal += not some
        report.counts.update(some)
        for reading in some:
            others = tuple(other for other in some if other != reading)
            without = ours(inputs, frozenset(others))
            head = next(h for h, (a, b) in enumerate(zip(without, theirs, strict=True)) if a != b)
            result = Example(inputs, others, without[head], theirs[head])
            report.smallest[reading] = min(report.smallest.get(reading, result), result, key=lambda e: e.size)
    return report


def lines(report: Report, number: int) -> Iterator[str]:
    """Yield the printed lines for a press, with the smallest input that needs each reading."""
    yield f"## {report.press}"
    yield ""
    yield f"{report.equal} of {number} inputs agree as they are; {len(report.unexplained)} differences are unexplained."
    if report.counts:
        yield ""
        yield "| Reading | Inputs that need it | Smallest input | Here | kvpress |"
        yield "| --- | --- | --- | --- | --- |"
    for reading, count in sorted(report.counts.items()):
        e = report.smallest[reading]
        also = f", with {' and '.join(e.others)}" if e.others else ""
        where = f"seed {e.inputs.seed}, n = {e.inputs.n}, r = {e.inputs.ratio}{also}"
        yield f"| {reading} | {count} | {where} | {runs(e.ours)} | {runs(e.theirs)} |"
    for inputs in report.unexplained[:3]:
        yield f"- unexplained: seed {inputs.seed}, n = {inputs.n}, r = {inputs.ratio}"
    yield ""


def runs(kept: list[int]) -> str:
    """Return the text "0-3, 7" for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for at in kept:
        if parts and parts[-1][-1] == at - 1:
            parts[-1].append(at)
        else:
            parts.append([at])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def row(report: Report) -> str:
    """Return the row of the press in docs/peers.md."""
    needed_by = ", ".join(f"{reading} {count}" for reading, count in sorted(report.counts.items()))
    return f"| {report.press} | {report.equal} | {needed_by} | {len(report.unexplained)} |"


def page(reports: list[Report], number: int) -> str:
    """Return the text of docs/peers.md."""
    return "\n".join([
        "# Comparison with kvpress on random inputs", "",
        f"`python -m lab.measure.peers --write` wrote this page with kvpress {VERSION}, transformers"
        f" {version('transformers')} and torch {version('torch')}. Both libraries receive the same queries, keys"
        " and values in float64, and evict the same ratio r of n tokens.", "",
        "| Inputs for each press | Tokens | KV heads | Query heads of a KV head |", "|---|---|---|---|",
        f"| {number} | 6 to 40 (PyramidKV: to 120) | 1 to 3 | 1 or 2 |", "",
        "| Window | Pool | Chunk | Sinks | Future | Lag | Piece | Gate |", "|---|---|---|---|---|---|---|---|",
        f"| {SMALL.window} | {SMALL.kernel} | {SMALL.chunk} | {SMALL.sinks} | {SMALL.future} | {SMALL.lag}"
        f" | {SMALL.piece} | {SMALL.gate} |", "",
        f"The model for the KVzip presses has {SMALL.layers} layers. The model repeats the prompt in chunks of"
        f" {SMALL.rehearsed} tokens. A template of up to 8 tokens precedes each chunk. DMS uses a score threshold"
        " instead of the ratio.", "",
        "A *reading* is a named difference between kvpress and kvspec. If the kept sets differ on an input, the"
        " command searches for the fewest readings that make the sets equal. The third column counts the inputs for"
        " each reading. The last column counts the inputs for which no readings make the sets equal. The command also"
        " prints the smallest input for each reading. Separate files have the"
        " [defects of kvpress](upstream/README.md).", "",
        "| Press | Inputs with equal kept sets | Inputs for each reading | Inputs without an explanation |",
        "|---|---|---|---|",
        *map(row, reports), "", "| Reading | kvpress | kvspec |", "|---|---|---|",
        *(f"| {name} | {theirs} | {ours} |" for name, (theirs, ours) in READINGS.items()), "",
    ])


def main(arguments: list[str] | None = None) -> int:
    """Compare all presses, or one."""
    parser = argparse.ArgumentParser(prog="lab.measure.peers", description=__doc__)
    parser.add_argument("--press", choices=PRESSES, help="one press only")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--write", action="store_true", help="write docs/peers.md")
    options = parser.parse_args(arguments)
    reports = []
    for press in [options.press] if options.press else PRESSES:
        reports.append(compared(press, options.inputs))
        print("\n".join(lines(reports[-1], options.inputs)), flush=True)
    if options.write:
        PAGE.write_text(page(reports, options.inputs), encoding="utf-8")
    return int(any(report.unexplained for report in reports))


if __name__ == "__main__":
    sys.exit(main())
