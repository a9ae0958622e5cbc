"""Fixtures of the archive's tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from models_integration.archive.store import Archive

MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory, if possible: thousands of fsyncs on a disk would add nothing to these tests."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def archive(quick_path: Path) -> Iterator[Archive]:
    """Yield an unencrypted archive in a quick folder."""
    with Archive(quick_path) as opened:
        yield opened
