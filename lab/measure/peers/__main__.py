"""Compare every press on 200 inputs: `python -m lab.measure.peers`.

The command prints the row of each press. The exit code is 1 if a difference has no reading.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

from conformance.paths import DOCS
from lab import pages
from lab.measure.peers.inputs import SMALL, Inputs, drawn
from lab.measure.peers.presses import PRESSES, kept_by_press
from lab.measure.peers.table import OURS, needed

INPUTS = 200
PAGE = DOCS / "peers.md"
MOST, LEAST = {"PyramidKV": 120}, {"Compactor": 8}


@dataclass
class Report:
    """Result for one press. Kept sets are equal, or different and explained by readings, or unexplained."""

    press: str
    equal: int = 0
    unexplained: list[Inputs] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def compared(press: str, number: int) -> Report:
    report = Report(press)
    make, eager = PRESSES[press]
    ours, readings = OURS[press]
    for seed in range(number):
        inputs = drawn(seed, MOST.get(press, 40), LEAST.get(press, 6))
        theirs = kept_by_press(make, inputs, eager)
        some = needed(press, inputs, theirs, readings)
        if some is None or ours(inputs, frozenset(readings)) != theirs:
            report.unexplained.append(inputs)
            continue
        report.equal += not some
        report.counts.update(some)
    return report


def row(report: Report) -> Sequence[str]:
    """Return the row of the press in docs/peers.md."""
    needed_by = ", ".join(f"{reading} {count}" for reading, count in sorted(report.counts.items()))
    return report.press, str(report.equal), needed_by, str(len(report.unexplained))


def tables(reports: Sequence[Report], number: int) -> dict[str, str]:
    """Return the tables of docs/peers.md by name."""
    versions = [f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch")]
    return {
        "versions": f"The tables are of {', '.join(versions)}, and {number} inputs for each press.\n",
        "constants": pages.table([*asdict(SMALL)], [[*map(str, asdict(SMALL).values())]]),
        "presses": pages.table(
            ["Press", "Inputs with equal kept sets", "Inputs for each reading", "Inputs without an explanation"],
            map(row, reports),
        ),
    }


def main(arguments: list[str] | None = None) -> int:
    """Compare all presses, or one."""
    parser = argparse.ArgumentParser(prog="lab.measure.peers", description=__doc__)
    parser.add_argument("--press", choices=PRESSES, help="one press only")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--write", action="store_true", help="write the tables of docs/peers.md")
    options = parser.parse_args(arguments)
    reports = []
    for press in [options.press] if options.press else PRESSES:
        reports.append(compared(press, options.inputs))
        print(*row(reports[-1]), sep=" | ", flush=True)
        for inputs in reports[-1].unexplained[:3]:
            print(f"- unexplained: seed {inputs.seed}, n = {inputs.n}, r = {inputs.ratio}", flush=True)
    if options.write:
        pages.write(PAGE, tables(reports, options.inputs).__getitem__)
    return int(any(report.unexplained for report in reports))


if __name__ == "__main__":
    sys.exit(main())
