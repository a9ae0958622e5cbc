"""Which model this is: one record that saved caches, archived chunks, calibrations and rows of results carry."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.model.architecture import by_layer
from models_integration.model.rotation import rotary_buffers, rotary_module, scaling_of
from models_integration.model.weights import CHANGING
from spec.errors import SpecError

__all__ = ["ModelIdentity", "identify"]

CHUNK_BYTES = 1 << 24
"""How much of a tensor is on the host at a time."""

# What of a config decides how keys and values are read, and is neither in the parameters nor in the rotary buffers.
CONFIG = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "layer_types",
    "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "no_rope_layers", "rope_interleave",
    "rope_parameters", "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelIdentity:
    """A model by all that its keys, its values and its answers come from, in parts: a refusal names what differs.

    It does not depend on the device. It is made once by who needs it, and handed on; nobody stores it for a model,
    whose values may change.
    """

    weights: str
    """sha256 of every parameter: names, dtypes, shapes, bytes."""
    rotation_dtype: str
    """The dtypes of the rotary frequencies; `.to(bfloat16)` rounds them."""
    rotation: str
    """sha256 of every buffer of rotary frequencies that the model starts from, and of its factor."""
    config: str
    """sha256 of the model's class and of what its config says about reading keys and values."""
    dtype: str
    """Of the keys and values that it computes."""

    @property
    def digest(self) -> str:
        """sha256 of all of the above, in hexadecimal."""
        return _sha(asdict(self))

    def named(self, label: str) -> str:
        """A label with 16 digits of the digest: two models of one label have two names."""
        return f"{label}@{self.digest[:16]}"


def identify(model: PreTrainedModel) -> ModelIdentity:
    """The identity of a model; seconds for each gigabyte of parameters.

    Raises:
        SpecError: for a parameter without values (on the device "meta").
    """
    frequencies = list(_frequencies(model))
    config = model.config.get_text_config(decoder=True)
    stated = {name: values[0] if len(values := by_layer(config, name)) == 1 else values for name in CONFIG}
    return ModelIdentity(
        _weights(model), ",".join(sorted({_plain(values.dtype) for _, values, _ in frequencies})),
        _rotation(frequencies), _sha([type(model).__name__, stated]), _plain(model.dtype),
    )


def _weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        for part in _described(name, parameter):
            digest.update(part)
    return digest.hexdigest()


def _rotation(frequencies: Iterable[tuple[str, Tensor, float]]) -> str:
    digest = hashlib.sha256()
    for name, values, factor in frequencies:
        digest.update(json.dumps(factor).encode())
        for part in _described(name, values):
            digest.update(part)
    return digest.hexdigest()


def _frequencies(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, float]]:
    """Name, frequencies and factor of each rotary buffer; those of before, where a long prompt exchanges them."""
    for name, buffer in sorted(rotary_buffers(model)):
        module, prefix, kind = rotary_module(model, name)
        changes = any(word in kind for word in CHANGING)
        start: Tensor = getattr(module, f"{prefix}original_inv_freq", buffer) if changes else buffer
        yield name, start, scaling_of(model, name)


def _described(name: str, tensor: Tensor) -> Iterator[bytes | memoryview]:
    """What a tensor is called and like, then its bytes, a chunk at a time."""
    if tensor.is_meta:
        raise SpecError("model", name, "has no values: it must be loaded, not on the device meta")
    yield json.dumps([name, _plain(tensor.dtype), list(tensor.shape)]).encode()
    flat = tensor.detach().flatten()
    for part in torch.split(flat, CHUNK_BYTES // flat.element_size()):
        # Of no or one element, any stride is contiguous; a view as bytes wants 1.
        yield part.cpu().as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
