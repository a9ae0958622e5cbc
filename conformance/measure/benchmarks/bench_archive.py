"""The archive against the disk, as ratios inside one run: the median over rounds, in each of which both sides run.

Not the best of each side: on a shared machine the page cache has lucky rounds, which the two sides do not share.

put: against writing the same bytes to a new file and its fsync. get: against reading the file, its sha256 and, where it
is encrypted, its decryption. `python -m pytest conformance/measure/benchmarks/bench_archive.py -p no:xdist -s`.
"""

import hashlib
import json
import os
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest
import torch
from torch import Tensor

from models_integration.archive.manifest import ALL, Manifest, ids_digest
from models_integration.archive.store import Archive
from models_integration.model.identity import ModelIdentity

TOKENS, LAYERS = 8192, 28  # of two heads of 8 channels: 14 MiB in bfloat16, a turn of 256 tokens of a 7B model
ROUNDS = 11
PUT_AT_LEAST, GET_AT_LEAST = 0.5, 0.8


def chunk(seed: int) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and the tensors of a raw chunk of random keys and values."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (TOKENS,), generator=generator)
    tensors = {
        f"{layer}.{name}": torch.randn((2, TOKENS, 8), generator=generator).to(torch.bfloat16)
        for layer in range(LAYERS) for name in ("k", "v")
    }
    manifest = Manifest(
        "alice", ids_digest(ids.tolist()), TOKENS, "raw", 0, (), 0, TOKENS, "none", tuple(range(LAYERS)), ALL,
        ModelIdentity("weights", "float32", "rotation", "config", "bfloat16"), float(seed),
    )
    return manifest, {"token_ids": ids, **tensors}


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
            manifest, tensors = chunk(seed)
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
    size = path.stat().st_size
    assert report("put", write, put, size) >= PUT_AT_LEAST
    assert report("get", read, get, size) >= GET_AT_LEAST


def test_an_encrypted_get_keeps_up_with_decryption(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from models_integration.archive.keyring import Keyring

    ring = Keyring(tmp_path / "keys", bytes(range(32)))
    get, read = [], []
    with Archive(tmp_path, ring) as archive:
        key = archive.put(*chunk(0))
        path = tmp_path / "objects" / key[:2] / f"{key}.safetensors"
        aead, data = ring.cipher("alice")._aead, path.read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        nonce = read_nonce(header)
        for _ in range(3 * ROUNDS):
            start = perf_counter()
            again = path.read_bytes()
            assert aead.decrypt(bytes.fromhex(nonce), memoryview(again)[len(header) :], header)
            read.append(perf_counter() - start)
            start = perf_counter()
            assert archive.get(key, "alice") is not None
            get.append(perf_counter() - start)
    assert report("encrypted get", read, get, path.stat().st_size) >= GET_AT_LEAST


def read_nonce(header: bytes) -> str:
    nonce: str = json.loads(header[8:])["__metadata__"]["nonce"]
    return nonce


def report(what: str, plain: list[float], ours: list[float], size: int) -> float:
    ratios = sorted(a / b for a, b in zip(plain, ours, strict=True))
    ratio, best = median(ratios), min(plain) / min(ours)
    print(
        f"\n{what}: {ratio:.2f} of the plain way (quartiles {ratios[len(ratios) // 4]:.2f} and"
        f" {ratios[3 * len(ratios) // 4]:.2f}; best against best {best:.2f}), {size / median(ours) / 1e6:.0f} MB/s"
    )
    return ratio
