"""Caches that tests save, and the comparison with the loaded caches."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.checks.decode_checks import same_bits
from models_integration import RetainedCache
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import computed, splice
from models_integration.cache.continuation import CrystalStates
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.fixed_size_layers import GappedSlidingLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.snapshot import load_cache, save_cache
from models_integration.model.rotation import recognise
from tests.models_integration.session.families import at_once, build, prompt, states_of, step_by_step
from tests.models_integration.session.sessions import T, breathing, method, tokens

N = 64


def lived(family: str, steps: int = T + 3) -> tuple[PreTrainedModel, RetainedCache]:
    """Return a cache after decode-time evictions, with tokens in its tail."""
    model = build(family)
    cache = RetainedCache(model.config)
    with breathing()(model):
        at_once(model, prompt(N), cache)
        step_by_step(model, tokens(steps), cache)
    return model, cache


def go_on(family: str, path: Path, out: Path, threads: int) -> None:
    """Read tokens after a saved cache, and save the cache again.

    A different number of threads changes the last bits.
    """
    torch.set_num_threads(threads)
    model = build(family)
    cache = load_cache(path, model)
    with breathing()(model):
        logits = step_by_step(model, tokens(2 * T), cache)
    save_cache(cache, model, path)
    torch.save(logits, out)


def differing(name: str, family: str) -> tuple[PreTrainedModel, RetainedCache]:
    """Return a cache of two rows that keep different tokens in layers or heads, and that have read further tokens."""
    model = build(family)
    cache = RetainedCache(model.config)
    with method(name)(model) as run:
        at_once(model, torch.cat([prompt(N), prompt(N, seed=4)]), cache)
        step_by_step(model, tokens(3, rows=2), cache)
    assert run.cache is cache
    return model, cache


def gapped() -> tuple[PreTrainedModel, RetainedCache]:
    """Return a cache whose sliding windows have not read a spliced chunk. Two tokens follow the chunk."""
    model = build("gemma3")
    cache, rotary = RetainedCache(model.config), recognise(model)
    at_once(model, prompt(N), cache)
    splice(cache, [computed(model, prompt(9, seed=5)[0].tolist(), rotary)], rotary)
    with layer_masks(model, cache):
        step_by_step(model, tokens(2), cache)
    return model, cache


def parts(layer: Any) -> list[Tensor]:
    """Return all tensors of a cache layer. If heads keep different tokens, tensors are listed by head."""
    tensors = [layer.keys, layer.values] if layer.is_initialized else []
    if isinstance(layer, RaggedLayer):
        heads = [divmod(segment, layer.heads) for segment in range(layer.batch * layer.heads)]
        positions = [layer.head_positions(*head) for head in heads]
        tensors = [tensor for row, head in heads for tensor in layer.held(row, slice(head, head + 1))]
        return [*tensors, *positions, layer.next_positions(1), layer.rows.holes]
    if isinstance(layer, DenseLayer):
        return [*tensors, layer.stored_positions(), layer.next_positions(1), layer.rows.holes]
    return [*tensors, layer.positions] if isinstance(layer, GappedSlidingLayer) else tensors


def same(a: RetainedCache, b: RetainedCache) -> None:
    assert (a.get_seq_length(), a.layers_differ) == (b.get_seq_length(), b.layers_differ)
    layers: Any = zip(a.layers, b.layers, strict=True)
    for one, other in layers:
        assert (type(one), one.is_initialized) == (type(other), other.is_initialized)
        assert one.get_seq_length() == other.get_seq_length()
        assert getattr(one, "first_kept", None) == getattr(other, "first_kept", None)
        assert all(torch.equal(*pair) for pair in zip(parts(one), parts(other), strict=True))
    assert type(a.continuation) is type(b.continuation)
    if not isinstance(a.continuation, CrystalStates):
        return
    assert all(same_bits(x, y) for x, y in zip(states_of(a).rows, states_of(b).rows, strict=True))
    assert states_of(a).columns == states_of(b).columns
    assert states_of(a).ids() == states_of(b).ids()
    # Without pending tokens, a file does not contain their kind.
    assert states_of(a).kind == states_of(b).kind or not states_of(a).pending_tokens
