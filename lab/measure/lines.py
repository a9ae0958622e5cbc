"""Count the lines and files of Python in each package: `python -m lab.measure.lines [COMMIT ...] [--without REGEX]`."""

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Sequence

from conformance.paths import ROOT
from lab import pages

Counts = dict[str, tuple[int, int]]


def package_of(path: str) -> str:
    """Return the top-level package of a file. For a large package, return the package inside."""
    first, *rest = path.split("/")
    deep = first in ("conformance", "experiments", "lab", "models_integration", "tests") and len(rest) > 1
    return f"{first}/{rest[0]}" if deep else first


def counts_at(commit: str, without: str = "") -> Counts:
    """Return the lines and files of each package, without files whose path matches a regular expression."""
    command = ["git", "grep", "-c", "", commit, "--", "*.py"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines, files = Counter[str](), Counter[str]()
    for name, count in (row.removeprefix(f"{commit}:").rsplit(":", 1) for row in listing.splitlines()):
        if not (without and re.search(without, name)):
            lines[package_of(name)] += int(count)
            files[package_of(name)] += 1
    return {"all": (lines.total(), files.total()), **{name: (lines[name], files[name]) for name in sorted(lines)}}


def table(commits: Sequence[str], without: str = "") -> str:
    """Return a Markdown table with a column for each commit."""
    each = [counts_at(commit, without) for commit in commits]
    return pages.table(["room", *(f"lines (files), {commit}" for commit in commits)], [
        [package, *("{} ({})".format(*one.get(package, (0, 0))) for one in each)]
        for package in dict.fromkeys(package for one in each for package in one)
    ])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="lab.measure.lines", description=__doc__)
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="commits to compare with HEAD")
    parser.add_argument("--without", metavar="REGEX", default="", help="leave out files whose path matches")
    given = parser.parse_args()
    print(table([*given.commits, "HEAD"], given.without), end="")
