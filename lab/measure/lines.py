"""Count the lines and files of Python in each package: `python -m lab.measure.lines [COMMIT ...]`."""

import argparse
import subprocess
from collections import Counter
from collections.abc import Sequence

from conformance.paths import ROOT

Rooms = dict[str, tuple[int, int]]


def room_of(path: str) -> str:
    """Return the top-level package of a file. For a large package, return the package inside."""
    first, *rest = path.split("/")
    deep = first in ("conformance", "experiments", "lab", "models_integration", "tests") and len(rest) > 1
    return f"{first}/{rest[0]}" if deep else first


def rooms_at(commit: str) -> Rooms:
    """Return the lines and files of each package."""
    command = ["git", "grep", "-c", "", commit, "--", "*.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines, files = Counter[str](), Counter[str]()
    for name, count in (row.removeprefix(f"{commit}:").rsplit(":", 1) for row in found.splitlines()):
        lines[room_of(name)] += int(count)
        files[room_of(name)] += 1
    return {"all": (lines.total(), files.total()), **{room: (lines[room], files[room]) for room in sorted(lines)}}


def table(commits: Sequence[str]) -> str:
    """Return a Markdown table with a column for each commit."""
    each = [rooms_at(commit) for commit in commits]
    rows = [["room", *(f"lines (files), {commit}" for commit in commits)], ["---"] * (1 + len(commits))]
    for room in dict.fromkeys(room for one in each for room in one):
        rows.append([room, *("{} ({})".format(*one.get(room, (0, 0))) for one in each)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="lab.measure.lines", description=__doc__)
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="commits to compare with HEAD")
    print(table([*parser.parse_args().commits, "HEAD"]))
