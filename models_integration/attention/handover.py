"""Test, with three tokens, that a model's attention uses the tensors that the cache returns.

A policy scores the tensors passed to attention, and evicts tokens stored in the cache. If heads store different tokens,
attention runs on the cache's storage. Both are correct only if the model passes the cache's own tensors to attention.
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
from models_integration.model.isolated_forward import (
    FORWARD_ERRORS,
    isolated_forward,
    read_tokens,
    states_agree,
    trial_forward,
)
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention

__all__ = ["check_handover", "check_readable"]

_TOKENS = 3
# Number of tokens in the test of eviction, and the tokens that are kept.
_SEEN, _KEPT = 8, [0, 3, 4, 7]
_BY_SLOT = "the attention depends on the distance between cache slots, as with ALiBi, and eviction changes the distance"
LATENTS = (
    "the cache stores one latent for all heads (MLA): use a policy that keeps the same tokens in all heads of a layer"
)
_INDEXED = (
    "an indexer of the model selects the tokens for attention: use streamingllm, which needs no attention weights"
)
_OWN_POSITIONS = "the model numbers positions by a separate rule, which differs from the positions of kvspec"
_UNSEEN = "the attention cannot be observed, because the model does not use the attention interface of transformers"
_OWN_MASK = "the model makes a separate attention mask"


def check_handover(architecture: Architecture, needs: Needs, granularity: Granularity) -> None:
    """Check that the model supports policies with these needs and this granularity.

    The model processes a few tokens with a separate cache. The result is stored for later checks.

    Raises:
        SpecError: if a layer stores nothing, if attention uses different tensors than the cache returned, if the
            observed layer does not exist, or if a template of KVzip has an id outside the model's vocabulary.
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
    """Check that evicting tokens has the same effect as masking tokens: keys and biases must not depend on slots.

    Raises:
        SpecError: if the effects differ, as with ALiBi.
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
    with trial_forward(architecture, "a token after eviction"):
        evicted, masked = _after_eviction(architecture, gather=True), _after_eviction(architecture, gather=False)
    if not states_agree(evicted, masked):
        raise SpecError("model", architecture.name, _BY_SLOT)
    known.add(key)


def _check_numbering(architecture: Architecture) -> None:
    """Check that tokens without position ids have the positions 0, 1, ..., as in kvspec.

    Raises:
        SpecError: if the positions differ, as with RoBERTa, whose positions begin after the id of the padding token.
    """
    with trial_forward(architecture, f"{_TOKENS} tokens"):
        own, ours = (
            read_tokens(architecture, RetainedCache(architecture.config), _TOKENS, start=start)
            for start in (None, 0)
        )
    if not states_agree(ours, own):
        raise SpecError("model", architecture.name, _OWN_POSITIONS)


def _check_causal(architecture: Architecture) -> None:
    """Check that later tokens do not change the stored keys and values of earlier tokens.

    Raises:
        SpecError: if a stored value changes, as with PaliGemma, whose prompts attend in both directions.
    """
    with trial_forward(architecture, f"{_SEEN} tokens"):
        fewer, more = (
            read_tokens(architecture, RetainedCache(architecture.config), tokens) for tokens in (_TOKENS, _SEEN)
        )
    if not states_agree(more[:, :_TOKENS], fewer):
        raise SpecError("model", architecture.name, "the attention of the model is not causal")


def _after_eviction(architecture: Architecture, gather: bool) -> Tensor:
    """Return the last hidden state of a token after some earlier tokens were evicted (`gather`) or masked."""
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
    """Check that the model can use this cache, in which layers or heads store different tokens.

    Raises:
        SpecError: if the model cannot use the cache.
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
        bound = f"needs the same tokens in all layers and heads of the cache: {reason}"
        raise SpecError("model", architecture.name, bound)
    known.add(key)


@dataclass(frozen=True)
class _Handed:
    """Result of the test: whether each full-attention layer uses the cache's tensors and a single set of queries."""

    keys: bool
    values: bool
    queries: bool
    observed: bool
    """True if every full-attention layer was observed."""

    @property
    def all(self) -> bool:
        """Return True if all conditions are satisfied."""
        return self.keys and self.values and self.queries and self.observed


class _Watcher:
    """Watcher that compares each layer's attention inputs with the cache's tensors, and records the masks."""

    def __init__(self, cache: RetainedCache) -> None:
        self.keys = self.values = self.queries = True
        self.asked = dict[int, Tensor]()
        self.masks: list[object] = []
        self._cache = cache

    def wants_lse(self, layer: int) -> bool:
        """Return False: the log-sum-exp is not needed."""
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """Compare the inputs of a layer's attention with the cache."""
        layer = self._cache.layers[seen.layer]
        assert isinstance(layer, RetainedLayer)
        self.keys &= seen.key is layer.keys
        self.values &= seen.value is layer.values
        self.masks.append(seen.mask)
        self.queries &= self.asked.setdefault(seen.layer, seen.query) is seen.query


# Results of successful tests, by decoder and attention implementation. Failed tests are repeated at the next use.
_HANDED: WeakKeyDictionary[nn.Module, dict[str, _Handed]] = WeakKeyDictionary()
_APART: WeakKeyDictionary[nn.Module, set[tuple[str, Granularity]]] = WeakKeyDictionary()


def _handed(architecture: Architecture) -> _Handed:
    known = _HANDED.setdefault(architecture.decoder, {})
    implementation = architecture.config._attn_implementation
    if implementation not in known or not known[implementation].all:
        cache = RetainedCache(architecture.config)
        watcher = _Watcher(cache)
        with (
            trial_forward(architecture, f"{_TOKENS} tokens"),
            observing(architecture, cache, watcher, architecture.full_layers),
        ):
            read_tokens(architecture, cache, _TOKENS)
        observed = set(architecture.full_layers) <= set(watcher.asked)
        known[implementation] = _Handed(watcher.keys, watcher.values, watcher.queries, observed)
    return known[implementation]


def _read_apart(architecture: Architecture, granularity: Granularity) -> str | None:
    """Evict a token from every second layer or head. Return the reason if the model then fails, otherwise None."""
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
    """Return True if attention receives a different mask than the mask passed to the model."""
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
