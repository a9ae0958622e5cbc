"""What an archived chunk is: its identity, and what else its object says about it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models_integration.archive.errors import OtherDtype, OtherFrequencies, WrongModel
from spec import SPEC_VERSION

__all__ = [
    "ALL", "Manifest", "ModelIdentity", "ids_digest", "kept_digest", "meaning", "raw_bytes", "weights_digest",
]

ALL = "all"
"""What a chunk of which nothing was evicted says in the place of a digest of its kept tokens."""


@dataclass(frozen=True)
class ModelIdentity:
    """Whose keys and values these are."""

    weights: str
    """sha256 of all parameters (`weights_digest`), or another name that changes when they do."""
    rope: str
    """`Rotary.fingerprint`: slots, styles, bytes and dtypes of the frequencies."""
    rope_dtype: str
    """`Rotary.dtype`."""
    dtype: str
    """Of the keys and values as they were computed."""

    def check(self, other: "ModelIdentity") -> None:
        """Refuse keys and values that this model cannot read.

        Raises:
            WrongModel, OtherDtype, OtherFrequencies: named by what differs first.
        """
        if self.weights != other.weights:
            raise WrongModel(f"archived under weights {other.weights[:16]}, this model has {self.weights[:16]}")
        if self.rope_dtype != other.rope_dtype:
            raise OtherDtype(
                f"archived with frequencies in {other.rope_dtype}, this model keeps them in {self.rope_dtype}:"
                " load with dtype=..., since model.to(...) rounds the buffer"
            )
        if self.rope != other.rope:
            raise OtherFrequencies(f"archived under rotation {other.rope[:16]}, this model has {self.rope[:16]}")


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


def weights_digest(model: nn.Module) -> str:
    """sha256 of every parameter's name, dtype, shape and bytes; seconds per gigabyte."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(_canonical([name, str(parameter.dtype), list(parameter.shape)]).encode())
        digest.update(raw_bytes(parameter))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, shared with it where it is contiguous and on the CPU."""
    array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)
