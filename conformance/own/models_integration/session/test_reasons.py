"""What cannot be served is refused for its true reason, before anything is read."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CTRLConfig,
    CTRLLMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    RoFormerConfig,
    RoFormerForCausalLM,
)
from transformers.models.ctrl import modeling_ctrl

from conformance.own.models_integration.session.families import _GQA, _SIZES, METHODS, build, greedy, prepare, prompt
from conformance.own.models_integration.session.ragged_checks import live_sets, method
from spec.errors import SpecError

pytestmark = pytest.mark.law("refused-before-anything-changes")

_TABLE: dict[str, Any] = {"vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 4}


def wrapper() -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_GQA)))


def with_slot_bias() -> PreTrainedModel:
    """A model that says nothing of ALiBi, and whose attention adds a bias by the distance of slots."""
    model = prepare(CTRLLMHeadModel(CTRLConfig(**_TABLE, dff=48)), attention="eager")
    modeling: Any = modeling_ctrl
    own = modeling.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        distance = torch.arange(key.shape[2] - 1, -1, -1)
        return own(module, query, key, value, (0 if mask is None else mask) - 0.5 * distance, **options)

    modeling.eager_attention_forward = biased
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "RoFormer": (lambda: RoFormerForCausalLM(RoFormerConfig(**_SIZES, is_decoder=True)), "no eager_attention_forward"),
    "ALiBi": (with_slot_bias, "depends on the distance of slots, as with ALiBi"),
    "LLaVA": (wrapper, r"embeddings, not input_ids, to its LlamaModel: use text = model.get_decoder\(\) and policy"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_a_model_is_refused_for_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = MODELS[name]
    monkeypatch.setattr(modeling_ctrl, "eager_attention_forward", modeling_ctrl.eager_attention_forward)
    with pytest.raises(SpecError, match=words) as caught:
        METHODS["crystalcache"]()(make())
    assert caught.value.argument == "model"


@pytest.mark.law("as-it-is-described")
def test_a_wrapper_s_language_model_is_served() -> None:
    whole = prepare(wrapper())
    model: Any = whole.get_decoder()  # type: ignore[no-untyped-call]
    with METHODS["crystalcache"]()(model) as run, torch.no_grad():
        with pytest.raises(SpecError, match=r"inputs_embeds = 'given': .* the policy's own model with input_ids"):
            whole(input_ids=prompt(40))
        model(input_ids=prompt(40))
    assert run.kept is not None
    assert len(run.kept) == 20


class Adapted(nn.Module):
    """As peft's PeftModel: no PreTrainedModel, with one inside."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = model

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("name", ["crystalcache", "critical-adakv"])
@pytest.mark.parametrize("wrap", [
    Adapted, lambda model: torch.compile(Adapted(model), backend="eager"),
], ids=["adapters", "compiled adapters"])
def test_what_wraps_a_model_is_served_as_the_model(wrap: Callable[[Any], Any], name: str) -> None:
    """Its hooks, its generate and what a policy must know of it are those of the model inside."""
    model = build("llama")
    wrapped, found = wrap(model), []
    for given in (wrapped, model):
        chosen = METHODS[name]() if name in METHODS else method(name)
        with chosen(given) as run, torch.no_grad():
            model(input_ids=prompt(40))
            with pytest.raises(SpecError, match="assisted decoding"):
                greedy(model, prompt(40), 2, prompt_lookup_num_tokens=3)
        assert run.cache is not None
        found.append(live_sets(run.cache))
    assert found[0] == found[1]
    with pytest.raises(SpecError, match="model = 'Linear': must be a transformers PreTrainedModel"):
        METHODS["crystalcache"]()(cast(Any, nn.Linear(1, 1)))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the name of the switch is about to change
@pytest.mark.parametrize("when", ["before the context", "inside it"])
def test_gradient_checkpointing_leaves_the_cache_out(when: str) -> None:
    model = build("llama")
    words = "gradient checkpointing in training leaves the cache out"
    if when == "before the context":
        model.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
        model.train(True)
        with pytest.raises(SpecError, match=words):
            method("adakv")(model)
        return
    with method("adakv")(model) as run, torch.no_grad():
        model.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
        model.train(True)
        with pytest.raises(SpecError, match=words):
            model(input_ids=prompt(40))
        model.train(False)  # then nothing is checkpointed
        model(input_ids=prompt(40))
        assert run.cache is not None


def test_weights_of_heads_that_differ_have_no_shape() -> None:
    model = build("llama", attention="eager")
    with method("adakv")(model) as run, torch.no_grad():
        first = model(input_ids=prompt(40), output_attentions=True)
        assert [tuple(one.shape) for one in first.attentions] == [(1, 4, 40, 40)] * 3
        assert run.cache is not None
        before = live_sets(run.cache)
        with pytest.raises(SpecError, match="output_attentions = True: heads that store different tokens"):
            model(input_ids=prompt(1), past_key_values=run.cache, output_attentions=True)
        assert live_sets(run.cache) == before
        model(input_ids=prompt(1), past_key_values=run.cache)


def test_guidance_reads_into_a_second_cache() -> None:
    model = build("llama")
    with METHODS["crystalcache"]()(model), pytest.raises(SpecError, match=r"guidance_scale = 2\.0: is not served"):
        greedy(model, prompt(40), 3, guidance_scale=2.0)
    with METHODS["crystalcache"]()(model):
        greedy(model, prompt(40), 3, guidance_scale=1.0)
