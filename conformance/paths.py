"""Paths of the folders of a checkout. In an installed suite, they are paths of the installed packages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPEC, DOCS = ROOT / "spec", ROOT / "docs"
