"""An archived chunk as one file: what it says of itself, its tensors as integers and back, and its proof.

A plain object is a file of `cache.tensor_file`. An encrypted one holds one tensor of bytes, the AES-256-GCM ciphertext
of such a file; the header is authenticated with it, and there is no digest.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models_integration.archive.errors import ForeignVersion, KeyUnavailable, OtherDtype, OtherFrequencies, WrongModel
from models_integration.archive.keyring import Cipher
from models_integration.cache.atomic_file import Late
from models_integration.cache.tensor_file import (
    Damaged,
    Header,
    header_at,
    header_bytes,
    header_of,
    parts,
    prove,
    read_bytes,
    tensors_of,
)
from models_integration.model.identity import ModelIdentity
from reference.injection.quantisers import ARMS, SCHEMES, SMALLEST_SCALE, quantised_region
from spec import SPEC_VERSION
from spec.errors import SpecError

__all__ = [
    "ALL", "FORMAT", "Manifest", "check_model", "decode", "encode", "ids_digest", "kept_digest", "meaning", "pieces",
    "read_manifest", "read_object",
]

FORMAT = "kvarc/3"
ALL = "all"
"""What a chunk of which nothing was evicted says in the place of a digest of its kept tokens."""
BITS = 8
HIGHEST = 2 ** (BITS - 1) - 1


@dataclass(frozen=True)
class Manifest:
    """Everything that an object says in the clear; the token ids are a tensor beside the keys."""

    tenant: str
    ids: str
    """`ids_digest` of the wrapped chunk's token ids."""
    tokens: int
    form: str
    hidden: int
    markers: tuple[int, ...]
    start: int
    stop: int
    codec: str
    layers: tuple[int, ...]
    """Indices of the archived layers, ascending."""
    kept: str
    """`kept_digest` of a compacted chunk, so that it is never taken for the full one; ALL of that."""
    model: ModelIdentity
    created: float
    """Seconds since the epoch; no part of the identity."""

    @property
    def key(self) -> str:
        """sha256 of the identity: the same inputs, under the same meaning of the specification, give the same object.
        """
        parts = {**vars(self), "model": vars(self.model), "spec": meaning(SPEC_VERSION)}
        del parts["created"]
        return hashlib.sha256(_canonical(parts).encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON."""
        return _canonical(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: for text that is no manifest.
        """
        found = json.loads(text)
        if found.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"a manifest has {', '.join(cls.__dataclass_fields__)}")
        for name in ("markers", "layers"):
            found[name] = tuple(found[name])
        return cls(**{**found, "model": ModelIdentity(**found["model"])})


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def ids_digest(ids: Sequence[int]) -> str:
    """sha256 of token ids as little-endian int64."""
    return hashlib.sha256(torch.tensor(list(ids), dtype=torch.int64).numpy().astype("<i8").tobytes()).hexdigest()


def meaning(version: str) -> str:
    """Of a version of the specification, what changes when some result does: all but the last number."""
    return version.rpartition(".")[0]


def kept_digest(kept: Mapping[int, Tensor] | None, layers: Sequence[int]) -> str:
    """sha256 of the places of the tokens that these layers and their heads store; ALL where nothing was evicted."""
    if kept is None:
        return ALL
    return hashlib.sha256(_canonical([[layer, kept[layer].tolist()] for layer in layers]).encode()).hexdigest()


def check_model(archived: ModelIdentity, reader: ModelIdentity) -> None:
    """Refuse keys and values that a model cannot read.

    Raises:
        WrongModel, OtherDtype, OtherFrequencies: named by what differs first.
    """
    if reader.weights != archived.weights:
        raise WrongModel(f"archived under weights {archived.weights[:16]}, this model has {reader.weights[:16]}")
    if reader.rotation_dtype != archived.rotation_dtype:
        raise OtherDtype(
            f"archived with frequencies in {archived.rotation_dtype}, this model keeps them in"
            f" {reader.rotation_dtype}: load with dtype=..., since model.to(...) rounds the buffer"
        )
    if reader.rotation != archived.rotation:
        raise OtherFrequencies(
            f"archived under rotation {archived.rotation[:16]}, this model has {reader.rotation[:16]}"
        )
    if reader.config != archived.config:
        raise WrongModel(f"archived under config {archived.config[:16]}, this model has {reader.config[:16]}")


