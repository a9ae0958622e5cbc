"""Where things lie in a checkout; of an installed suite, where the packages do."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPEC, DOCS = ROOT / "spec", ROOT / "docs"
