"""What a scorer is shown: q and k as the observed layer attends with them, and nothing that it did not ask for."""

import sys

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from conformance.own.models_integration.session.families import (
    FAMILIES,
    SLIDING,
    VOCABULARY,
    at_once,
    build,
    greedy,
    prompt,
    relative,
)
from conformance.own.models_integration.session.probe import Looking, method_of
from models_integration.attention.capture import _WATCHERS
from models_integration.model.architecture import describe
from reference.crystalcache.coattention import attention
from spec.policy import Needs, Observation

pytestmark = pytest.mark.law("decided-as-the-reference")

N = 40

# SDPA refuses Gemma2's softcap.
attentions = pytest.mark.parametrize(
    ("family", "attention_of_model"),
    [
        (family, kind) for family in FAMILIES for kind in ("sdpa", "eager")
        if (family, kind) != ("gemma2", "sdpa")
    ],
)


def shown(model: PreTrainedModel, needs: Needs, n: int = N) -> Observation:
    scorer = Looking(needs)
    with method_of(scorer)(model):
        greedy(model, prompt(n), 2)
    (observation,) = scorer.shown
    return observation


@attentions
def test_captured_q_and_k_give_the_attention_of_that_layer(family: str, attention_of_model: str) -> None:
    model = build(family, attention=attention_of_model)
    observation = shown(model, Needs("observed", None))
    ((layer, view),) = observation.layers.items()
    assert layer == (1 if family in SLIDING else 0)
    eager = build(family, attention="eager")
    with torch.no_grad():
        expected = eager(input_ids=prompt(N), output_attentions=True).attentions[layer][0]
    positions = np.arange(N)
    found = attention(
        view.q.astype(np.float64), view.k.astype(np.float64), positions, positions, view.scaling, view.softcap
    )
    assert relative(torch.from_numpy(found).float(), expected) < 1e-5
    assert (view.softcap is not None) == (family == "gemma2")


@pytest.mark.law("the-model-stays-as-it-was")
@attentions
def test_the_model_attends_as_it_always_does(family: str, attention_of_model: str) -> None:
    model, ids = build(family, attention=attention_of_model), prompt(N)
    expected = at_once(model, ids, DynamicCache(config=model.config))
    with method_of(Looking(Needs("all", None, values=True)))(model):
        assert torch.equal(at_once(model, ids, DynamicCache(config=model.config)), expected)


def test_nothing_is_captured_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observation itself: scorers are shown it less what they did not ask for."""
    monkeypatch.setattr(sys.modules["reference.policies.retain"], "shown_to", lambda needs, observation: observation)
    model = build("llama")
    nothing = shown(model, Needs())
    assert nothing.layers == {}
    assert nothing.token_ids is None
    assert (nothing.seen, nothing.groups) == (N, 1)
    (view,) = shown(model, Needs("observed", 5, token_ids=True)).layers.values()
    assert view.q.shape == (4, 5, 12)
    assert view.k.shape == (2, N, 12)
    assert view.v is None


def test_all_full_layers_and_values_can_be_asked_for() -> None:
    model = build("gemma3")
    observation = shown(model, Needs("all", None, values=True, token_ids=True))
    assert sorted(observation.layers) == [1, 3]
    cache = DynamicCache()
    at_once(model, prompt(N), cache)
    stored = list(cache)
    for layer, view in observation.layers.items():
        assert view.v is not None
        # The prompt's own forward slides some layers' caches and not others'; sums differ in the last bits.
        np.testing.assert_allclose(view.k, stored[layer][0][0].numpy(), atol=1e-5)
        np.testing.assert_allclose(view.v, stored[layer][1][0].numpy(), atol=1e-5)
    assert observation.token_ids is not None
    np.testing.assert_array_equal(observation.token_ids, prompt(N)[0].numpy())
    assert observation.token_ids.dtype == np.int64


def test_the_last_rows_are_those_of_the_whole() -> None:
    model = build("qwen3")
    (whole,) = shown(model, Needs("observed", None)).layers.values()
    (part,) = shown(model, Needs("observed", 7)).layers.values()
    (more,) = shown(model, Needs("observed", 700)).layers.values()
    np.testing.assert_array_equal(part.q, whole.q[:, -7:])
    np.testing.assert_array_equal(more.q, whole.q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_exactly(dtype: torch.dtype) -> None:
    model = build("llama", dtype=dtype)
    (view,) = shown(model, Needs("observed", None)).layers.values()
    assert view.q.dtype == view.k.dtype == np.float32
    cache = DynamicCache()
    at_once(model, prompt(N), cache)
    ((keys, _, _), *_) = cache
    assert torch.equal(torch.from_numpy(view.k).to(dtype), keys[0])


def test_float64_stays_float64() -> None:
    (view,) = shown(build("llama", dtype=torch.float64), Needs("observed", None)).layers.values()
    assert view.q.dtype == np.float64


@pytest.mark.law("the-model-stays-as-it-was")
def test_no_watcher_outlives_its_forward() -> None:
    model = build("llama")
    shown(model, Needs("all", None))
    assert not any(module in _WATCHERS for module in describe(model).attention.values())


def test_the_vocabulary_is_that_of_the_embedding() -> None:
    assert describe(build("llama")).vocabulary == VOCABULARY