def encode(layers: Mapping[int, tuple[Tensor, Tensor]], arm: str, depth: int) -> dict[str, Tensor]:
    """Tensors of an object from keys and values (heads, n, d) by layer; `depth` is the number of the model's layers.

    The twin of reference/injection/quantisers.py on tensors.

    Raises:
        SpecError: for an unknown arm.
    """
    if arm not in ARMS:
        raise SpecError("codec", arm, f"must be one of {', '.join(ARMS)}")
    found: dict[str, Tensor] = {}
    for layer, pair in layers.items():
        chosen, tokens = quantised_region(ARMS[arm], depth, pair[0].shape[1])
        for name, x, scheme in zip("kv", pair, (ARMS[arm].keys, ARMS[arm].values), strict=True):
            coded = scheme is not None and layer in chosen and len(tokens) > 0
            found |= _coded(f"{layer}.{name}", x, SCHEMES[str(scheme)], tokens) if coded else {f"{layer}.{name}": x}
    return found


def decode(tensors: Mapping[str, Tensor], layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values (heads, n, d) of one layer, in the dtype in which they were computed."""
    keys, values = (_decoded(tensors, f"{layer}.{name}", dtype) for name in "kv")
    return keys, values


def _coded(name: str, x: Tensor, axes: tuple[int, ...], tokens: range) -> dict[str, Tensor]:
    """Codes, scales, and the tokens before and after the region as they were."""
    part = x[:, tokens.start : tokens.stop].double()
    step = (part.abs().amax(axes, keepdim=True) / HIGHEST).clamp_min(SMALLEST_SCALE).float()
    codes = (part / step.double()).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
    return {
        f"{name}.q": codes, f"{name}.s": step, f"{name}.first": x[:, : tokens.start].contiguous(),
        f"{name}.last": x[:, tokens.stop :].contiguous(),
    }


def _decoded(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    if name in tensors:
        return tensors[name].to(dtype)
    part = (tensors[f"{name}.q"].float() * tensors[f"{name}.s"]).to(dtype)
    return torch.cat([tensors[f"{name}.first"].to(dtype), part, tensors[f"{name}.last"].to(dtype)], dim=1)


def pieces(
    manifest: Manifest, tensors: Mapping[str, Tensor], cipher: Cipher | None,
) -> tuple[list[memoryview], Late | None]:
    """The file, in parts that are written one after the other, and the digest, where it is not encrypted.

    The tensors are not copied unless encrypted. The digest's place holds zeros in the parts.
    """
    metadata = {"format": FORMAT, "spec": SPEC_VERSION, "manifest": manifest.to_json()}
    plain, digest = parts(metadata, tensors)
    if cipher is None:
        return plain, digest
    nonce = cipher.fresh_nonce()
    size = sum(len(part) for part in plain) + cipher.overhead
    header = header_bytes(
        {"digest": "", **metadata, "nonce": nonce.hex()},
        {"sealed": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}},
    )
    return [memoryview(header), memoryview(cipher.encrypt(nonce, b"".join(plain), header))], None


def read_manifest(path: Path) -> Manifest:
    """What an object says of itself, without its tensors; nothing is proved yet.

    Raises:
        Damaged: when the header cannot be read.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated.
        OSError: from the file system.
    """
    return _manifest(header_at(path))


def read_object(path: Path, key: Callable[[], Cipher | None]) -> tuple[Manifest, dict[str, Tensor]]:
    """A proved object: tensors that share one buffer, which nobody else holds. `key` is asked if it is encrypted.

    Raises:
        Damaged: when the bytes are not those that were written.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated, and the bytes
            are as they were written.
        KeyUnavailable: for an encrypted object without a cipher.
        OSError: from the file system.
    """
    data = read_bytes(path)
    header = header_of(data)
    if "nonce" not in header.metadata:
        prove(data)
        return _manifest(header), tensors_of(header, data)
    cipher = key()
    if cipher is None:
        raise KeyUnavailable("the object is encrypted, and no key is given")
    plain = cipher.decrypt(header.metadata["nonce"], data[header.size :], bytes(data[: header.size].numpy()))
    if plain is None:
        raise Damaged("its tag does not fit")
    return _manifest(header), tensors_of(header_of(plain), plain)


def _manifest(header: Header) -> Manifest:
    metadata = header.metadata
    if metadata["format"] != FORMAT:
        raise ForeignVersion(f"it was written as {metadata['format']!r}; this is {FORMAT}")
    if meaning(metadata.get("spec", "")) != meaning(SPEC_VERSION):
        raise ForeignVersion(f"it was written under specification {metadata.get('spec')}; this is {SPEC_VERSION}")
    try:
        return Manifest.from_json(metadata["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its manifest cannot be read: {error}") from error
