"""The archive under attack: simultaneous writers and readers, and crafted objects."""

import json
import multiprocessing
import os
import random
import re
import resource
import time
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.plugin import profile_of
from models_integration.archive.errors import ArchiveReadOnly
from models_integration.archive.objects import FORMAT
from models_integration.archive.store import Archive
from models_integration.cache import atomic_file as files
from models_integration.cache.tensor_file import Damaged, header_bytes, parts, read_bytes, write
from spec import SPEC_VERSION
from spec.errors import SpecError
from tests.models_integration.archive.fault_cases import chunk, path_of
from tests.processes import started

pytestmark = pytest.mark.law("an-object-proves-itself")

NOBODY = 65534
PUTS_LEAST = 12


def write_for(seconds: float, folder: Path, first: int, together: Barrier) -> None:
    """Put chunks for some seconds, and at least a minimum number, after all processes are ready.

    For each stored chunk, create a file in the folder `told`.
    """
    torch.set_num_threads(1)
    with Archive(folder) as archive:
        together.wait()
        seed, end = first, time.monotonic() + seconds
        while seed < first + PUTS_LEAST or time.monotonic() < end:
            manifest, tensors = chunk(seed, tokens=64)
            archive.put(manifest, tensors)
            files.publish(folder / "told" / str(seed), [memoryview(manifest.key.encode())])
            seed += 1


def read_for(seconds: float, folder: Path, seed: int, together: Barrier) -> None:
    """Get the chunks that are listed in `told` and compare them, for some seconds, after all processes are ready."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    with Archive(folder) as archive:
        together.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            promised = [path for path in (folder / "told").glob("*") if not path.name.startswith(".")]
            for path in rng.sample(promised, min(20, len(promised))):
                actual = archive.get(path.read_text(), "alice")
                _, tensors = chunk(int(path.name), tokens=64)
                assert actual is not None
                assert torch.equal(actual.tensors["1.v"], tensors["1.v"])
            archive.entries()


def read_where_nothing_can_be_written(folder: Path) -> None:
    """Open and read an archive with read-only files and folders, as a user who is not root."""
    torch.set_num_threads(1)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    home = folder / "archive"
    with Archive(home) as archive:
        keys = [archive.put(*chunk(seed)) for seed in range(3)]
    damaged = home / "objects" / keys[2][:2] / f"{keys[2]}.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    everything = [home, *home.rglob("*")]
    for path in everything:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with Archive(home, limit=1 << 20) as archive:
            assert [entry.key for entry in archive.entries()] == keys
            assert archive.get(keys[0], "alice") is not None
            assert archive.get(keys[2], "alice") is None
            assert archive.verify().quarantined == [keys[2]]
            assert archive.put(*chunk(0)) == keys[0]
            for refused in (
                lambda: archive.put(*chunk(7)), Archive(home, limit=1).gc, lambda: archive.forget("alice"),
            ):
                try:
                    refused()
                except ArchiveReadOnly:
                    continue
                raise AssertionError("a read-only folder went unnoticed")
            assert archive.get(keys[1], "alice") is not None
    finally:
        for path in everything:
            path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_two_writers_and_four_readers_lose_nothing(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Check that every stored chunk can be read by every process, and is listed."""
    seconds = 60.0 if profile_of(pytestconfig) == "nightly" else 1.0
    (tmp_path / "told").mkdir()
    together = multiprocessing.get_context("forkserver").Barrier(6)
    children = [started(write_for, seconds, tmp_path, 1_000_000 * at, together) for at in (1, 2)]
    children += [started(read_for, seconds, tmp_path, at, together) for at in range(4)]
    for child in children:
        child.join()
    codes = [child.exitcode for child in children]
    assert codes == [0] * 6
    promised = {path.read_text() for path in (tmp_path / "told").glob("[0-9]*")}
    with Archive(tmp_path) as archive:
        assert {entry.key for entry in archive.entries()} == promised
        assert len(promised) > 20
        assert archive.verify().clean


