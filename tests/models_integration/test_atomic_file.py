"""Replaced files appear whole, with the intended rights."""

import errno
import fcntl
import os
import stat
import threading
from pathlib import Path

import pytest

from models_integration.cache import atomic_file
from models_integration.cache.atomic_file import WHOLE, publish, publish_readable


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
    with pytest.raises(OSError, match=r"No space left on device: .*page") as caught:
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


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_a_file_has_no_name_before_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check systems without unnamed files too: the file has a name that the next writer finds."""
    seen = list[list[str]]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        seen.append([name for name in os.listdir(tmp_path) if name.startswith(".tmp-")])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    for text in (b"one", b"two"):
        publish(tmp_path / "a", [memoryview(text)], nameless=True)
        assert (tmp_path / "a").read_bytes() == text
        assert (rights(tmp_path / "a"), os.listdir(tmp_path)) == (0o600, ["a"])
        monkeypatch.setattr(atomic_file, "_locked_nameless", lambda folder, mode: None)
    can = hasattr(os, "O_TMPFILE") and not seen[0]
    assert [len(names) for names in seen] == [0 if can else 1, 0, 1, 0]


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    left = {
        f".tmp-a-12-00c0ffee{WHOLE}": True, ".tmp-a-12-00c0ffee": False, ".tmp-a-13-00c0ffee": True,
        f".tmp-a-14-00c0ffee{WHOLE}": False, ".tmp-a-15-00c0ffee": False, f".tmp-a-b-12-00c0ffee{WHOLE}": False,
        f".tmp-ab-12-00c0ffee{WHOLE}": False, f".tmp-a-12-00c0ffee{WHOLE}-more": False,
    }
    for name in left:
        (tmp_path / name).write_bytes(b"half")
    for name in (".tmp-a-13-00c0ffee", f".tmp-a-14-00c0ffee{WHOLE}", ".tmp-a-15-00c0ffee"):
        os.utime(tmp_path / name, (1, 1))
    held = [tmp_path / f".tmp-a-14-00c0ffee{WHOLE}", tmp_path / ".tmp-a-15-00c0ffee"]
    with held[0].open("rb") as whole, held[1].open("rb") as old:
        for file in (whole, old):
            fcntl.flock(file, fcntl.LOCK_EX)
        publish(tmp_path / "a", [memoryview(b"text")], nameless=True)
    assert set(os.listdir(tmp_path)) == {"a", *(name for name, goes in left.items() if not goes)}
