"""Whether a model's attention is handed what its cache returned: found out with three tokens, before it is used.

A policy is shown what attention is handed, and decides about what the cache stores; where heads store different
tokens, attention runs on the storage itself. Both hold only of models that hand the cache's own tensors on.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from models_integration.attention.capture import OTHER_TENSORS, Attended, observing
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, device_of, restored_rotation
from models_integration.model.cache_argument import cache_name
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention

__all__ = ["check_handover", "check_readable"]

_TOKENS = 3
_OWN_MASK = "it makes its own attention mask"
# What a modelling file raises that was not written for what it is given.
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


def check_handover(architecture: Architecture, needs: Needs, granularity: Granularity) -> None:
    """A policy that is shown this, and keeps sets of this granularity, can be served.

    The model reads a few tokens into a cache of its own, once for all that is asked of it later.

    Raises:
        SpecError: for a model with a layer that stores nothing of what it reads, or whose attention is handed other
            tensors than its cache returned, or without the layer that is observed; for a rehearsal's template with an
            id that is not the model's.
    """
    asked = () if needs.rehearsal is None else needs.rehearsal.template or ()
    for token_id in (token_id for part in asked for token_id in part):
        if token_id >= architecture.vocabulary:
            raise SpecError("template", token_id, f"must lie in [0, {architecture.vocabulary})")
    handed = _handed(architecture)
    if handed.idle:
        raise SpecError("model", architecture.name, f"its layers {handed.idle} store nothing of the prompt")
    if architecture.watched(needs) and not (handed.keys and handed.queries and (handed.values or not needs.values)):
        raise SpecError("model", architecture.name, OTHER_TENSORS)
    if granularity is not Granularity.MODEL:
        _check_apart(architecture, granularity)


def check_readable(architecture: Architecture, cache: RetainedCache) -> None:
    """The model can read this cache, whose layers or heads store different tokens.

    Raises:
        SpecError: otherwise.
    """
    ragged = any(isinstance(layer, RaggedLayer) for layer in cache.full_layers)
    _check_apart(architecture, Granularity.HEAD if ragged else Granularity.LAYER)


def _check_apart(architecture: Architecture, granularity: Granularity) -> None:
    known = _APART.setdefault(architecture.decoder, set())
    key = architecture.config._attn_implementation, granularity
    if key in known:
        return
    reason = _read_apart(architecture, granularity)
    if reason is not None:
        raise SpecError("model", architecture.name, f"it cannot read layers that store different tokens: {reason}")
    known.add(key)


@dataclass(frozen=True)
class _Handed:
    """Whether every full-attention layer is handed what its cache returned, and asks with one set of queries."""

    keys: bool
    values: bool
    queries: bool
    idle: list[int]
    """Full-attention layers that have not attended."""

    @property
    def all(self) -> bool:
        """Whether nothing is missing."""
        return self.keys and self.values and self.queries and not self.idle


class _Watcher:
    """Compares what each layer attends with to what the cache holds, and keeps the masks."""

    def __init__(self, cache: RetainedCache) -> None:
        self.keys = self.values = self.queries = True
        self.asked = dict[int, Tensor]()
        self.masks: list[object] = []
        self._cache = cache

    def wants_lse(self, layer: int) -> bool:
        """Never."""
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """A layer has attended."""
        index = cast(int, module.layer_idx)
        layer = self._cache.layers[index]
        assert isinstance(layer, RetainedLayer)
        self.keys &= seen.key is layer.keys
        self.values &= seen.value is layer.values
        self.masks.append(seen.mask)
        self.queries &= self.asked.setdefault(index, seen.query) is seen.query


# What was found out, by decoder and attention implementation. What failed is tried again: its cause may be gone.
_HANDED: WeakKeyDictionary[nn.Module, dict[str, _Handed]] = WeakKeyDictionary()
_APART: WeakKeyDictionary[nn.Module, set[tuple[str, Granularity]]] = WeakKeyDictionary()


def _handed(architecture: Architecture) -> _Handed:
    known = _HANDED.setdefault(architecture.decoder, {})
    implementation = architecture.config._attn_implementation
    if implementation not in known or not known[implementation].all:
        cache = RetainedCache(architecture.config)
        watcher = _Watcher(cache)
        try:
            with _aside(architecture), observing(architecture, cache, watcher, architecture.full_layers):
                _read(architecture, cache, _TOKENS)
        except torch.OutOfMemoryError:
            raise
        except _ERRORS as error:
            raise SpecError("model", architecture.name, f"it cannot read {_TOKENS} tokens: {error}") from error
        idle = [index for index in architecture.full_layers if index not in watcher.asked]
        known[implementation] = _Handed(watcher.keys, watcher.values, watcher.queries, idle)
    return known[implementation]


def _read_apart(architecture: Architecture, granularity: Granularity) -> str | None:
    """What fails where every other layer, or head, has evicted a token; None where nothing does."""
    cache = RetainedCache(architecture.config)
    try:
        with _aside(architecture):
            with observing(architecture, cache):
                _read(architecture, cache, _TOKENS)
            cache.compact([_every_other(cache, granularity)])
            with observing(architecture, cache):
                _read(architecture, cache, 1)
    except SpecError as error:
        return error.bound
    except torch.OutOfMemoryError:
        raise
    except _ERRORS as error:
        return _OWN_MASK if _makes_masks(architecture) else f"{type(error).__name__}, {error}"
    return None


def _makes_masks(architecture: Architecture) -> bool:
    """Whether attention is handed another mask than the model is."""
    decoder, cache = architecture.decoder, RetainedCache(architecture.config)
    dtype = next(decoder.parameters()).dtype
    mask = torch.zeros((1, 1, _TOKENS, _TOKENS), dtype=dtype, device=device_of(decoder))
    watcher = _Watcher(cache)
    with (
        suppress(*_ERRORS), _aside(architecture),
        observing(architecture, cache, watcher, architecture.full_layers),
    ):
        _read(architecture, cache, _TOKENS, mask)
    return any(handed is not mask for handed in watcher.masks)


def _every_other(cache: RetainedCache, granularity: Granularity) -> Retention:
    sets = [
        range(1 + (layer + head) % 2)
        for layer, stored in enumerate(cache.full_layers)
        for head in range(stored.heads if granularity is Granularity.HEAD else 1)
    ]
    offsets = np.cumsum([0, *map(len, sets)], dtype=np.int64)
    positions = np.array([position for own in sets for position in own], dtype=np.int64)
    return Retention(positions, offsets, _TOKENS, granularity)


@contextmanager
def _aside(architecture: Architecture) -> Iterator[None]:
    """Call no hooks, and restore torch's random numbers and the rotary embeddings afterwards."""
    hooks = [(module, module._forward_pre_hooks, module._forward_hooks) for module in architecture.decoder.modules()]
    used = {device_of(architecture.decoder), *(one.device for one in architecture.decoder.parameters())}
    devices = {device for device in used if device.type == "cuda"}
    for module, _, _ in hooks:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        with (
            torch.no_grad(), torch.random.fork_rng(sorted(device.index for device in devices)),
            restored_rotation(architecture.decoder),
        ):
            yield
    finally:
        for module, before, after in hooks:
            module._forward_pre_hooks, module._forward_hooks = before, after


def _read(architecture: Architecture, cache: RetainedCache, tokens: int, mask: Tensor | None = None) -> None:
    device = device_of(architecture.decoder)
    ids = torch.arange(tokens, device=device)[None] % architecture.vocabulary
    given = {cache_name(architecture.decoder): cache}
    architecture.decoder.forward(input_ids=ids, attention_mask=mask, use_cache=True, **given)
