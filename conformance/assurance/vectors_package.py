"""Packs the vectors for any language: `python -m conformance.assurance.vectors_package [FOLDER]` writes a zip file."""

import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from conformance.paths import ROOT, SPEC
from conformance.vectors import files
from spec import SPEC_VERSION

README = """# kvspec vectors {version}

{tests} tests in {files} files: what published methods of KV-cache eviction must keep, for implementations in any
language. Begin with [vectors/README.md](vectors/README.md), and with the readers in `vectors/readers`, in C, JavaScript
and Python. The pages beside it have the text of each item. The licence is Apache 2.0.
"""
DATE = (1980, 1, 1, 0, 0, 0)
"""Of every member, so that equal contents are equal bytes."""


def contents() -> Mapping[str, bytes]:
    """Each member by its path: vectors, schema and readers, the pages that name items, the licence."""
    pages = [*SPEC.glob("*.md"), SPEC / "implementing.json", SPEC / "VERSION"]
    vectors = [path for path in files.HOME.rglob("*") if path.suffix in (".json", ".md", ".py", ".c", ".js")]
    numbers = [files.stored(stage)["numberOfTests"] for stage in files.stages()]
    readme = README.format(version=SPEC_VERSION, tests=sum(numbers), files=len(numbers))
    found = {path.relative_to(SPEC).as_posix(): path.read_bytes() for path in [*pages, *vectors]}
    licence = (ROOT / "LICENSE").read_bytes()
    return {**found, "README.md": readme.encode(), "LICENSE": licence}


def packed(folder: Path) -> Path:
    """Write the zip file, named after the version; equal contents give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"kvspec-vectors-{SPEC_VERSION}"
    with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in sorted(contents().items()):
            archive.writestr(zipfile.ZipInfo(f"{name}/{path}", DATE), content, zipfile.ZIP_DEFLATED)
    return folder / f"{name}.zip"


def main(arguments: Sequence[str]) -> None:
    """Write the file into the folder that is given, else into `build`."""
    made = packed(Path(arguments[0]) if arguments else ROOT / "build")
    print(f"{made}: {made.stat().st_size // 1024} KiB, {len(contents())} files")


if __name__ == "__main__":
    main(sys.argv[1:])
