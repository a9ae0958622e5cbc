"""The log-sum-exp of the model's own attention: from the same pass, and no bit of the model changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel

from conformance.checks import stage_checks
from conformance.own.models_integration.session.families import ENDS, FAMILIES, at_once, build, prompt
from conformance.own.models_integration.session.probe import Looking, method_of
from conformance.own.models_integration.session.test_batches import batch, prompts
from conformance.strategies.prompts import AttentionInputs, Prompt
from models_integration import CrystalCache, RetainedCache
from reference.policies import crystalcache, retain
from spec.budget import parse_budget
from spec.parameters import TINY
from spec.policy import LayerView, Needs
from spec.records import CrystalRetention

pytestmark = pytest.mark.law("decided-as-the-reference")

N = 48

# SDPA refuses Gemma2's softcap.
sdpa_families = pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma2"])


def view(model: PreTrainedModel, ids: Tensor, needs: Needs = Needs("observed", None), **options: Any) -> LayerView:  # noqa: B008
    scorer = Looking(needs)
    with method_of(scorer)(model):
        at_once(model, ids, RetainedCache(model.config), **options)
    return next(iter(scorer.shown[-1].layers.values()))


def log_sum_exp(seen: LayerView) -> np.ndarray[Any, Any]:
    """By definition, in float64, (H, n)."""
    q, k = seen.q.astype(np.float64), seen.k.astype(np.float64)
    logits = np.matmul(q, np.repeat(k, len(q) // len(k), axis=0).transpose(0, 2, 1)) * seen.scaling
    logits = np.where(np.tri(q.shape[1], dtype=np.bool_), logits, -np.inf)
    peak = logits.max(axis=2)
    found: np.ndarray[Any, Any] = peak + np.log(np.exp(logits - peak[:, :, None]).sum(axis=2))
    return found


@sdpa_families
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_it_is_the_sum_over_what_each_query_sees(family: str, dtype: torch.dtype, bound: float) -> None:
    model = build(family, dtype=dtype)
    seen = view(model, prompt(N))
    expected = log_sum_exp(seen)
    assert seen.lse.shape == expected.shape  # type: ignore[union-attr]
    assert np.abs(seen.lse - expected).max() < bound * max(1.0, np.abs(expected).max())


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_model_s_numbers_keep_their_bits(family: str, dtype: torch.dtype) -> None:
    model, ids = build(family, dtype=dtype), prompt(N)
    expected = at_once(model, ids, DynamicCache(config=model.config))
    with method_of(Looking(Needs("observed", None)))(model):
        assert torch.equal(at_once(model, ids, DynamicCache(config=model.config)), expected)


@pytest.mark.law("the-model-stays-as-it-was")
def test_rows_that_are_cut_keep_theirs() -> None:
    model = build("llama")
    whole = view(model, prompt(N))
    cut = view(model, prompt(N), Needs("observed", 7))
    np.testing.assert_array_equal(cut.lse, whole.lse[:, -7:])  # type: ignore[index]


@pytest.mark.law("parts-equal-the-whole")
def test_each_row_of_a_batch_has_its_own() -> None:
    model, scorer = build("llama"), Looking(Needs("observed", None))
    ids = torch.cat([prompt(N, seed=1), prompt(N, seed=2)])
    with method_of(scorer)(model):
        at_once(model, ids, RetainedCache(model.config))
    for observation in scorer.shown:
        (seen,) = observation.layers.values()
        assert seen.lse is not None
        np.testing.assert_allclose(seen.lse, log_sum_exp(seen), atol=1e-5)


def in_chunks(model: PreTrainedModel) -> LayerView:
    scorer, cache = Looking(Needs("observed", None)), RetainedCache(model.config)
    with method_of(scorer)(model) as run, run.prompt():
        for piece in torch.split(prompt(N), 20, dim=1):
            at_once(model, piece, cache)
    return next(iter(scorer.shown[0].layers.values()))


def test_it_is_none_where_the_forward_does_not_give_it() -> None:
    """Eager attention, a soft cap, half precision on a CPU, padding, chunks, and another kernel's choice."""
    assert view(build("llama", attention="eager"), prompt(N)).lse is None
    assert view(build("gemma2"), prompt(N)).lse is None
    assert view(build("llama", dtype=torch.bfloat16), prompt(N)).lse is None
    ids, mask = batch(prompts())
    assert view(build("llama"), ids, attention_mask=mask).lse is None
    assert in_chunks(build("llama")).lse is None
    with sdpa_kernel(SDPBackend.MATH):
        assert view(build("llama"), prompt(N)).lse is None
    assert view(build("llama"), prompt(N)).lse is not None


@pytest.mark.parametrize("engine", ["numpy", "numba"])
@pytest.mark.parametrize("seed", range(4))
def test_the_kept_set_does_not_depend_on_it(engine: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it and without: both inside the certified box, and here the same set."""
    pytest.importorskip(engine)
    model, ids = build("qwen3"), prompt(64, seed=70 + seed)
    seen = view(model, ids)
    inputs = AttentionInputs(
        seen.q.astype(np.float64), seen.k.astype(np.float64), np.arange(64), TINY, seen.scaling, None
    )
    judged, kept = Prompt(inputs, ids[0].numpy(), ENDS, "0.5"), []
    for given in (True, False):
        with monkeypatch.context() as patch:
            if not given:
                patch.setattr("models_integration.attention.capture.flash_attention", lambda *_: None)
            with CrystalCache(0.5, ENDS, TINY, backend=engine)(model) as run:
                at_once(model, ids, RetainedCache(model.config))
        assert isinstance(run.retention, CrystalRetention)
        assert not list(stage_checks.retention(run.retention, judged, "float32"))
        kept.append(run.retention.kept.tolist())
    assert kept[0] == kept[1]


def test_a_policy_hands_it_to_its_backend() -> None:
    model, ids = build("llama"), prompt(N)
    scorer = Looking(Needs("observed", None, token_ids=True))
    with method_of(scorer)(model):
        at_once(model, ids, RetainedCache(model.config))
    (observation,) = scorer.shown
    ((layer, seen),) = observation.layers.items()
    policy, budget = crystalcache(ENDS, TINY, "numpy"), parse_budget(0.5)
    retention, _ = retain(policy, budget, observation)
    without = replace(observation, layers={layer: replace(seen, lse=None)})
    np.testing.assert_array_equal(retain(policy, budget, without)[0].positions, retention.positions)
