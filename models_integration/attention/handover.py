"""Tests, with a few tokens, that a model's attention uses the cache's tensors, and that recurrent layers continue.

A policy scores the tensors passed to attention, and evicts tokens stored in the cache. If heads store different tokens,
attention runs on the cache's storage. Both are correct only if the model passes the cache's own tensors to attention.

In some releases of transformers, recurrent layers lose the state if several tokens follow earlier tokens, or process
padding as tokens. The model's code is already wrong with a full cache, so a comparison with the full cache cannot
detect the error.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from models_integration.attention.capture import (
    NO_HIDDEN,
    OTHER_TENSORS,
    AttentionInputs,
    Watcher,
    observing,
    reads_attention,
)
from models_integration.cache.dense_layer import DenseLayer, RetainedLayer
from models_integration.cache.positions import EMPTY, StoredRows
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, device_of
from models_integration.model.cache_argument import cache_name
from models_integration.model.isolated_forward import (
    FORWARD_ERRORS,
    isolated_forward,
    read_tokens,
    states_agree,
    trial_forward,
)
from models_integration.model.seams import attention_of
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention

__all__ = ["check_attention_uses_cache_tensors", "check_readable", "check_recurrence"]

_TOKENS, _PADDING = 3, 3
# Number of tokens in the test of eviction, and the tokens that are kept.
_SEEN, _KEPT = 8, [0, 3, 4, 7]
_BY_SLOT = "the attention depends on the distance between cache slots, as with ALiBi, and eviction changes the distance"
LATENTS = (
    "the cache stores one latent for all heads (MLA): use a policy that keeps the same tokens in all heads of a layer"
)
_INDEXED = (
    "an indexer of the model selects the tokens for attention: use streamingllm, which needs no attention weights"
)
_OTHER_POSITIONS = "the model numbers positions by a separate rule, which differs from the positions of kvspec"
_UNSEEN = "the attention cannot be observed, because the model does not use the attention interface of transformers"
_OTHER_MASK = "the model makes a separate attention mask"
_NUMBERS = "the decoder also numbers padding positions: pass rows of equal length"
_TURN = "the recurrent layers lose the state if a later forward pass has several tokens: pass later text token by token"
_PADDED = "the recurrent layers process padding like tokens: pass rows of equal length"
_PADDED_TURN = "in later forward passes, the recurrent layers process padding like tokens: pass rows of equal length"

# Tests that each decoder has passed. Failed tests are repeated at the next use.
_PASSED: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


def _run_once(architecture: Architecture, test: object, run: Callable[[], None]) -> None:
    """Run a test that the decoder has not passed yet. `run` raises the error of a failed test."""
    passed = _PASSED.setdefault(architecture.decoder, set())
    if test not in passed:
        run()
        passed.add(test)


def check_attention_uses_cache_tensors(architecture: Architecture, needs: Needs, granularity: Granularity) -> None:
    """Check that the model supports policies with these needs and this granularity.

    The model processes a few tokens with a separate cache. The result is stored for later checks.

    Raises:
        SpecError: if a layer stores nothing, or if attention uses different tensors than the cache returned. Also if
            the observed layer does not exist, or if a template of KVzip has an id outside the model's vocabulary. Also
            if the policy needs hidden states and an attention module receives none.
    """
    asked = () if needs.rehearsal is None else needs.rehearsal.template or ()
    for token_id in (token_id for part in asked for token_id in part):
        if token_id >= architecture.vocabulary:
            raise SpecError("template", token_id, f"must lie in [0, {architecture.vocabulary})")
    wrong, implementation = _wrong_inputs(architecture), attention_of(architecture.config)
    if "layers" in wrong:
        raise SpecError("model", architecture.name, _UNSEEN)
    if architecture.latent and granularity is Granularity.HEAD:
        raise SpecError("model", architecture.name, LATENTS)
    if architecture.indexed and (reads_attention(needs) or granularity is not Granularity.MODEL):
        raise SpecError("model", architecture.name, _INDEXED)
    stored = () if architecture.latent else ("keys", "values") if needs.values else ("keys",)
    if architecture.watched(needs) and wrong & {"queries", *stored}:
        raise SpecError("model", architecture.name, OTHER_TENSORS)
    if needs.hidden and "hidden" in wrong:
        raise SpecError("model", architecture.name, NO_HIDDEN)
    _run_once(architecture, (implementation, "positions"), partial(_check_positions, architecture))
    if needs.rehearsal is not None:
        _check_turns(architecture)
    if granularity is not Granularity.MODEL:
        _check_apart(architecture, granularity)


def _check_positions(architecture: Architecture) -> None:
    """Check that evicting tokens has the same effect as masking tokens: keys and biases must not depend on slots.

    Raises:
        SpecError: if the effects differ, as with ALiBi.
    """
    rotated = any("inv_freq" in name for name, _ in architecture.decoder.named_buffers())
    if architecture.takes_positions and (architecture.wraps or not rotated):
        _check_numbering(architecture)
    if architecture.wraps or not architecture.causal:
        _check_causal(architecture)
    if architecture.known_positions:
        return
    with trial_forward(architecture, "a token after eviction"):
        evicted, masked = _after_eviction(architecture, gather=True), _after_eviction(architecture, gather=False)
    if not states_agree(evicted, masked):
        raise SpecError("model", architecture.name, _BY_SLOT)


def _check_numbering(architecture: Architecture) -> None:
    """Check that tokens without position ids have the positions 0, 1, ..., as in kvspec.

    Raises:
        SpecError: if the positions differ, as with RoBERTa, whose positions begin after the id of the padding token.
    """
    with trial_forward(architecture, f"{_TOKENS} tokens"):
        default, numbered = (
            read_tokens(architecture, RetainedCache(architecture.config), _TOKENS, start=start)
            for start in (None, 0)
        )
    if not states_agree(numbered, default):
        raise SpecError("model", architecture.name, _OTHER_POSITIONS)


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
        for layer in cast(list[DenseLayer], cache.full_layers):
            if gather:
                layer.retain(kept)
            else:
                layer.rows = StoredRows(visible, torch.full((2,), _SEEN, device="cpu"))
        return read_tokens(architecture, cache, 1, rows=2)


def check_readable(architecture: Architecture, cache: RetainedCache) -> None:
    """Check that the model can use this cache, in which layers or heads store different tokens.

    Raises:
        SpecError: if the model cannot use the cache.
    """
    ragged = any(isinstance(layer, RaggedLayer) for layer in cache.full_layers)
    _check_apart(architecture, Granularity.HEAD if ragged else Granularity.LAYER)


def _check_apart(architecture: Architecture, granularity: Granularity) -> None:
    test = attention_of(architecture.config), granularity
    _run_once(architecture, test, partial(_read_apart, architecture, granularity))


class _Watcher(Watcher):
    """Watcher that compares each layer's attention inputs with the cache's tensors, and records the masks."""

    def __init__(self, cache: RetainedCache) -> None:
        self.wrong = set[str]()
        self.asked = dict[int, Tensor]()
        self.masks: list[object] = []
        self._cache = cache

    @property
    def wants_hidden(self) -> bool:
        """True, to check that the attention modules receive the hidden states."""
        return True

    def attended(self, module: nn.Module, seen: AttentionInputs) -> None:
        """Compare the inputs of a layer's attention with the cache."""
        layer = self._cache.layers[seen.layer]
        assert isinstance(layer, RetainedLayer)
        same = {
            "keys": seen.key is layer.keys, "values": seen.value is layer.values,
            "queries": self.asked.setdefault(seen.layer, seen.query) is seen.query,
            "hidden": seen.hidden is not None and seen.hidden.shape[:2] == seen.query.shape[0::2],
        }
        self.wrong |= {name for name, agrees in same.items() if not agrees}
        self.masks.append(seen.mask)


