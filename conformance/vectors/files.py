"""The published vectors, as files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.paths import SPEC
from conformance.vectors.json_values import Json

__all__ = ["HOME", "path_of", "published", "stages", "stored"]

HOME = SPEC / "vectors"


def path_of(stage: str) -> Path:
    """Where the vectors of a stage stand."""
    return HOME / f"{stage}.json"


def stages() -> list[str]:
    """Those that have a file, by name."""
    return sorted({path.stem for path in HOME.glob("*.json")} - {"schema"})


def stored(stage: str) -> Json:
    """The published file; None where there is none yet."""
    path = path_of(stage)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def published() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Stage, group and test of every vector."""
    for stage in stages():
        for group in stored(stage)["testGroups"]:
            for test in group["tests"]:
                yield stage, group, test
