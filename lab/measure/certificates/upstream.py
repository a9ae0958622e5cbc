"""Check the defects of docs/upstream.md: `python -m lab.measure.certificates.upstream PACKAGE`.

The exit code is 1 if a defect no longer occurs. A section of the page is an issue that can be filed. It has a title, a
docstring (Package, Prints, Expected, Change) and a short script, which ends with an error as long as the defect exists.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version

from conformance.paths import DOCS

PAGE = DOCS / "upstream.md"
FIELDS = ("Package", "Prints", "Expected", "Change")
_SECTION = re.compile(r'^### ([^\n]+)\n\n```py\n"""\n(.*?)"""\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Defect:
    """Section of docs/upstream.md."""

    title: str
    fields: dict[str, str]
    script: str

    @property
    def package(self) -> str:
        return self.fields["Package"].split()[0]


def defects() -> list[Defect]:
    """Return the defects of the page, in order."""
    return [_read(*parts) for parts in _SECTION.findall(PAGE.read_text(encoding="utf-8"))]


def _read(title: str, text: str, script: str) -> Defect:
    parts = re.split(rf"^({'|'.join(FIELDS)}): ", text, flags=re.MULTILINE)[1:]
    fields = {field: " ".join(value.split()) for field, value in zip(parts[::2], parts[1::2], strict=True)}
    return Defect(title, fields, script)


def said(defect: Defect) -> str:
    """Run the script, and return the last line of its error, or "" if it ends without an error."""
    command = [sys.executable, "-W", "ignore", "-"]
    done = subprocess.run(command, input=defect.script, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return " ".join(lines[-1].split()) if done.returncode and lines else ""


def main(arguments: list[str]) -> int:
    """Run the scripts of a package in this environment."""
    (package,) = arguments
    mine = [one for one in defects() if one.package == package]
    print(f"{package} {version(package)}: {len(mine)} defects")
    gone = [one.title for one in mine if not _shown(one)]
    return int(bool(gone) or not mine)


def _shown(defect: Defect) -> bool:
    result = said(defect)
    shown = bool(result) and result == defect.fields["Prints"]
    print(f"{'still there' if shown else 'OTHERWISE'}  {defect.title}: {result or 'no error'}", flush=True)
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
