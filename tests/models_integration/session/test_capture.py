"""Inputs of a scorer: q, k and log-sum-exp exactly as the observed layer attends with them, and no other tensors."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel

from models_integration import CrystalCache, RetainedCache, RetentionPolicy, decide, observe
from models_integration.attention.capture import _WATCHERS
from models_integration.model.architecture import describe
from reference.crystalcache.observed_layer import observed_layer
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import LayerView, Needs
from tests.models_integration.session.families import ENDS, FAMILIES, at_once, build, prompt
from tests.models_integration.session.sessions import Looking, batch, method_of, prompts, shown

pytestmark = pytest.mark.law("decided-as-the-reference")


N = 40
TEXT, OBSERVED = prompt(N), Needs("observed", None)


def test_nothing_is_captured_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the observation before the scorer's needs select from it."""
    monkeypatch.setattr(sys.modules["reference.policies.retain"], "shown_to", lambda needs, observation: observation)
    model = build("llama")
    nothing = shown(model, TEXT, Needs())
    assert nothing.layers == {}
    assert nothing.token_ids is None
    assert (nothing.seen, nothing.groups) == (N, 1)
    (view,) = shown(model, TEXT, Needs("observed", 5, token_ids=True)).layers.values()
    assert view.q.shape == (4, 5, 12)
    assert view.k.shape == (2, N, 12)
    assert view.v is None


def test_all_full_layers_and_values_can_be_asked_for() -> None:
    model = build("gemma3")
    observation = shown(model, TEXT, Needs("all", None, values=True, token_ids=True))
    assert sorted(observation.layers) == [1, 3]
    cache = DynamicCache()
    at_once(model, prompt(N), cache)
    stored = list(cache)
    for layer, view in observation.layers.items():
        assert view.v is not None
        # The forward pass of the prompt slides the caches of some layers and not of others. Sums differ in the last
        # bits.
        np.testing.assert_allclose(view.k, stored[layer][0][0].numpy(), atol=1e-5)
        np.testing.assert_allclose(view.v, stored[layer][1][0].numpy(), atol=1e-5)
    assert observation.token_ids is not None
    np.testing.assert_array_equal(observation.token_ids, prompt(N)[0].numpy())
    assert observation.token_ids.dtype == np.int64


def test_the_last_rows_are_those_of_the_whole() -> None:
    model = build("qwen3")
    (whole,) = shown(model, TEXT, OBSERVED).layers.values()
    (part,) = shown(model, TEXT, Needs("observed", 7)).layers.values()
    (more,) = shown(model, TEXT, Needs("observed", 700)).layers.values()
    np.testing.assert_array_equal(part.q, whole.q[:, -7:])
    np.testing.assert_array_equal(more.q, whole.q)
    assert whole.lse is not None
    np.testing.assert_array_equal(part.lse, whole.lse[:, -7:])


@pytest.mark.parametrize(("dtype", "becomes"), [
    (torch.bfloat16, np.float32), (torch.float16, np.float32), (torch.float64, np.float64),
])
def test_half_precision_becomes_float32_exactly(dtype: torch.dtype, becomes: type) -> None:
    model = build("llama", dtype=dtype)
    (view,) = shown(model, TEXT, OBSERVED).layers.values()
    assert view.q.dtype == view.k.dtype == becomes
    cache = DynamicCache()
    at_once(model, prompt(N), cache)
    ((keys, _, _), *_) = cache
    assert torch.equal(torch.from_numpy(view.k).to(dtype), keys[0])


@pytest.mark.law("the-model-stays-as-it-was")
def test_no_watcher_outlives_its_forward() -> None:
    model = build("llama")
    shown(model, TEXT, Needs("all", None))
    assert not any(module in _WATCHERS for module in describe(model).attention.values())


def lse_of(model: PreTrainedModel, ids: Tensor = TEXT, **options: Tensor) -> object:
    (seen,) = shown(model, ids, OBSERVED, **options).layers.values()
    return seen.lse


