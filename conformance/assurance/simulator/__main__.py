"""`python -m conformance.assurance.simulator`: lives until the time is up; the first finding is shrunk and printed."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from conformance.assurance.simulator.operations import Operation, drawn, read_script, written
from conformance.assurance.simulator.planted import PLANTED
from conformance.assurance.simulator.shrink import finding, shrunk
from conformance.assurance.simulator.states import REFUSALS, STATES, Met

__all__ = ["LENGTH", "hunted", "main"]

LENGTH = 30
"""Operations of a life."""


def main() -> int:
    """The command; 1 for a finding, or a state that was never met in a run that was long enough."""
    options = _options()
    torch.set_num_threads(1)
    if options.script is not None:
        return _told(read_script(options.script.read_text(encoding="utf-8")), shrink=False)
    if options.seed is not None:
        return _told(drawn(options.seed, LENGTH))
    if options.planted is not None:
        return _planted(options.planted or list(PLANTED), options.minutes)
    met, began, operations = Met(), time.monotonic(), 0
    for seed in _seeds(options.start, options.minutes):
        script = drawn(seed, LENGTH)
        operations += len(script)
        if finding(script, met) is not None:
            print(f"seed {seed}")
            return _told(script)
    minutes, lives = (time.monotonic() - began) / 60, seed + 1 - options.start
    never = met.never()
    print(f"{lives} lives, {operations} operations, {minutes:.1f} minutes, from seed {options.start}")
    if options.out is not None:
        options.out.write_text(_page(met, lives, operations, minutes, options.start), encoding="utf-8")
    print("".join(f"never met: {state}\n" for state in never), end="")
    return int(bool(never))


def hunted(name: str, minutes: float) -> tuple[int, float, list[Operation]] | None:
    """The seed at which a planted bug is found, after how many seconds, and the script; None where it is not."""
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[name](patch)
        for seed in _seeds(0, minutes):
            script = drawn(seed, LENGTH)
            if finding(script, Met()) is not None:
                return seed, time.monotonic() - began, script
    return None


def _seeds(start: int, minutes: float) -> Iterator[int]:
    """One seed at least, until the time is up."""
    until = time.monotonic() + 60 * minutes
    for seed in count(start):
        yield seed
        if time.monotonic() > until:
            return


def _told(script: list[Operation], shrink: bool = True) -> int:
    """What a script finds, on as few operations as it takes; they can be run by --script."""
    found = finding(script, Met())
    if found is None:
        print(f"{len(script)} operations: all holds")
        return 0
    short = shrunk(script) if shrink else script
    print(f"{found}\n\n{written(short)}\nthese {len(short)} lines in a file: nox -s simulate -- --script FILE")
    return 1


def _planted(names: list[str], minutes: float) -> int:
    """Each bug is planted and hunted."""
    lost = 0
    for name in names:
        found = hunted(name, minutes)
        lost += found is None
        if found is None:
            print(f"{name}: not found in {minutes:g} minutes", flush=True)
            continue
        seed, seconds, script = found
        with pytest.MonkeyPatch.context() as patch:
            PLANTED[name](patch)
            short, what = shrunk(script), finding(script, Met())
        print(f"{name}: {seed + 1} seeds, {seconds:.0f} s, {len(short)} operations: {what}", flush=True)
        print("".join(f"    {json.dumps(one)}\n" for one in short), end="", flush=True)
    return int(lost > 0)


def _page(met: Met, lives: int, operations: int, minutes: float, start: int) -> str:
    """The counts of a run."""
    whose = {**STATES, **{f"refused: {name}": item for name, (item, _) in REFUSALS.items()}}
    rows = "".join(f"| {state} | {whose[state]} | {met.counts[state]} |\n" for state in whose)
    asked = f"nox -s simulate -- --minutes {minutes:.0f} --start {start}"
    return (
        "# What a run of the simulator has met\n\n"
        f"`{asked}`: {lives} lives, {operations} operations, {minutes:.1f} minutes on a core that others used."
        f" Nothing was found.\n\n| state | of | met |\n|---|---|---|\n{rows}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this life alone")
    parser.add_argument("--script", type=Path, help="the operations of this file")
    parser.add_argument("--out", type=Path, help="a page of counts")
    parser.add_argument("--planted", nargs="*", metavar="BUG", help="hunt planted bugs, all or these")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