def _wrong_inputs(architecture: Architecture) -> set[str]:
    """Return which inputs of attention differ: "keys", "values", "queries", "hidden" or "layers" (if not observed)."""
    passed, test = _PASSED.setdefault(architecture.decoder, set()), attention_of(architecture.config)
    if test in passed:
        return set()
    cache = RetainedCache(architecture.config)
    watcher = _Watcher(cache)
    with (
        trial_forward(architecture, f"{_TOKENS} tokens"),
        observing(architecture, cache, watcher, architecture.full_layers),
    ):
        read_tokens(architecture, cache, _TOKENS)
    wrong = watcher.wrong | (set() if set(architecture.full_layers) <= set(watcher.asked) else {"layers"})
    if not wrong:
        passed.add(test)
    return wrong


def _read_apart(architecture: Architecture, granularity: Granularity) -> None:
    """Check that the model can read a token after a token was evicted from every second layer or head."""
    cache, reason = RetainedCache(architecture.config), ""
    try:
        with isolated_forward(architecture):
            with observing(architecture, cache):
                read_tokens(architecture, cache, _TOKENS)
            cache.compact([_every_other(cache, granularity)])
            with observing(architecture, cache):
                read_tokens(architecture, cache, 1)
    except SpecError as error:
        reason = error.bound
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        reason = _OTHER_MASK if _makes_masks(architecture) else f"{type(error).__name__}, {error}"
    if reason:
        bound = f"needs the same tokens in all layers and heads of the cache: {reason}"
        raise SpecError("model", architecture.name, bound)


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
    positions = np.array([position for kept in sets for position in kept], dtype=np.int64)
    return Retention(positions, offsets, _TOKENS, granularity)


