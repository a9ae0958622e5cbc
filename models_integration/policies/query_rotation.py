"""The rotation of a model's queries, for policies that take it off."""

from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture
from models_integration.model.isolated_forward import FORWARD_ERRORS, isolated_forward, read_tokens
from models_integration.model.rotation import (
    CHANGING,
    PROBE_START,
    LayerRotary,
    explain_rotation,
    probed,
    rotary_buffers,
    rotary_module,
    scaling_of,
)
from spec.errors import SpecError

__all__ = ["read_rotation"]

# What was found out, by decoder.
_FOUND: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def read_rotation(architecture: Architecture) -> dict[str, Any]:
    """Read the frequencies `inv_freq` of the full-attention layers, and the `factor` inside the rotary tables.

    Raises:
        SpecError: if these layers do not share one rotation of whole heads, in pairs of the two halves of a head, with
            the same frequencies at every length.
    """
    name, decoder = architecture.name, architecture.decoder
    if architecture.latent:
        raise SpecError("model", name, "must have a rotary embedding that changes the whole key (not MLA)")
    if decoder not in _FOUND:
        _FOUND[decoder] = _shared_buffer(architecture)
    inv_freq = decoder.get_buffer(_FOUND[decoder]).detach().to("cpu").double().numpy()
    return {"inv_freq": inv_freq, "factor": scaling_of(decoder, _FOUND[decoder])}


def _shared_buffer(architecture: Architecture) -> str:
    """The name of the frequencies by which every full-attention layer rotates its keys.

    A single token is read at two positions: attention has no choice, so that only the rotation makes keys differ.
    """
    name, decoder = architecture.name, architecture.decoder
    frequencies = {key: buffer.detach().clone() for key, buffer in rotary_buffers(decoder)}
    if not frequencies:
        raise SpecError("model", name, "has no rotary frequencies")
    if changing := {rotary_module(decoder, key)[2] for key in frequencies} & set(CHANGING):
        raise SpecError("model", name, f"the rotary frequencies must not change with the length ({changing.pop()})")
    before, after = _probe(architecture)
    kinds = {explain_rotation(*pair, PROBE_START, frequencies) for pair in zip(before, after, strict=True)}
    if LayerRotary() in kinds:
        raise SpecError("model", name, "has a full-attention layer without rotary positions")
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or kind.buffer is None:
        raise SpecError("model", name, "must have one rotary embedding for all full-attention layers")
    channels, d = 2 * len(frequencies[kind.buffer]), before[0]["keys"].shape[-1]
    if channels != d:
        raise SpecError("model", name, f"must rotate all {d} channels of a head, but rotates {channels}")
    if kind.style != "half_split":
        reason = "must rotate the two halves of a head against each other, but rotates neighbouring channels"
        raise SpecError("model", name, reason)
    return kind.buffer


def _probe(architecture: Architecture) -> list[list[Mapping[str, Tensor]]]:
    """What the full-attention layers store of a token at position 0, and at a later one."""
    caches = {start: RetainedCache(architecture.config) for start in (0, PROBE_START)}
    try:
        with isolated_forward(architecture):
            for start, cache in caches.items():
                read_tokens(architecture, cache, 1, start=start)
    except FORWARD_ERRORS as error:
        reason = f"the model cannot process a token at position {PROBE_START}: {error}"
        raise SpecError("model", architecture.name, reason) from error
    return [
        [probed(cast(Tensor, layer.keys), cast(Tensor, layer.values)) for layer in cache.full_layers]
        for cache in caches.values()
    ]
