"""Fixtures of the archive's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from models_integration.archive.store import Archive

MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: a thousand fsyncs of a disk say nothing about killed processes."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def archive(quick_path: Path) -> Iterator[Archive]:
    """An archive in that folder, in the clear."""
    with Archive(quick_path) as opened:
        yield opened
