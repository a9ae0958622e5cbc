"""What "eviction equals masking" says where layers and heads keep different tokens; mutants must fail these."""

import copy
from collections.abc import Sequence
from inspect import signature
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
from reference.policies.describe import describe_policy
from reference.policies.names import POLICIES, make_policy
from reference.policies.retain import tokens_of
from spec.budget import Budget, parse_budget
from spec.policy import Policy

__all__ = [
    "REHEARSED", "Sets", "check_continuation", "check_steps", "check_storage", "lengths", "live_sets", "method",
    "read_prompt", "small",
]

REHEARSED: dict[str, Any] = {"template": ((5, 6, 7), (8, 9), (10,)), "chunk": 25}
_FIT = {"W": 8, "lag": 8, "block": 4, "N_sink": 2, "N_recent": 4, "every": 3}
"""In place of larger defaults."""


def small(name: str) -> dict[str, Any]:
    """Constants of a policy that fit a prompt of 64 tokens."""
    row = POLICIES[name]
    if "template" in row.constants:
        return REHEARSED
    given = {key: one.default for key, one in signature(row.make).parameters.items() if key not in row.decided}
    return {key: fit for key, fit in _FIT.items() if isinstance(given.get(key), int) and given[key] > 8}


def method(name: str, budget: float | int = 0.3) -> RetentionPolicy:
    """A policy with constants that fit a prompt of 64 tokens."""
    row = POLICIES[name]
    if row.of_model or "template" in row.constants:
        return Published(name, budget, **small(name))
    return CustomPolicy(make_policy(name, small(name)), parse_budget(budget))


def lengths(policy: Policy, budget: Budget, steps: int, first: float | None = None) -> list[float]:
    """What a kept set holds after a prompt of 64 tokens, `first` or its even share, and after each step."""
    found = [tokens_of(policy, budget, PROMPT) if first is None else first]
    for seen in range(PROMPT + 1, PROMPT + steps + 1):
        live, B = found[-1] + 1, tokens_of(policy, budget, seen)
        found.append(B if policy.cadence.due(seen, int(live), B) else live)
    return found


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
    one_set = describe_policy(name).granularity == "layer"
    assert one_set or any(len(set(map(tuple, sets))) > 1 for sets in stored[-1].values())
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
