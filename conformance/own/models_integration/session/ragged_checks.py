"""What "eviction equals masking" says where layers and heads keep different tokens; saboteurs must fail these."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import at_once, prompt, relative, step_by_step
from conformance.own.models_integration.session.heads import MaskedHeads, Sets
from conformance.own.models_integration.session.oracle_checks import NEW, PROMPT, TOLERANCE, VISIBLE_EFFECT
from models_integration import CustomPolicy, Published, RetainedCache, RetentionPolicy, Session
from models_integration.attention.capture import observing
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.model.architecture import describe
from reference.policies import (
    adakv,
    cake,
    chunkkv,
    h2o,
    kvcrush,
    lagkv,
    morphkv,
    nestedkv,
    pyramidkv,
    rkv,
    snapkv,
    tova,
    vase,
    vatp,
)
from spec.budget import parse_budget
from spec.policy import Policy

__all__ = [
    "DECODING", "OF_A_MODEL", "PUBLISHED", "REHEARSED", "Sets", "check_continuation", "check_steps", "check_storage",
    "live_sets", "method", "read_prompt",
]

PUBLISHED: dict[str, Callable[[], Policy]] = {
    "snapkv": lambda: snapkv(W=8),
    "pyramidkv": lambda: pyramidkv(W=8),
    "adakv": lambda: adakv(W=8),
    "chunkkv": lambda: chunkkv(c=5, W=8),
    "nestedkv": nestedkv,
    "lagkv": lambda: lagkv(lag=8),
    "cake": lambda: cake(W=8),
    "kvcrush": lambda: kvcrush(W=8, block=4, share=0.5),
}
REHEARSED: dict[str, Any] = {"template": ((5, 6, 7), (8, 9), (10,)), "chunk": 25}
OF_A_MODEL: dict[str, dict[str, Any]] = {
    "criticalkv": {"W": 8}, "critical-adakv": {"W": 8}, "kvzip": REHEARSED, "kvzip-plus": REHEARSED,
}
"""Constants of policies that take more from a model."""
DECODING: dict[str, Callable[[], Policy]] = {
    "h2o": h2o, "vatp": lambda: vatp(2), "tova": tova, "rkv": lambda: rkv(W=4, every=3),
    "morphkv": lambda: morphkv(W=4), "vase": lambda: vase(W=3),
}


def method(name: str, budget: float | int = 0.3) -> RetentionPolicy:
    """A policy with constants that fit a prompt of 64 tokens."""
    if name in OF_A_MODEL:
        return Published(name, budget, **OF_A_MODEL[name])
    return CustomPolicy({**PUBLISHED, **DECODING}[name](), parse_budget(budget))


def live_sets(cache: RetainedCache) -> Sets:
    """What each head of each full-attention layer stores now."""
    return {
        index: [layer.head_positions(0, head).tolist() for head in range(layer.heads)]
        for index, layer in enumerate(cache.layers) if layer in cache.full_layers
    }


def read_prompt(model: PreTrainedModel, chosen: RetentionPolicy, n: int = PROMPT) -> tuple[Session, RetainedCache]:
    """A prompt under a policy; the session is over."""
    with chosen(model) as run, torch.no_grad():
        model(input_ids=prompt(n))
    assert run.cache is not None
    return run, run.cache


def check_continuation(model: PreTrainedModel, name: str) -> None:
    """Logits of the next 8 tokens, in single steps and in one forward."""
    _, cache = read_prompt(model, method(name))
    kept, following = live_sets(cache), prompt(NEW, seed=9)
    expected = MaskedHeads(model, prompt(PROMPT), kept).read(following)
    for read in (at_once, step_by_step):
        own = copy.deepcopy(cache)
        with observing(describe(model), own):
            assert relative(read(model, following, own), expected) < TOLERANCE
        assert own.get_seq_length() == PROMPT + NEW
        grown = {layer: [[*one, *range(PROMPT, PROMPT + NEW)] for one in sets] for layer, sets in kept.items()}
        assert live_sets(own) == grown
    everything = MaskedHeads(model, prompt(PROMPT), {layer: [range(PROMPT)] for layer in kept}).read(following)
    assert relative(everything, expected) > VISIBLE_EFFECT


def check_steps(model: PreTrainedModel, name: str) -> list[Sets]:
    """Logits of steps under a policy that evicts in them: each query sees what the steps before it have left.

    Returns:
        What was stored after the prompt, and after each step.
    """
    following, logits = prompt(NEW, seed=9), []
    with method(name)(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT))
        assert run.cache is not None
        stored = [live_sets(run.cache)]
        for token in torch.split(following, 1, dim=1):
            logits.append(model(input_ids=token, past_key_values=run.cache).logits)
            stored.append(live_sets(run.cache))
    oracle, expected = MaskedHeads(model, prompt(PROMPT), stored[0]), []
    for token, after in zip(torch.split(following, 1, dim=1), stored[1:], strict=True):
        expected.append(oracle.read(token))
        for layer, sets in after.items():
            oracle.forget(layer, sets)
    assert relative(torch.cat(logits, dim=1), torch.cat(expected, dim=1)) < TOLERANCE
    assert any(len(set(map(tuple, sets))) > 1 for sets in stored[-1].values()) or name == "tova"
    return stored


def check_storage(model: PreTrainedModel, name: str) -> None:
    """Every head stores the keys and values of its own positions, and nothing else."""
    _, cache = read_prompt(model, method(name))
    kept = live_sets(cache)
    oracle = MaskedHeads(model, prompt(PROMPT), kept).cache
    full: Sequence[tuple[Tensor, Tensor, object]] = list(oracle)
    for index, sets in kept.items():
        layer = cache.layers[index]
        assert isinstance(layer, RetainedLayer)
        assert layer.keys is not None
        assert layer.values is not None
        for head, own in enumerate(sets):
            found = (
                layer.segments()[head] if isinstance(layer, RaggedLayer)
                else (layer.keys[:, head : head + 1], layer.values[:, head : head + 1])
            )
            for tensor, whole in zip(found, full[index][:2], strict=True):
                assert relative(tensor, whole[:, head : head + 1, own]) < TOLERANCE
        stored = sum(map(len, sets)) * layer.keys.shape[-1]
        assert layer.keys.untyped_storage().nbytes() == stored * layer.keys.element_size()
