"""Whether a model's attention is handed what its cache returned: found out with three tokens, before it is used.

A policy is shown what attention is handed, and decides about what the cache stores; where heads store different
tokens, attention runs on the storage itself. Both hold only of models that hand the cache's own tensors on.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from models_integration.attention.capture import OTHER_TENSORS, Attended, observing, reads_attention
from models_integration.attention.recurrence import check_turns
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import EMPTY, StoredRows
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, device_of
from models_integration.model.isolated_forward import FORWARD_ERRORS, isolated_forward, read_tokens, states_agree
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention

__all__ = ["check_handover", "check_readable"]

_TOKENS = 3
# Of so many tokens, these stay when it is tested what eviction does to the others.
_SEEN, _KEPT = 8, [0, 3, 4, 7]
_BY_SLOT = "its attention depends on the distance of slots, as with ALiBi: eviction changes that distance"
LATENTS = (
    "it stores one latent for all heads (MLA): use a policy that keeps one set for the model or for each layer"
)
_INDEXED = (
    "its indexer chooses the tokens that attention reads: use streamingllm, which keeps one set and reads no attention"
)
_OWN_POSITIONS = "it numbers positions by its own rule: the positions that kvspec passes would be different"
_UNSEEN = "its attention cannot be observed: it does not go through transformers' attention interface"
_OWN_MASK = "it makes its own attention mask"


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
    if not handed.observed:
        raise SpecError("model", architecture.name, _UNSEEN)
    if architecture.latent and granularity is Granularity.HEAD:
        raise SpecError("model", architecture.name, LATENTS)
    if architecture.indexed and (reads_attention(needs) or granularity is not Granularity.MODEL):
        raise SpecError("model", architecture.name, _INDEXED)
    as_stored = handed.keys and (handed.values or not needs.values)
    if architecture.watched(needs) and not (handed.queries and (as_stored or architecture.latent)):
        raise SpecError("model", architecture.name, OTHER_TENSORS)
    _check_positions(architecture)
    if needs.rehearsal is not None:
        check_turns(architecture)
    if granularity is not Granularity.MODEL:
        _check_apart(architecture, granularity)


def _check_positions(architecture: Architecture) -> None:
    """Evicted tokens leave the same as masked ones, so that keys and biases depend on positions and not on slots.

    Raises:
        SpecError: otherwise, as with ALiBi.
    """
    known = _APART.setdefault(architecture.decoder, set())
    key = architecture.config._attn_implementation, Granularity.MODEL
    if key in known:
        return
    rotated = any("inv_freq" in name for name, _ in architecture.decoder.named_buffers())
    if architecture.takes_positions and (architecture.wraps or not rotated):
        _check_numbering(architecture)
    if architecture.wraps or not architecture.causal:
        _check_causal(architecture)
    if architecture.known_positions:
        known.add(key)
        return
    try:
        with isolated_forward(architecture):
            evicted, masked = _after_eviction(architecture, gather=True), _after_eviction(architecture, gather=False)
    except FORWARD_ERRORS as error:
        raise SpecError("model", architecture.name, f"it cannot read a token after eviction: {error}") from error
    if not states_agree(evicted, masked):
        raise SpecError("model", architecture.name, _BY_SLOT)
    known.add(key)


def _check_numbering(architecture: Architecture) -> None:
    """Tokens without position ids have the positions 0, 1, ..., as kvspec numbers them.

    Raises:
        SpecError: otherwise, as with RoBERTa, whose first position is behind its padding's.
    """
    try:
        with isolated_forward(architecture):
            own, ours = (
                read_tokens(architecture, RetainedCache(architecture.config), _TOKENS, start=start)
                for start in (None, 0)
            )
    except FORWARD_ERRORS as error:
        raise SpecError("model", architecture.name, f"it cannot read {_TOKENS} tokens: {error}") from error
    if not states_agree(ours, own):
        raise SpecError("model", architecture.name, _OWN_POSITIONS)


def _check_causal(architecture: Architecture) -> None:
    """Later tokens do not change what earlier ones store.

    Raises:
        SpecError: otherwise, as with PaliGemma, whose prompts attend in both directions.
    """
    try:
        with isolated_forward(architecture):
            fewer, more = (
                read_tokens(architecture, RetainedCache(architecture.config), tokens) for tokens in (_TOKENS, _SEEN)
            )
    except FORWARD_ERRORS as error:
        raise SpecError("model", architecture.name, f"it cannot read {_SEEN} tokens: {error}") from error
    if not states_agree(more[:, :_TOKENS], fewer):
        raise SpecError("model", architecture.name, "its attention is not causal")


def _after_eviction(architecture: Architecture, gather: bool) -> Tensor:
    """The last hidden state of a token after others, of which some were evicted, or are masked where they stand."""
    cache, kept = RetainedCache(architecture.config), torch.tensor(_KEPT, device="cpu")
    stays = torch.arange(_SEEN, device="cpu")
    visible = torch.where(torch.isin(stays, kept), stays, EMPTY).expand(2, -1)
    with observing(architecture, cache):
        read_tokens(architecture, cache, _SEEN, rows=2)
        for layer in cache.full_layers:
            if gather:
                layer.retain(kept)
            else:
                cast(DenseLayer, layer).rows = StoredRows(visible, torch.full((2,), _SEEN, device="cpu"))
        return read_tokens(architecture, cache, 1, rows=2)


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
    observed: bool
    """Whether every full-attention layer was observed."""

    @property
    def all(self) -> bool:
        """Whether nothing is missing."""
        return self.keys and self.values and self.queries and self.observed


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
        layer = self._cache.layers[seen.layer]
        assert isinstance(layer, RetainedLayer)
        self.keys &= seen.key is layer.keys
        self.values &= seen.value is layer.values
        self.masks.append(seen.mask)
        self.queries &= self.asked.setdefault(seen.layer, seen.query) is seen.query


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
            with isolated_forward(architecture), observing(architecture, cache, watcher, architecture.full_layers):
                read_tokens(architecture, cache, _TOKENS)
        except torch.OutOfMemoryError:
            raise
        except FORWARD_ERRORS as error:
            raise SpecError("model", architecture.name, f"it cannot read {_TOKENS} tokens: {error}") from error
        observed = set(architecture.full_layers) <= set(watcher.asked)
        known[implementation] = _Handed(watcher.keys, watcher.values, watcher.queries, observed)
    return known[implementation]


def _read_apart(architecture: Architecture, granularity: Granularity) -> str | None:
    """What fails where every other layer, or head, has evicted a token; None where nothing does."""
    cache = RetainedCache(architecture.config)
    try:
        with isolated_forward(architecture):
            with observing(architecture, cache):
                read_tokens(architecture, cache, _TOKENS)
            cache.compact([_every_other(cache, granularity)])
            with observing(architecture, cache):
                read_tokens(architecture, cache, 1)
    except SpecError as error:
        return error.bound
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        return _OWN_MASK if _makes_masks(architecture) else f"{type(error).__name__}, {error}"
    return None


def _makes_masks(architecture: Architecture) -> bool:
    """Whether attention is handed another mask than the model is."""
    decoder, cache = architecture.decoder, RetainedCache(architecture.config)
    dtype = next(decoder.parameters()).dtype
    mask = torch.zeros((1, 1, _TOKENS, _TOKENS), dtype=dtype, device=device_of(decoder))
    watcher = _Watcher(cache)
    with (
        suppress(*FORWARD_ERRORS), isolated_forward(architecture),
        observing(architecture, cache, watcher, architecture.full_layers),
    ):
        read_tokens(architecture, cache, _TOKENS, mask)
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
