"""The archive against the disk, as ratios inside one run: best of several, the sides taken in turns.

put: against writing the same bytes to a new file and its fsync. get: against reading the file, its sha256 and, where it
is encrypted, its decryption. `python -m pytest conformance/benchmarks/bench_archive.py -p no:xdist -s`.
"""

import hashlib
import json
import os
from pathlib import Path
from time import perf_counter

import pytest

from conformance.injection.chunks import chunk
from models_integration.archive.store import Archive

TOKENS, LAYERS = 8192, 28  # of two heads of 8 channels: 14 MiB in bfloat16, a turn of 256 tokens of a 7B model
ROUNDS = 7
PUT_AT_LEAST, GET_AT_LEAST = 0.5, 0.8


def plain_write(path: Path, data: bytes) -> float:
    start = perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return perf_counter() - start


def plain_read(path: Path) -> float:
    start = perf_counter()
    hashlib.sha256(path.read_bytes()).digest()
    return perf_counter() - start


def test_put_and_get_keep_up_with_the_disk(tmp_path: Path) -> None:
    put, get, write, read = [], [], [], []
    with Archive(tmp_path / "archive") as archive:
        for seed in range(ROUNDS):
            manifest, tensors = chunk(seed, tokens=TOKENS, layers=LAYERS)
            start = perf_counter()
            key = archive.put(manifest, tensors)
            put.append(perf_counter() - start)
            path = tmp_path / "archive" / "objects" / key[:2] / f"{key}.safetensors"
            write.append(plain_write(tmp_path / f"plain{seed}", path.read_bytes()))
            for _ in range(3):
                read.append(plain_read(path))
                start = perf_counter()
                assert archive.get(key, "alice") is not None
                get.append(perf_counter() - start)
    report("put", min(write) / min(put), path.stat().st_size / min(put))
    report("get", min(read) / min(get), path.stat().st_size / min(get))
    assert min(write) / min(put) >= PUT_AT_LEAST
    assert min(read) / min(get) >= GET_AT_LEAST


def test_an_encrypted_get_keeps_up_with_decryption(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from models_integration.archive.keyring import Keyring

    ring = Keyring(tmp_path / "keys", bytes(32))
    get, read = [], []
    with Archive(tmp_path, ring) as archive:
        key = archive.put(*chunk(0, tokens=TOKENS, layers=LAYERS))
        path = tmp_path / "objects" / key[:2] / f"{key}.safetensors"
        cipher, data = ring.cipher("alice"), path.read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        nonce = read_nonce(header)
        for _ in range(3 * ROUNDS):
            start = perf_counter()
            again = path.read_bytes()
            assert cipher.decrypt(nonce, memoryview(again)[len(header) :], header) is not None
            read.append(perf_counter() - start)
            start = perf_counter()
            assert archive.get(key, "alice") is not None
            get.append(perf_counter() - start)
    report("encrypted get", min(read) / min(get), path.stat().st_size / min(get))
    assert min(read) / min(get) >= GET_AT_LEAST


def read_nonce(header: bytes) -> str:
    nonce: str = json.loads(header[8:])["__metadata__"]["nonce"]
    return nonce


def report(what: str, ratio: float, speed: float) -> None:
    print(f"\n{what}: {ratio:.2f} of the plain way, {speed / 1e6:.0f} MB/s")
