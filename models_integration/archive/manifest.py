"""Manifest of an archived chunk, and checks that the chunk's tensors match the manifest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from models_integration.archive.errors import OtherDtype, OtherFrequencies, WrongModel
from models_integration.archive.keyring import CLEAR, check_tenant, identity_digits, key_of
from models_integration.cache.tensor_file import NAMES, Damaged
from models_integration.model.identity import ModelIdentity
from spec import SPEC_VERSION
from spec.errors import SpecError

__all__ = [
    "ALL", "SECONDS_MOST", "Manifest", "canonical", "check_contents", "check_input", "check_model", "ids_digest",
    "kept_digest", "meaning",
]

ALL = "all"
"""Value of the field `kept` for a chunk without evicted tokens."""
TOKENS_MOST = 1 << 40
SECONDS_MOST = 1 << 53


@dataclass(frozen=True)
class Manifest:
    """Metadata of an object. The metadata is encrypted if the object is encrypted. The token ids are a tensor."""

    tenant: str
    ids: str
    """Result of `ids_digest` for the token ids of the wrapped chunk."""
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
    """Result of `kept_digest`: the hash of a compacted chunk's kept tokens, or ALL for a full chunk."""
    model: ModelIdentity
    created: float
    """Time of creation in seconds since the epoch. It is not part of the identity."""

    @property
    def key(self) -> str:
        """Key of an unencrypted object. Equal inputs with an equivalent specification version give equal keys.
        """
        digest = hashlib.sha256(self.identity.encode()).hexdigest()
        return key_of(identity_digits(digest), self.tenant.encode(), CLEAR)

    @property
    def identity(self) -> str:
        """Text of all fields from which the key is computed."""
        parts = {**vars(self), "model": vars(self.model), "spec": meaning(SPEC_VERSION)}
        del parts["created"]
        return canonical(parts)

    def to_json(self) -> str:
        """Return the manifest as canonical JSON."""
        return canonical(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Return the manifest from the result of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: if the text is not a manifest.
        """
        try:
            values = json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"a manifest has {', '.join(cls.__dataclass_fields__)}")
        for name in ("markers", "layers"):
            values[name] = tuple(values[name])
        manifest = cls(**{**values, "model": ModelIdentity(**values["model"])})
        manifest.check()
        return manifest

    def check(self) -> None:
        """Check that the values are valid.

        Raises:
            ValueError, TypeError: if a value is invalid. For the tenant, the error is a SpecError.
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


def canonical(value: object) -> str:
    """Return canonical JSON: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def ids_digest(ids: Sequence[int] | Tensor) -> str:
    """Return the SHA-256 of token ids as little-endian int64."""
    whole = ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=torch.int64, device="cpu")
    return hashlib.sha256(whole.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def meaning(version: str) -> str:
    """Return a specification version without the last number. These numbers change if a result changes."""
    return version.rpartition(".")[0]


def kept_digest(kept: Mapping[int, Tensor] | None, layers: Sequence[int]) -> str:
    """Return the SHA-256 of the indices of the tokens that layers and heads store, or ALL if nothing was evicted."""
    if kept is None:
        return ALL
    return hashlib.sha256(canonical([[layer, kept[layer].tolist()] for layer in layers]).encode()).hexdigest()


def check_model(archived: ModelIdentity, reader: ModelIdentity) -> None:
    """Check that a model can use archived keys and values.

    Raises:
        WrongModel, OtherDtype, OtherFrequencies: for the first difference.
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
    """Check that the tensors match the manifest.

    Raises:
        Damaged: if a tensor does not match.
    """
    expected = {"token_ids"}
    ids = tensors.get("token_ids")
    if ids is None or ids.dtype != torch.int64 or tuple(ids.shape) != (manifest.tokens,):
        raise Damaged(f"it has no ids of its {manifest.tokens} tokens")
    if ids_digest(ids) != manifest.ids:
        raise Damaged("its token ids are not those of its manifest")
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
    if manifest.kept != ALL:
        kept = {layer: tensors[f"{layer}.kept"] for layer in manifest.layers}
        if kept_digest(kept, manifest.layers) != manifest.kept:
            raise Damaged("its kept tokens are not those of its manifest")


def _stored(places: Tensor | None, tokens: int) -> int:
    if places is None or places.dtype != torch.int64 or places.ndim != 2:
        raise Damaged("it does not say which tokens it stores")
    if places.numel() and not (int(places.min()) >= -1 and int(places.max()) < tokens):
        raise Damaged("it stores tokens that it has not")
    return places.shape[1]


def _fits(parts: Sequence[Tensor], stored: int) -> bool:
    """Return True if one tensor, or first, last, codes and scales of a quantised tensor, have the right shapes."""
    if not all(part.ndim == 3 for part in parts):
        return False
    whole = [part.shape[1] for part in parts[:3]]
    heads = {(part.shape[0], part.shape[2]) for part in parts[:3]}
    scales = all(n in (1, m) for n, m in zip(parts[-1].shape, parts[-2].shape, strict=True)) if parts[1:] else True
    return sum(whole) == stored and len(heads) == 1 and scales


def check_input(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Check that a chunk can be stored and read again.

    Raises:
        SpecError: if the tenant's name, the manifest or the tensors are invalid.
    """
    check_tenant(manifest.tenant)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    try:
        if Manifest.from_json(manifest.to_json()) != manifest:
            raise ValueError("it does not come back as it was")
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError("manifest", manifest.form, f"cannot be stored: {error}") from error
    try:
        check_contents(manifest, tensors)
    except Damaged as error:
        raise SpecError("tensors", sorted(map(str, tensors))[:8], f"cannot be stored: {error}") from error


def _check_tensor(name: object, tensor: object) -> None:
    """Check that a tensor can be stored.

    Raises:
        SpecError: if the bytes of the tensor cannot be stored in a file.
    """
    if not isinstance(tensor, Tensor):
        raise SpecError(f"tensors[{name!r}]", type(tensor).__name__, "must be a torch.Tensor")
    if tensor.dtype not in NAMES or tensor.layout is not torch.strided or tensor.is_meta:
        raise SpecError(
            f"tensors[{name!r}]", f"{tensor.dtype}, {tensor.layout}, device {tensor.device.type}",
            f"must be dense, with values, of {', '.join(str(dtype) for dtype in NAMES)}",
        )
