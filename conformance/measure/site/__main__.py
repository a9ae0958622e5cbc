"""`python -m conformance.measure.site write build/docs`, and `check site` once the pages are built."""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from conformance.measure.site import item_pages
from conformance.measure.site.item_pages import gathered
from conformance.paths import ROOT

# The pages keep the places that they have in the checkout, so that their links stay right.
SOURCES = ("*.md", "docs/**/*", "spec/*.md", "spec/vectors/README.md", "conformance/assurance/proofs/coq/README.md",
           "conformance/assurance/proofs/floats/README.md")
ITEMS = Path("spec", "items")

_HEADING = re.compile(r"^### ([A-Z]{2}(?:-[A-Z0-9]+)+)$", re.MULTILINE)
# What a browser would fetch by itself: a link that a reader may click is not among it.
_FETCHED = re.compile(r"<(?:script|img|iframe)[^>]* src=\"(https?:[^\"]+)|<link[^>]* href=\"(https?:[^\"]+)")


def write(out: Path) -> None:
    """The pages from which the site is built: those of the checkout, with links to items, and a page of each item."""
    shutil.rmtree(out, ignore_errors=True)
    known = gathered()
    for source in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()):
        place = source.relative_to(ROOT)
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / place)
        if place.match("spec/*.md"):
            text = item_pages.linked(source.read_text(encoding="utf-8"), known, "items/")
            text = _HEADING.sub(r"\g<0>\n\n[Implementations and checks](items/\1.md)", text)
            (out / place).write_text(text, encoding="utf-8")
    (out / ITEMS).mkdir()
    (out / ITEMS / "README.md").write_text(item_pages.index(known), encoding="utf-8")
    for one in known.values():
        (out / ITEMS / f"{one.item}.md").write_text(item_pages.page(one, known), encoding="utf-8")


def foreign(site: Path) -> Iterator[str]:
    """Each page that would fetch something from elsewhere, and what."""
    for page in sorted(site.rglob("*.html")):
        for found in _FETCHED.findall(page.read_text(encoding="utf-8")):
            yield f"{page.relative_to(site)} fetches {''.join(found)}"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or 1 where a built page needs a network."""
    parser = argparse.ArgumentParser(prog="conformance.measure.site", description=__doc__)
    parser.add_argument("step", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.step == "write":
        write(options.folder)
        return 0
    found = list(foreign(options.folder))
    print("\n".join(found) or "site: no page needs a network")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
