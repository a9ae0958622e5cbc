"""Tests of KVzip's repetition: the tensors equal those of one long forward pass, and nothing else changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.methods.kvzip import chunks
from experiments.studies.subject import SHIPPED, Loading
from models_integration import (
    CustomPolicy,
    NamedPolicy,
    ObservedSegment,
    RetainedCache,
    decide,
    observe,
    repeat_template,
)
from models_integration.archive.splice import computed
from models_integration.model.rotation import recognise
from models_integration.pocket import load_pocket_tokenizer
from models_integration.session import observed as module
from models_integration.session.verbs import EVERYTHING
from reference.policies import kvzip
from spec.errors import SpecError
from spec.policy import Rehearsal
from tests.models_integration.session.families import (
    _GQA,
    VOCABULARY,
    at_once,
    build,
    prepared,
    prompt,
    relative,
    step_by_step,
    tensors,
)
from tests.models_integration.session.masked import Masked
from tests.models_integration.session.sessions import PROMPT, REHEARSED, TOLERANCE, live_sets

pytestmark = pytest.mark.spec("PO-REHEARSAL")

PLAN = Rehearsal(REHEARSED["template"], 4, 3, 25, 8)
POLICY = kvzip(**REHEARSED, N_recent=3)


def rehearsed(model: Any, ids: Tensor) -> ObservedSegment:
    return observe(model, ids, needs=replace(EVERYTHING, rehearsal=PLAN))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_neox"])
def test_a_repeat_asks_and_is_asked_as_in_the_whole_text(family: str) -> None:
    """Compare the repetition with one forward pass over the prompt and the repetition.

    The queries come from kvspec's capture, the keys from the cache of transformers.
    """
    model, ids = build(family), prompt(PROMPT)
    views = rehearsed(model, ids).prompt(0, POLICY.granularity).layers
    spans, read = chunks(ids[0].tolist(), REHEARSED["template"], 4, 3, 25, 8)
    assert len(spans) == 3
    for part, ((start, stop), repeat) in enumerate(zip(spans, read, strict=True)):
        text = torch.cat([ids, torch.tensor([repeat])], dim=1)
        whole = observe(model, text).prompt(0, POLICY.granularity).layers
        with torch.no_grad():
            keys = model(input_ids=text, use_cache=True).past_key_values.layers
        for layer, view in views.items():
            assert view.repeats is not None
            actual = view.repeats[part]
            assert (actual.start, actual.stop) == (start, stop)
            own = keys[layer].keys[0, :, PROMPT:]
            assert relative(torch.as_tensor(actual.k), own) < 1e-5
            assert relative(torch.as_tensor(actual.q), torch.as_tensor(whole[layer].q)[:, PROMPT:]) < 1e-5


@pytest.mark.spec("PO-KVZIP-PLUS")
def test_norms_are_those_of_what_attention_reads() -> None:
    model, ids = build("llama"), prompt(PROMPT)
    views = rehearsed(model, ids).prompt(0, POLICY.granularity).layers
    _, read = chunks(ids[0].tolist(), REHEARSED["template"], 4, 3, 25, 8)
    text = torch.cat([ids, torch.tensor([read[-1]])], dim=1)
    with torch.no_grad():
        states = model(input_ids=text, output_hidden_states=True).hidden_states
        for layer, view in views.items():
            norms = model.model.layers[layer].input_layernorm(states[layer])[0, PROMPT:].norm(dim=-1)
            assert view.repeats is not None
            assert relative(torch.as_tensor(view.repeats[-1].norms), norms.double()) < 1e-5


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cache_is_as_it_was(family: str) -> None:
    """Check that all tensors are unchanged, including those of sliding layers.

    Later tokens do not attend to the repeat.
    """
    model, ids = build(family), prompt(PROMPT)
    plain, observed = observe(model, ids), rehearsed(model, ids)
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors(observed.cache)]
    observed.rehearse()
    for tensor, (place, bits) in zip(tensors(observed.cache), before, strict=True):
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, bits)
    assert all(torch.equal(a, b) for a, b in zip(tensors(plain.cache), tensors(observed.cache), strict=True))
    assert not any(part._forward_pre_hooks for part in model.modules())
    following = prompt(5, seed=3)
    assert torch.equal(at_once(model, following, observed.cache), at_once(model, following, plain.cache))


def growing(kind: str, length: int = 32) -> PreTrainedModel:
    """Return a model whose rotary frequencies change for texts of more than `length` tokens."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {
            "long_factor": [3.0] * 6, "short_factor": [1.0] * 6, "original_max_position_embeddings": length,
        }
    sizes = {**_GQA, "max_position_embeddings": length, "rope_parameters": rope}
    return prepared("Llama", **sizes)


def rotation(model: PreTrainedModel) -> dict[str, Any]:
    embedding: Any = model.model.rotary_emb
    return {**embedding._buffers, "longest": int(embedding.max_seq_len_cached), "scaling": embedding.attention_scaling}


