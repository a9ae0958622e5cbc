"""The rotation of a model's queries, for policies that take it off."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

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
        raise SpecError("model", name, "its rotation turns a part of each key beside a latent (MLA)")
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
    for kind in (rotary_module(decoder, key)[2] for key in frequencies):
        if kind in CHANGING:
            raise SpecError("model", name, f"its rotary frequencies change with the length ({kind})")
    before, after = RetainedCache(architecture.config), RetainedCache(architecture.config)
    try:
        with isolated_forward(architecture):
            for cache, start in ((before, 0), (after, PROBE_START)):
                read_tokens(architecture, cache, 1, start=start)
    except FORWARD_ERRORS as error:
        raise SpecError("model", name, f"it cannot read a token at position {PROBE_START}: {error}") from error
    kinds = {
        explain_rotation(probed(old.keys, old.values), probed(new.keys, new.values), PROBE_START, frequencies)
        for old, new in zip(before.full_layers, after.full_layers, strict=True)
    }
    d = before.full_layers[0].keys.shape[-1]
    turned = {2 * len(frequencies[kind.buffer]) for kind in kinds if kind is not None and kind.buffer is not None}
    if reason := _fault(kinds, turned, d):
        raise SpecError("model", name, reason)
    (kind,) = kinds
    return kind.buffer


def _fault(kinds: set[LayerRotary | None], turned: set[int], d: int) -> str | None:
    if None in kinds:
        return "its rotary frequencies do not rotate the keys of each full-attention layer"
    if LayerRotary() in kinds:
        return "has a full-attention layer without rotary positions"
    if len(kinds) > 1:
        return "its full-attention layers have different rotations"
    if turned != {d}:
        return f"rotates {turned.pop()} of a head's {d} channels, and must rotate all"
    if next(iter(kinds)).style != "half_split":
        return "rotates neighbouring channels against each other, and must rotate the two halves of a head"
    return None
