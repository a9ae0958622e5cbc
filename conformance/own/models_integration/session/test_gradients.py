"""Gradients flow through what every policy has kept, as finite differences have it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import METHODS, build, prompt
from conformance.own.models_integration.session.ragged_checks import live_sets, method
from models_integration import RetentionPolicy

STEP, N = 1e-6, 40
POLICIES: dict[str, Callable[[], RetentionPolicy]] = {
    "one set": METHODS["crystalcache"], "a set for each layer": lambda: method("chunkkv"),
    "a set for each head": lambda: method("adakv"), "heads of one length": lambda: method("snapkv"),
    "decisions in steps": lambda: method("h2o"),
}


def loss(model: PreTrainedModel, policy: RetentionPolicy, pieces: tuple[int, ...]) -> tuple[Tensor, Any]:
    """Of a prompt, and of what is read behind it in pieces, one after the other; and what was stored in the end."""
    following = prompt(sum(pieces), seed=9)
    with policy(model) as run:
        total = model(input_ids=prompt(N)).logits.square().mean()
        assert run.cache is not None
        for piece in torch.split(following, list(pieces), dim=1):
            total = total + model(input_ids=piece, past_key_values=run.cache).logits.square().mean()
        return total, live_sets(run.cache)


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("pieces", [(1,), (1, 1, 1), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_those_of_finite_differences(name: str, pieces: tuple[int, ...]) -> None:
    """Along one direction of a layer's weights, through the keys and values of the prompt."""
    # A family whose norms compute in float64, or the differences would drown in rounding.
    model, policy = build("gpt_neox", dtype=torch.float64), POLICIES[name]()
    model.requires_grad_(False)
    for layer in (0, 1):
        attention: Any = model.base_model.get_submodule(f"layers.{layer}.attention")
        weights = attention.query_key_value.weight
        weights.requires_grad_(True)
        model.zero_grad()
        total, kept = loss(model, policy, pieces)
        total.backward()  # type: ignore[no-untyped-call]
        assert weights.grad is not None
        direction = torch.randn(weights.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weights += sign * STEP * direction
                value, again = loss(model, policy, pieces)
                weights -= sign * STEP * direction
            assert again == kept
            values.append(float(value))
        expected = (values[0] - values[1]) / (2 * STEP)
        assert float((weights.grad * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-8)
        weights.requires_grad_(False)


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("name", POLICIES)
def test_without_gradients_nothing_is_kept_for_them(name: str) -> None:
    model = build("llama")
    with POLICIES[name]()(model) as run, torch.no_grad():
        model(input_ids=prompt(N))
        assert run.cache is not None
        model(input_ids=prompt(1), past_key_values=run.cache)
    for layer in run.cache.full_layers:
        assert layer.keys is not None
        assert not layer.keys.requires_grad
