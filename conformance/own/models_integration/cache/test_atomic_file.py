"""Files that are replaced appear whole, with the rights they are to have."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from models_integration.cache.atomic_file import publish, publish_readable


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.law("nothing-readable-without-the-key")
def test_what_is_published_is_the_owners_alone_and_pages_are_for_all(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        publish(tmp_path / "mine", [memoryview(b"a"), memoryview(b""), memoryview(b"b")])
        publish_readable(tmp_path / "page", b"c")
    finally:
        os.umask(umask)
    assert (tmp_path / "mine").read_bytes() == b"ab"
    assert (rights(tmp_path / "mine"), rights(tmp_path / "page")) == (0o600, 0o644)


@pytest.mark.law("unusable-after-a-failure")
def test_a_failing_disk_leaves_the_old_file_and_says_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "page"
    publish_readable(path, b"old")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="No space left") as caught:
        publish_readable(path, b"new")
    assert type(caught.value) is OSError
    assert path.read_bytes() == b"old"
    assert [left.name for left in tmp_path.iterdir()] == ["page"]


@pytest.mark.law("saved-is-what-was")
def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    publish_readable(tmp_path / "page", b"old")
    (tmp_path / "link").symlink_to("page")
    publish_readable(tmp_path / "link", b"new")
    assert (tmp_path / "page").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=publish_readable, args=(tmp_path / "pipe", b"text"))
    writer.start()
    assert (tmp_path / "pipe").read_bytes() == b"text"
    writer.join()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
