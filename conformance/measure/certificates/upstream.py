"""`python -m conformance.measure.certificates.upstream kvpress`: each defect of docs/upstream still shows, or exit 1.

A file there is an issue ready to be filed: a docstring (title; Package, Prints, Expected, Change) and a short script,
which ends in an error as long as the defect is there. `--write` makes the table, docs/upstream.md.
"""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from conformance.paths import DOCS

__all__ = ["Defect", "defects", "main", "page", "said"]

FOLDER, PAGE = DOCS / "upstream", DOCS / "upstream.md"
FIELDS = ("Package", "Prints", "Expected", "Change")
INTRODUCTION = """# Defects to report upstream

Each file is a complete issue, with the defect, the output, the expected output and its source, a change and a script. A
script has at most 15 lines. `nox -s lab -- upstream` runs all scripts and fails if the output of a script changes. This
page does not list [different readings of a paper](peers.md). Models are tiny and random.
"""


@dataclass(frozen=True)
class Defect:
    """One file of docs/upstream."""

    name: str
    title: str
    fields: dict[str, str]
    script: str

    @property
    def package(self) -> str:
        return self.fields["Package"].split()[0]


def defects() -> list[Defect]:
    """All of them, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.py"))]


def _read(path: Path) -> Defect:
    source = path.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = text.partition("\n\n")
    parts = re.split(rf"^({'|'.join(FIELDS)}): ", rest, flags=re.MULTILINE)[1:]
    found = {field: " ".join(value.split()) for field, value in zip(parts[::2], parts[1::2], strict=True)}
    return Defect(path.stem, " ".join(title.split()), found, source.split('"""', maxsplit=2)[2])


def said(defect: Defect) -> str:
    """The last line that the script says, here; nothing where it ends without an error."""
    command = [sys.executable, "-W", "ignore", str(FOLDER / f"{defect.name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return " ".join(lines[-1].split()) if done.returncode and lines else ""


def page() -> str:
    """docs/upstream.md."""
    rows = [f"| {one.fields['Package']} | [{one.title}](upstream/{one.name}.py) |" for one in defects()]
    return "\n".join([INTRODUCTION, "| Package | Defect |", "|---|---|", *rows, ""])


def main(arguments: list[str]) -> int:
    """Run the scripts of a package in this environment."""
    if arguments == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    (package,) = arguments
    mine = [one for one in defects() if one.package == package]
    print(f"{package} {version(package)}: {len(mine)} defects")
    gone = [one.name for one in mine if not _shown(one)]
    return int(bool(gone) or not mine)


def _shown(defect: Defect) -> bool:
    found = said(defect)
    shown = bool(found) and found == defect.fields["Prints"]
    print(f"{'still there' if shown else 'OTHERWISE'}  {defect.name}: {found or 'no error'}", flush=True)
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