def check_recurrence(architecture: Architecture, arguments: Mapping[str, object], cache: object) -> None:
    """Check that the model processes these arguments after the cached tokens as in a single forward pass.

    Raises:
        SpecError: if the results differ.
    """
    if architecture.takes_positions and not architecture.recurrent:
        return
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    several = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] > 1
    seen = cache.get_seq_length() if isinstance(cache, RetainedCache) else 0
    padded = (isinstance(mask, Tensor) and bool((mask == 0).any())) or (
        isinstance(cache, RetainedCache) and seen > 0 and not bool(cache.is_token.all())
    )
    if padded and not architecture.takes_positions:
        raise SpecError("attention_mask", "zeros", _NUMBERS)
    if not architecture.recurrent:
        return
    if seen and several:
        _check_turns(architecture)
    if padded:
        _run_once(architecture, _PADDED, partial(_check_pieces, architecture, _PADDED, [_SEEN, 1], _PADDING))
    if padded and seen and several:
        _run_once(architecture, _PADDED_TURN, partial(_check_pieces, architecture, _PADDED_TURN, [2, 4, 3], _PADDING))


def _check_turns(architecture: Architecture) -> None:
    """Check that recurrent layers keep their states if several tokens follow earlier tokens."""
    if architecture.recurrent:
        _run_once(architecture, _TURN, partial(_check_pieces, architecture, _TURN, [5, 3], 0))


def _check_pieces(architecture: Architecture, reason: str, pieces: Sequence[int], padding: int) -> None:
    """Check that tokens after `padding` columns have the same hidden states if the model processes them in pieces."""
    tokens = sum(pieces) - padding
    try:
        with isolated_forward(architecture):
            hidden, expected = _hidden(architecture, pieces, padding), _hidden(architecture, [tokens], 0)
    except FORWARD_ERRORS as error:
        raise SpecError("model", architecture.name, f"{reason} ({type(error).__name__}: {error})") from error
    if not states_agree(hidden, expected):
        raise SpecError("model", architecture.name, reason)


def _hidden(architecture: Architecture, pieces: Sequence[int], padding: int) -> Tensor:
    """Return the last hidden states of tokens after padding, (tokens, width), processed piece by piece."""
    decoder, cache = architecture.decoder, RetainedCache(architecture.config)
    device, columns = device_of(decoder), sum(pieces)
    mask = torch.arange(columns, device=device)[None] >= padding
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    ids = positions * 37 % architecture.vocabulary
    outputs, start = [], 0
    for stop in torch.tensor(pieces).cumsum(dim=0).tolist():
        given = {cache_name(decoder): cache, "attention_mask": mask[:, :stop].long()} if padding else {
            cache_name(decoder): cache,
        }
        output = decoder.forward(
            input_ids=ids[:, start:stop], position_ids=positions[:, start:stop], use_cache=True, **given,
        )
        outputs.append(output.last_hidden_state[0])
        start = stop
    return torch.cat(outputs)[padding:]
