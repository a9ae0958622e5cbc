"""An archived chunk as one file: what it says of itself, and its proof.

A plain object is a file of `cache.tensor_file`. An encrypted one holds one tensor of bytes, the AES-256-GCM ciphertext
of such a file; the header is authenticated with it, and there is no digest.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models_integration.archive.errors import ForeignVersion, KeyUnavailable, OtherDtype, OtherFrequencies, WrongModel
from models_integration.archive.keyring import Cipher
from models_integration.archive.names import CLEAR, check_tenant, identity_digits, key_of
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
from spec import SPEC_VERSION
from spec.errors import SpecError

__all__ = [
    "ALL", "FORMAT", "Claim", "Manifest", "check_contents", "check_input", "check_model", "ids_digest", "kept_digest",
    "key_for", "meaning", "pieces", "read_claim", "read_object", "stated_owner",
]

FORMAT = "kvarc/3"
ALL = "all"
"""What a chunk of which nothing was evicted says in the place of a digest of its kept tokens."""
HEADER_MOST = 1 << 20
"""Bytes of an object's header; 300 layers need 200 KiB."""
TOKENS_MOST = 1 << 40
SECONDS_MOST = 1 << 53
PADDING_LEAST = 256


@dataclass(frozen=True)
class Manifest:
    """Everything that an object says of itself, in the clear unless it is encrypted; the token ids are a tensor."""

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
        """Of an object in the clear: the same inputs, under the same meaning of the specification, give the same one.
        """
        digest = hashlib.sha256(self.identity.encode()).hexdigest()
        return key_of(identity_digits(digest), self.tenant.encode(), CLEAR)

    @property
    def identity(self) -> str:
        """All that the key is made from."""
        parts = {**vars(self), "model": vars(self.model), "spec": meaning(SPEC_VERSION)}
        del parts["created"]
        return _canonical(parts)

    def to_json(self) -> str:
        """Canonical JSON."""
        return _canonical(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: for text that is no manifest.
        """
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(found, dict) or found.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"a manifest has {', '.join(cls.__dataclass_fields__)}")
        for name in ("markers", "layers"):
            found[name] = tuple(found[name])
        made = cls(**{**found, "model": ModelIdentity(**found["model"])})
        made.check()
        return made

    def check(self) -> None:
        """The values are those of a chunk.

        Raises:
            ValueError, TypeError: otherwise, a SpecError for the tenant.
        """
        check_tenant(self.tenant)
        for value in (self.ids, self.form, self.codec, self.kept, *vars(self.model).values()):
            if not isinstance(value, str):
                raise TypeError(f"{value!r} is no text")
        numbers = (self.tokens, self.hidden, self.start, self.stop, *self.markers, *self.layers)
        if not all(type(number) is int and 0 <= number <= TOKENS_MOST for number in numbers):
            raise ValueError(f"its numbers do not lie in [0, {TOKENS_MOST}]")
        if max((self.hidden, self.start, self.stop, *self.markers)) > self.tokens:
            raise ValueError(f"it speaks of tokens beyond its {self.tokens}")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("its layers do not ascend")
        if type(self.created) not in (int, float) or not 0 <= self.created < SECONDS_MOST:
            raise ValueError("it was made at no time")


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def ids_digest(ids: Sequence[int]) -> str:
    """sha256 of token ids as little-endian int64."""
    wide = torch.tensor(list(ids), dtype=torch.int64, device="cpu")
    return hashlib.sha256(wide.numpy().astype("<i8").tobytes()).hexdigest()


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


def check_contents(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """The tensors are those of which the manifest speaks.

    Raises:
        Damaged: otherwise.
    """
    expected = {"token_ids"}
    ids = tensors.get("token_ids")
    if ids is None or ids.dtype != torch.int64 or tuple(ids.shape) != (manifest.tokens,):
        raise Damaged(f"it has no ids of its {manifest.tokens} tokens")
    for layer in manifest.layers:
        stored = manifest.tokens
        if manifest.kept != ALL:
            expected |= {f"{layer}.kept"}
            stored = _stored(tensors.get(f"{layer}.kept"), manifest.tokens)
        for name in (f"{layer}.k", f"{layer}.v"):
            parts = {name} if name in tensors else {f"{name}.{part}" for part in ("q", "s", "first", "last")}
            expected |= parts
            if not parts <= tensors.keys() or not _fits([tensors[part] for part in sorted(parts)], stored):
                raise Damaged(f"its tensor {name} is not one of {stored} tokens")
    if tensors.keys() != expected:
        raise Damaged("it has other tensors than its manifest says")


def _stored(places: Tensor | None, tokens: int) -> int:
    if places is None or places.dtype != torch.int64 or places.ndim != 2:
        raise Damaged("it does not say which tokens it stores")
    if places.numel() and not (int(places.min()) >= -1 and int(places.max()) < tokens):
        raise Damaged("it stores tokens that it has not")
    return places.shape[1]


def _fits(parts: Sequence[Tensor], stored: int) -> bool:
    """Of one tensor, or of the four of a coded one: first, last, codes, scales; (heads, tokens, channels)."""
    if not all(part.ndim == 3 for part in parts):
        return False
    whole = [part.shape[1] for part in parts[:3]]
    heads = {(part.shape[0], part.shape[2]) for part in parts[:3]}
    scales = all(n in (1, m) for n, m in zip(parts[-1].shape, parts[-2].shape, strict=True)) if parts[1:] else True
    return sum(whole) == stored and len(heads) == 1 and scales


def check_input(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """A chunk can be stored and read again.

    Raises:
        SpecError: for a tenant's name, a manifest or tensors that no object can have.
    """
    check_tenant(manifest.tenant)
    try:
        if Manifest.from_json(manifest.to_json()) != manifest:
            raise ValueError("it does not come back as it was")
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError("manifest", manifest.form, f"cannot be stored: {error}") from error
    try:
        check_contents(manifest, tensors)
    except Damaged as error:
        raise SpecError("tensors", sorted(tensors)[:8], f"cannot be stored: {error}") from error


def key_for(manifest: Manifest, cipher: Cipher | None) -> str:
    """The key of a chunk, encrypted or not."""
    return manifest.key if cipher is None else cipher.key_of(manifest.identity)


def pieces(
    manifest: Manifest, tensors: Mapping[str, Tensor], cipher: Cipher | None,
) -> tuple[list[memoryview], Late | None]:
    """The file, in parts that are written one after the other, and the digest, where it is not encrypted.

    The tensors are not copied unless encrypted. The digest's place holds zeros in the parts. An encrypted object says
    in the clear its key and when it was made, and is padded, so that its size tells its length only roughly.
    """
    versions = {"format": FORMAT, "spec": SPEC_VERSION}
    plain, digest = parts({**versions, "manifest": manifest.to_json()}, tensors)
    if cipher is None:
        return plain, digest
    nonce = cipher.fresh_nonce()
    whole = b"".join(plain)
    whole += bytes(padded(len(whole)) - len(whole))
    size = len(whole) + cipher.overhead
    about = _canonical({"created": manifest.created, "key": key_for(manifest, cipher)})
    header = header_bytes(
        {"digest": "", **versions, "manifest": about, "nonce": nonce.hex()},
        {"sealed": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}},
    )
    return [memoryview(header), memoryview(cipher.encrypt(nonce, whole, header))], None


def padded(size: int) -> int:
    """The next of the few sizes that encrypted objects have: at most 12 % more (PADME)."""
    size = max(size, PADDING_LEAST)
    exponent = size.bit_length() - 1
    step = 1 << (exponent - exponent.bit_length())
    return -(-size // step) * step


class Claim(NamedTuple):
    """What an object says in the clear; nothing is proved."""

    key: str
    tenant: str | None
    """None of an encrypted object."""
    created: float


def read_claim(path: Path) -> Claim:
    """What an object says of itself, without its tensors.

    Raises:
        Damaged: when the header cannot be read.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated.
        OSError: from the file system.
    """
    _check_regular(path)
    header = header_at(path, HEADER_MOST)
    _check_versions(header)
    if "nonce" not in header.metadata:
        manifest = _manifest(header)
        return Claim(manifest.key, manifest.tenant, manifest.created)
    try:
        about = json.loads(header.metadata["manifest"])
        created = about["created"]
        if not isinstance(about["key"], str) or type(created) not in (int, float) or not 0 <= created < SECONDS_MOST:
            raise ValueError("it has no key")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"its header cannot be read: {error}") from error
    return Claim(about["key"], None, float(created))


def stated_owner(path: Path) -> tuple[object, str | None]:
    """The tenant and the key of which a file of any version speaks; None where it does not. Nothing is proved.

    Raises:
        Damaged: when its header cannot be read.
        OSError: from the file system.
    """
    _check_regular(path)
    try:
        stated = json.loads(header_at(path, HEADER_MOST).metadata["manifest"])
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its manifest cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise Damaged("its manifest is none")
    key = stated.get("key")
    return stated.get("tenant"), key if isinstance(key, str) else None


def read_object(path: Path, key: Callable[[], Cipher | None]) -> tuple[str, Manifest, dict[str, Tensor]]:
    """A proved object's key, manifest and tensors, which share one buffer that nobody else holds.

    `key` is asked if the object is encrypted.

    Raises:
        Damaged: when the bytes are not those that were written.
        ForeignVersion: when another version of the format, or of the specification's meaning, is stated, and the bytes
            are as they were written.
        KeyUnavailable: for an encrypted object without a cipher.
        OSError: from the file system.
    """
    _check_regular(path)
    data = read_bytes(path, HEADER_MOST)
    header = header_of(data)
    if "nonce" not in header.metadata:
        prove(data)
        manifest = _manifest(header)
        found, name = tensors_of(header, data), key_for(manifest, None)
    else:
        cipher = key()
        if cipher is None:
            raise KeyUnavailable("the object is encrypted, and no key is given")
        plain = cipher.decrypt(header.metadata["nonce"], data[header.size :], bytes(data[: header.size].numpy()))
        if plain is None:
            raise Damaged("its tag does not fit")
        inner = header_of(plain)
        manifest = _manifest(inner)
        found, name = tensors_of(inner, plain), key_for(manifest, cipher)
    check_contents(manifest, found)
    return name, manifest, found


def _check_regular(path: Path) -> None:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise Damaged("it is a link, or no file")


def _check_versions(header: Header) -> None:
    metadata = header.metadata
    if metadata["format"] != FORMAT:
        raise ForeignVersion(f"it was written as {metadata['format']!r}; this is {FORMAT}")
    if meaning(metadata.get("spec", "")) != meaning(SPEC_VERSION):
        raise ForeignVersion(f"it was written under specification {metadata.get('spec')}; this is {SPEC_VERSION}")


def _manifest(header: Header) -> Manifest:
    _check_versions(header)
    try:
        return Manifest.from_json(header.metadata["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its manifest cannot be read: {error}") from error
