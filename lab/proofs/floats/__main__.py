"""Check float bounds with Gappa, and search for the largest error: `python -m lab.proofs.floats`.

`--write` writes the largest errors to the last column of the table in README.md.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import expm1
from pathlib import Path

import numpy as np

from conformance import tolerances

HERE = Path(__file__).parent
README = HERE / "README.md"
MOVES = 1.25
"""Factor by which the exponentials and logarithms of different machines may change a figure."""

_ROW = re.compile(r"^(\| `(\w+)` \| ([^|]+) \|.*\| )([^|]*)( \|)$", re.MULTILINE)
Key = tuple[str, str]


def figure(result: float) -> str:
    return f"{result:.2g}"


def _key(row: re.Match[str], result: Mapping[Key, float]) -> Key | None:
    return next((key for key in result if key[1] == row[2] and key[0] in row[3].split(", ")), None)


def rewritten(text: str, result: Mapping[Key, float]) -> str:
    """Return the page with the largest errors, as ratios to the bound, by item and bound."""
    def row(line: re.Match[str]) -> str:
        key = _key(line, result)
        return line[0] if key is None else f"{line[1]}{figure(result[key])}{line[5]}"

    return _ROW.sub(row, text)


def stale(text: str, result: Mapping[Key, float]) -> Iterator[str]:
    """Yield a message for each figure of the page that differs from the current one."""
    written = {key: float(line[4]) for line in _ROW.finditer(text) if (key := _key(line, result)) is not None}
    for key, value in result.items():
        if key not in written or not written[key] / MOVES <= value <= written[key] * MOVES:
            yield f"{key[0]}: README.md says {written.get(key, 'nothing')}, found {figure(value)}: run with --write"


INSTALL = "apt install gappa"
U = tolerances.UNIT_ROUNDOFF["float64"]


def units(item: str) -> Callable[[], float]:
    return lambda: tolerances.BOUNDS[item, "float64"].units


def share_of_range(largest: float) -> float:
    """Return the radius of Eq. 28, in units of u max l / range, for logarithms between `largest` - 1 and `largest`."""
    return tolerances.normalised_radius([expm1(largest - 1), expm1(largest)], 0.0) / U / largest


@dataclass(frozen=True)
class Proof:
    """Gappa script, its item, its bound in units of u, and the texts that replace CASE, if any."""

    name: str
    item: str
    bound: Callable[[], float]
    cases: Sequence[str] = ("",)


# One case for each binade of the logarithm, in which 4 ulp are 8 u times the lower end of the binade.
BINADES = tuple(
    f"L in [{2.0**k}, {2.0 ** (k + 1)}] /\\ La >= {2.0**k} /\\ |La - L| <= 1b{k - 50}" for k in range(-1, 4)
)
PROOFS = (
    Proof("rarity", "CC-RARITY", units("CC-RARITY"), BINADES),
    Proof("impact", "CC-IMPACT", units("CC-IMPACT")),
    Proof("weight", "CC-TRUNK-WEIGHT", units("CC-TRUNK-WEIGHT")),
    Proof("logistic", "CC-CRYSTALLIZATION", lambda: tolerances.crystallization_radius(np.zeros(1), 5.0, 1e-8) / U),
    Proof("tail", "CC-TAIL-D", units("CC-TAIL-D")),
    Proof("score", "CC-SCORE", lambda: share_of_range(512.0), ("[0, 1]",)),
    Proof("score", "CC-SCORE", lambda: share_of_range(1.0), ("[1, 2]",)),
    Proof("decay", "CC-DECAY", lambda: float(tolerances.decay_radius(np.ones(1))[0]) / U),
    Proof("turn", "IN-HALF-SPLIT", lambda: float(tolerances.turn_radius(np.array([1.0, 0.0]))[0]) / U),
)


def missing() -> str:
    """Return one line that tells how to install Gappa. Empty if it is installed."""
    return "" if shutil.which("gappa") else f"gappa not found: {INSTALL}"


def proved(proof: Proof, share: float = 1.0) -> Iterator[bool]:
    """Yield for each case True if Gappa proves this share of the bound."""
    script = (HERE / f"{proof.name}.g").read_text(encoding="ascii")
    half = f"{int(proof.bound() * share * 512)}b-10"
    for case in proof.cases:
        text = script.replace("BOUND", half).replace("CASE", case)
        yield subprocess.run(["gappa"], input=text, text=True, capture_output=True, check=False).returncode == 0


INPUTS = 1000
"""Number of inputs for the figures in README.md."""


def main(arguments: list[str]) -> int:
    """Check the bounds. Return 1 for any of these problems.

    - A bound is not proved.
    - Half of a bound is proved, so the bound is too large.
    - A bound has a counterexample.
    - README.md has different figures.
    """
    from lab.proofs.floats.search import CASES, worst  # needs python-flint

    parser = argparse.ArgumentParser(prog="floats", description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS, help=f"inputs of each search. Default: {INPUTS}")
    parser.add_argument("--write", action="store_true", help="write the largest errors into README.md")
    asked, failed = parser.parse_args(arguments), 0
    print(missing() or "Gappa, of each side and half of the bound:")
    for proof in () if missing() else PROOFS:
        whole, half = all(proved(proof)), all(proved(proof, 0.5))
        failed += not whole or half
        print(f"{proof.item:20} {proof.name:10} {'proved' if whole else 'NOT PROVED'}{', by half too' if half else ''}")
    print(f"the largest error over the bound, of {asked.inputs} inputs:")
    largest = {}
    for case in CASES:
        result, inputs = worst(case, asked.inputs)
        largest[case.item, case.bound] = result
        failed += result > 1
        print(f"{case.item:20} {case.bound:24} {result:.3g}{f' on {inputs}' if result > 1 else ''}")
    text = README.read_text(encoding="utf-8")
    if asked.write:
        README.write_text(rewritten(text, largest), encoding="utf-8")
    elif asked.inputs == INPUTS:
        for line in stale(text, largest):
            failed += 1
            print(line)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