def same_rotation(model: PreTrainedModel, found: dict[str, Any]) -> bool:
    now = rotation(model)
    pairs = ((torch.as_tensor(now[key]), torch.as_tensor(found[key])) for key in now)
    return now.keys() == found.keys() and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize(
    ("kind", "n", "budget"),
    [("dynamic", 30, 0.3), ("dynamic", PROMPT, 1.0), ("longrope", 30, 1.0), ("longrope", PROMPT, 0.3)],
)
def test_frequencies_that_grow_with_the_text_do_not_grow_with_the_repeat(kind: str, n: int, budget: float) -> None:
    model, twin, ids, following = growing(kind), growing(kind), prompt(n), prompt(5, seed=3)
    cache = RetainedCache(model.config)
    with CustomPolicy(POLICY, budget)(model):
        at_once(model, ids, cache)
        oracle = Masked(twin, ids, live_sets(cache))
        assert same_rotation(model, rotation(oracle.model))
        steps = step_by_step(model, following, cache)
    expected = torch.cat([oracle.read(token) for token in torch.split(following, 1, dim=1)], dim=1)
    assert relative(steps, expected) < TOLERANCE
    assert same_rotation(model, rotation(oracle.model))


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_what_is_found_out_with_forwards_leaves_the_frequencies(kind: str) -> None:
    model = growing(kind, PROMPT)
    with torch.no_grad():
        model(input_ids=prompt(PROMPT + 9))
    actual = {key: torch.as_tensor(value).clone() for key, value in rotation(model).items()}
    CustomPolicy(POLICY, 0.3)(model)
    assert same_rotation(model, actual)
    rotary = recognise(model)
    assert same_rotation(model, actual)
    computed(model, prompt(9)[0].tolist(), rotary)
    assert same_rotation(model, actual)


@pytest.mark.law("freed-memory")
def test_a_repeat_is_taken_back_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all layers up to the layer that is being read store only the prompt."""
    model, held = build("llama"), []
    attended = module._Watcher.attended

    def noting(watcher: Any, part: Any, seen: Any) -> None:
        attended(watcher, part, seen)
        held.append([layer.get_seq_length() for layer in watcher.cache.layers][: part.layer_idx + 1])

    monkeypatch.setattr(module._Watcher, "attended", noting)
    rehearsed(model, prompt(PROMPT))
    assert held == [[PROMPT] * (layer + 1) for _ in range(3) for layer in range(3)]


@pytest.mark.law("parts-equal-the-whole")
def test_rows_of_a_batch_are_rehearsed_each() -> None:
    model, rows = build("llama"), torch.cat([prompt(PROMPT), prompt(PROMPT, seed=7)])
    with CustomPolicy(POLICY, 0.3)(model) as run, torch.no_grad():
        model(input_ids=rows)
    assert "rehearsal" in run.timings
    for row, actual in enumerate(run.retentions):
        (alone,) = decide(CustomPolicy(POLICY, 0.3).on(model), rehearsed(model, rows[row : row + 1])).retentions
        assert np.array_equal(actual.positions, alone.positions)


@pytest.mark.law("refused-before-anything-changes")
def test_what_is_not_served_is_named() -> None:
    model, ids = build("llama"), torch.cat([prompt(PROMPT), prompt(PROMPT, seed=7)])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with CustomPolicy(POLICY, 0.3)(model), pytest.raises(SpecError, match="must be all ones, because the policy"):
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(SpecError, match="must be all ones, because the policy"):
        observe(model, ids, mask, replace(EVERYTHING, rehearsal=PLAN))
    for other in (EVERYTHING, replace(EVERYTHING, rehearsal=replace(PLAN, chunk=24))):
        with pytest.raises(SpecError, match="lacks tensors that the policy needs"):
            decide(CustomPolicy(POLICY, 0.3).on(model), observe(model, prompt(PROMPT), needs=other))
    with pytest.raises(SpecError, match=f"template = {VOCABULARY}: must lie in"):
        NamedPolicy("kvzip", 0.3, template=[[1], [VOCABULARY], [2]])(model)


@pytest.mark.law("as-it-is-described")
def test_a_template_is_made_of_the_tokenizer() -> None:
    """Check the template of a tokenizer, and that the studies pass it to the policy."""
    tokenizer = load_pocket_tokenizer(SHIPPED["pocket"])
    first, later, answer = repeat_template(tokenizer)
    assert str(tokenizer.decode(list(first))).strip() == "Repeat the previous context exactly."
    assert str(tokenizer.decode(list(later))).strip().endswith("starting with")
    assert list(answer) == tokenizer.encode("\n", add_special_tokens=False)
    policy = Loading(backend="numpy").subject().policy("kvzip(chunk=64)", "0.3")
    assert isinstance(policy, NamedPolicy)
    assert policy.constants == {"template": (first, later, answer), "chunk": 64, "backend": "numpy"}