def log_sum_exp(seen: LayerView) -> np.ndarray[Any, Any]:
    """Return the log-sum-exp (H, n) by definition, in float64."""
    q, k = seen.q.astype(np.float64), seen.k.astype(np.float64)
    logits = np.matmul(q, np.repeat(k, len(q) // len(k), axis=0).transpose(0, 2, 1)) * seen.scaling
    logits = np.where(np.tri(q.shape[1], dtype=np.bool_), logits, -np.inf)
    peak = logits.max(axis=2)
    actual: np.ndarray[Any, Any] = peak + np.log(np.exp(logits - peak[:, :, None]).sum(axis=2))
    return actual


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    # SDPA refuses Gemma2's softcap.
    [("llama", torch.float64, 1e-14), *((name, torch.float32, 2e-6) for name in FAMILIES if name != "gemma2")],
)
def test_it_is_the_sum_over_what_each_query_sees(family: str, dtype: torch.dtype, bound: float) -> None:
    """Check the log-sum-exp in each row of a batch."""
    model, scorer = build(family, dtype=dtype), Looking(Needs("observed", None))
    with method_of(scorer)(model):
        at_once(model, torch.cat([prompt(N), prompt(N, seed=2)]), RetainedCache(model.config))
    for observation in scorer.shown:
        (seen,) = observation.layers.values()
        expected = log_sum_exp(seen)
        assert seen.lse is not None
        assert seen.lse.shape == expected.shape
        assert np.abs(seen.lse - expected).max() < bound * max(1.0, np.abs(expected).max())


def in_chunks(model: PreTrainedModel) -> LayerView:
    scorer, cache = Looking(Needs("observed", None)), RetainedCache(model.config)
    with method_of(scorer)(model) as run, run.prompt():
        for piece in torch.split(prompt(N), 20, dim=1):
            at_once(model, piece, cache)
    return next(iter(scorer.shown[0].layers.values()))


def test_it_is_none_where_the_forward_does_not_give_it() -> None:
    """Check eager attention, a soft cap, half precision on a CPU, padding, chunks, and a different SDPA kernel."""
    assert lse_of(build("llama", attention="eager")) is None
    assert lse_of(build("gemma2")) is None
    assert lse_of(build("llama", dtype=torch.bfloat16)) is None
    ids, mask = batch(prompts())
    assert lse_of(build("llama"), ids, attention_mask=mask) is None
    assert in_chunks(build("llama")).lse is None
    with sdpa_kernel(SDPBackend.MATH):
        assert lse_of(build("llama")) is None
    assert lse_of(build("llama")) is not None


def observing(which: int) -> RetentionPolicy:
    return CrystalCache(0.5, ENDS, replace(TINY, observed_layer=which), backend="numpy")


@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize("full_layers", [(0,), (0, 1, 2), (1, 3, 5, 8), tuple(range(5, 60, 6))])
def test_it_is_counted_among_the_full_attention_layers(full_layers: tuple[int, ...]) -> None:
    """Count layers from either end, one layer at a time."""
    for which, layer in enumerate(full_layers):
        assert observed_layer(full_layers, which) == layer
    for which, layer in enumerate(reversed(full_layers), 1):
        assert observed_layer(full_layers, -which) == layer


@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize("which", [3, -4, 2**31 - 1])
def test_a_layer_that_is_not_there_is_refused_before_a_token_is_read(which: int) -> None:
    model = build("llama")
    with pytest.raises(SpecError) as error:
        observing(which)(model)
    assert (error.value.argument, error.value.value) == ("observed_layer", which)
    assert "-3" in error.value.bound
    assert "2" in error.value.bound
    observed = observe(model, prompt(N))
    with pytest.raises(SpecError, match="observed_layer"):
        decide(observing(which).on(model), observed)


@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize("which", [True, 0.5, "first", 2**31])
def test_it_is_an_integer(which: Any) -> None:
    with pytest.raises(SpecError, match="observed_layer"):
        replace(TINY, observed_layer=which)


@pytest.mark.spec("CC-OBSERVED-LAYER")
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_layers_with_windows_are_not_counted(family: str) -> None:
    architecture = describe(build(family))
    kinds = architecture.config.layer_types
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    assert 0 < len(full) < len(kinds)
    for which, layer in enumerate(full):
        assert architecture.watched(Needs("observed", observed=which)) == (layer,)
    assert architecture.watched(Needs("observed", observed=-1)) == (full[-1],)