MANIFESTS: dict[str, Any] = {
    "a list": [], "null": None, "a text": "x", "no fields": {}, "half of the tokens": {"tokens": 1e30},
    "too many tokens": {"tokens": 10**30}, "negative": {"tokens": -1}, "a surrogate": {"tenant": "\udcff"},
    "no tenant": {"tenant": ""}, "a number as tenant": {"tenant": 3}, "created never": {"created": float("nan")},
    "created at infinity": {"created": float("inf")}, "a dict of layers": {"layers": {}},
    "layers twice": {"layers": [0, 0]},
    "no model": {"model": None}, "markers outside": {"markers": [99]}, "true tokens": {"tokens": True},
    "nested": None,
}


def crafted(folder: Path, manifest: str, tensors: dict[str, Tensor], key: str) -> Path:
    """Write an object with a matching digest under a key."""
    path = path_of(folder, key)
    write(path, {"format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest}, tensors)
    return path


def forged(name: str) -> str:
    manifest = MANIFESTS[name]
    if name == "nested":
        return "[" * 100_000 + "]" * 100_000
    if not isinstance(manifest, dict) or not manifest:
        return json.dumps(manifest)
    return json.dumps({**asdict(chunk(2)[0]), **manifest})


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_crafted_manifest_stops_nothing(tmp_path: Path, name: str) -> None:
    """Check that the object is quarantined when it is read or verified, and that other objects are unchanged."""
    object_key = chunk(2)[0].key
    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
    crafted(tmp_path, forged(name), chunk(2)[1], object_key)
    with Archive(tmp_path) as archive:
        assert [entry.key for entry in archive.entries()] == [key]
        assert archive.verify().quarantined == [object_key]
        crafted(tmp_path, forged(name), chunk(2)[1], object_key)
        assert archive.get(object_key, "alice") is None
        assert archive.get(key, "alice") is not None
        assert archive.verify().in_quarantine == [f"quarantine/damaged-{object_key}.safetensors"]
        assert archive.forget("alice") == 2


PLACES = {f"{layer}.kept": torch.arange(6).expand(2, 6).contiguous() for layer in range(2)}
TENSORS: dict[str, dict[str, Tensor | None]] = {
    "no ids": {"token_ids": None}, "ids of bytes": {"token_ids": torch.zeros(6, dtype=torch.int8)},
    "ids of another length": {"token_ids": torch.zeros(5, dtype=torch.int64)},
    "other ids": {"token_ids": torch.zeros(6, dtype=torch.int64)},
    "keys of other tokens": {"0.k": torch.zeros(2, 5, 8)}, "flat keys": {"0.k": torch.zeros(96)},
    "codes without scales": {"0.k": None, "0.k.q": torch.zeros((2, 6, 8), dtype=torch.int8)},
    "another layer": {"7.k": torch.zeros(2, 6, 8)}, "a kept set": {"0.kept": torch.zeros((1, 6), dtype=torch.int64)},
    "other kept sets": {**PLACES},
}


@pytest.mark.law("an-identity-tells-apart")
@pytest.mark.parametrize("change", TENSORS)
def test_crafted_tensors_are_a_miss_and_cannot_be_put(tmp_path: Path, change: str) -> None:
    manifest, tensors = chunk(2)
    if change == "other kept sets":
        manifest = replace(manifest, kept="0" * 64)
    created = {name: tensor for name, tensor in {**tensors, **TENSORS[change]}.items() if tensor is not None}
    with Archive(tmp_path) as archive:
        crafted(tmp_path, manifest.to_json(), created, manifest.key)
        assert archive.get(manifest.key, "alice") is None
        words = "not those of its manifest" if change.startswith("other") else "tensors"
        with pytest.raises(SpecError, match=words):
            archive.put(manifest, created)
        assert archive.verify().read == 0


@pytest.mark.parametrize("entry", [
    None, [], {"dtype": "F32"}, {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]},
    {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]},
    {"dtype": "F32", "shape": [1], "data_offsets": [0]},
    {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
    {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
    {"dtype": "F32", "shape": "", "data_offsets": [0, 4]}, {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]},
    ((0, 4), (0, 4)), ((0, 8), (4, 12)), ((4, 8),), ((0, 4), (8, 12)),
])
def test_a_crafted_place_of_a_tensor_is_damage(tmp_path: Path, entry: Any) -> None:
    """Check overlapping places and unused bytes too, which no safetensors reader accepts."""
    metadata = {"digest": "0" * 64, "format": FORMAT, "spec": SPEC_VERSION, "manifest": chunk(2)[0].to_json()}
    entries, size = {"x": entry}, 4
    if isinstance(entry, tuple):
        size = entry[-1][1]
        entries = {
            f"t{at}": {"dtype": "U8", "shape": [high - low], "data_offsets": [low, high]}
            for at, (low, high) in enumerate(entry)
        }
    path = tmp_path / "crafted"
    path.write_bytes(header_bytes(metadata, entries) + bytes(size))
    with pytest.raises(Damaged, match="begins at" if isinstance(entry, tuple) else None):
        read_bytes(path)


def least_memory(work: Any) -> int:
    """Return the growth of the peak memory of this process in kilobytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("kind", ["sparse", "sparse that adds up", "a header of 96 MB"])
def test_what_is_too_large_is_a_miss_before_memory_is_taken(quick_path: Path, kind: str) -> None:
    """Check sparse files of 1 TiB, and that forgetting them does not fill the disk."""
    manifest, tensors = chunk(2)
    with Archive(quick_path) as archive:
        path = path_of(quick_path, manifest.key)
        metadata = {"digest": "0" * 64, "format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest.to_json()}
        if kind == "a header of 96 MB":
            path.write_bytes((96 << 20).to_bytes(8, "little") + b" " * (96 << 20))
        else:
            size = 1 << 40 if kind == "sparse that adds up" else 4
            head = header_bytes(metadata, {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
            path.write_bytes(head)
            os.truncate(path, len(head) + (1 << 40))
        assert least_memory(lambda: archive.get(manifest.key, "alice")) < 32 << 10
        assert not path.exists()
        assert archive.forget("alice") == 1
        assert archive.put(manifest, tensors) == manifest.key


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("tenant", ["\udcff", "", "x" * 257, "a\nb", "a\0b"])
def test_a_bad_tenant_is_refused_before_anything_is_published(tmp_path: Path, tenant: str) -> None:
    with Archive(tmp_path) as archive:
        key = archive.put(*chunk(1))
        manifest, tensors = chunk(2, tenant=tenant)
        for refused in (
            lambda: archive.put(manifest, tensors), lambda: archive.get(key, tenant), lambda: archive.entries(tenant),
            lambda: archive.forget(tenant),
        ):
            with pytest.raises(SpecError, match="tenant"):
                refused()
        assert archive.verify().clean
        assert [entry.key for entry in archive.entries()] == [key]


def wrong_tensors() -> dict[str, Any]:
    dense = torch.ones(2, 6, 8)
    return {
        "int32": dense.int(), "bool": dense.bool(), "complex": dense.to(torch.complex64),
        "float8": dense.to(torch.float8_e4m3fn), "meta": dense.to("meta"), "sparse": dense.to_sparse(),
        "no tensor": [1.0],
    }


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", wrong_tensors())
def test_tensors_that_no_file_can_hold_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Check wrong tensors in place of the ids too, before a salt of the tenant is created."""
    manifest, tensors = chunk(1)
    with Archive(tmp_path) as archive:
        for place in ("1.k", "token_ids"):
            with pytest.raises(SpecError, match=re.escape(f"tensors['{place}']")):
                archive.put(manifest, {**tensors, place: wrong_tensors()[name]})
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_link_in_the_place_of_an_object_is_a_miss(tmp_path: Path) -> None:
    manifest, tensors = chunk(1)
    whole = b"".join(parts({"format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest.to_json()}, tensors)[0])
    (tmp_path / "outside").write_bytes(whole)
    with Archive(tmp_path / "a") as archive:
        path = path_of(tmp_path / "a", manifest.key)
        path.symlink_to(tmp_path / "outside")
        assert archive.get(manifest.key, "alice") is None
        assert archive.put(manifest, tensors) == manifest.key
        assert not path.is_symlink()
    assert (tmp_path / "outside").read_bytes() == whole
