"""Models that cannot be served are refused for their true reason, before anything is read; what wraps one is served."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.ctrl import modeling_ctrl

from conformance.own.models_integration.session.families import (
    _GQA,
    _SIZES,
    METHODS,
    SMALL,
    WINDOW,
    build,
    greedy,
    prepare,
    prepared,
    prompt,
    tiny,
)
from conformance.own.models_integration.session.sessions import check_continuation, live_sets, method
from models_integration import observe
from models_integration.attention.capture import Attended, Recorder
from models_integration.model.architecture import describe
from spec.errors import SpecError
from spec.policy import Needs

pytestmark = pytest.mark.law("refused-before-anything-changes")

_DEEP: dict[str, Any] = {"vocab_size": 61, "n_layer": 2, "n_head": 4}


def flex() -> Any:
    model = tiny("Llama", **SMALL)
    model.config._attn_implementation_internal = "flex_attention"
    return model


wrapper = partial(
    prepared, "LlavaForConditionalGeneration", text_config={"model_type": "llama", **_GQA}, vision_config={
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    },
)
"""A model that takes images."""


def with_slot_bias() -> PreTrainedModel:
    """A model that says nothing of ALiBi, and whose attention adds a bias by the distance of slots."""
    model = prepare(tiny("CTRLLMHeadModel", **_DEEP, n_embd=64, dff=48), attention="eager")
    modeling: Any = modeling_ctrl
    own = modeling.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        distance = torch.arange(key.shape[2] - 1, -1, -1)
        return own(module, query, key, value, (0 if mask is None else mask) - 0.5 * distance, **options)

    modeling.eager_attention_forward = biased
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no attention of its own": (partial(tiny, "RoFormer", **_SIZES, is_decoder=True), "no eager_attention_forward"),
    "ALiBi that nothing tells of": (with_slot_bias, "depends on the distance between cache slots, as with ALiBi"),
    "ALiBi, BLOOM": (partial(tiny, "Bloom", **_DEEP, hidden_size=32), "ALiBi"),
    "ALiBi, Falcon": (partial(tiny, "Falcon", **SMALL, alibi=True), "ALiBi"),
    "recurrent, Mamba": (
        partial(tiny, "Mamba", vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4), "nothing to evict",
    ),
    "recurrent, RWKV": (partial(tiny, "Rwkv", vocab_size=61, hidden_size=32, num_hidden_layers=2), "recurrent"),
    "all layers slide, Mistral": (partial(tiny, "Mistral", **SMALL, sliding_window=16), "no full-attention layer"),
    "all layers slide, Phi-3": (partial(tiny, "Phi3", **SMALL, sliding_window=16), "no full-attention layer"),
    "layers that share a cache, in releases before kv_sharing_modes": (
        partial(tiny, "Llama", **SMALL, num_kv_shared_layers=1), "layers that share one cache",
    ),
    "windows beside linear layers, MiniMax": (
        partial(tiny, "MiniMax", **SMALL, sliding_window=16), "have a window too",
    ),
    "encoder and decoder": (
        partial(tiny, "T5ForConditionalGeneration", vocab_size=61, d_model=32, d_kv=8, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "attention that sees the future": (partial(tiny, "Llama", **SMALL, is_causal=False), "not causal"),
    "an encoder that hides nothing": (partial(tiny, "BertLMHeadModel", **SMALL), "not causal"),
    "another attention implementation": (flex, "attn_implementation is 'flex_attention'"),
    "no transformers model": (lambda: nn.Linear(2, 2), "must be a transformers PreTrainedModel"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # some of these configurations warn of their own
def test_a_model_that_cannot_be_served_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = MODELS[name]
    monkeypatch.setattr(modeling_ctrl, "eager_attention_forward", modeling_ctrl.eager_attention_forward)
    model = make()
    with pytest.raises(SpecError, match=words) as caught:
        METHODS["crystalcache"]()(model)
    assert (caught.value.argument, caught.value.value) == ("model", type(model).__name__)


@pytest.mark.parametrize(
    ("options", "full"),
    [({"use_sliding_window": False}, (0, 1, 2)), ({"use_sliding_window": True, "max_window_layers": 2}, (0, 1))],
)
def test_a_window_that_is_set_counts_only_where_it_is_used(options: dict[str, Any], full: tuple[int, ...]) -> None:
    model = prepared("Qwen2", **_GQA, sliding_window=WINDOW, **options)
    assert describe(model).full_layers == full
    check_continuation(model, METHODS["crystalcache"]())


@pytest.mark.law("as-it-is-described")
def test_a_wrapper_s_language_model_is_served() -> None:
    whole = wrapper()
    model: Any = whole.get_decoder()  # type: ignore[no-untyped-call]
    with METHODS["crystalcache"]()(model) as run, torch.no_grad():
        with pytest.raises(SpecError, match=r"inputs_embeds = 'given': .* pass input_ids to the model"):
            whole(input_ids=prompt(40))
        model(input_ids=prompt(40))
    assert run.kept is not None
    assert len(run.kept) == 20


def test_policies_that_read_attention_read_text_alone() -> None:
    whole: Any = wrapper()
    zeros, images = torch.zeros(1, 40, dtype=torch.int64), torch.zeros(1, 3, 16, 16)
    with METHODS["crystalcache"]()(whole) as run, torch.no_grad():
        for one in (whole, whole.get_decoder()):
            with pytest.raises(SpecError, match="is already inside `with policy"), METHODS["crystalcache"]()(one):
                pass
        for name, given in (("pixel_values", images), ("mm_token_type_ids", zeros + 1)):
            with pytest.raises(SpecError, match=f"{name} = 'given': image tokens can attend to later tokens"):
                whole.model(input_ids=prompt(40), **{name: given})
        whole.model(input_ids=prompt(40), token_type_ids=zeros)
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
@pytest.mark.parametrize(("wrap", "name"), [
    (Adapted, "critical-adakv"), (lambda model: torch.compile(Adapted(model), backend="eager"), "crystalcache"),
], ids=["adapters", "compiled adapters"])
def test_what_wraps_a_model_is_served_as_the_model(wrap: Callable[[Any], Any], name: str) -> None:
    """Its hooks, its generate and what a policy must know of it are those of the model inside."""
    model = build("llama")
    wrapped, found = wrap(model), []
    for given in (wrapped, model):
        with method(name)(given) as run, torch.no_grad():
            model(input_ids=prompt(40))
            with pytest.raises(SpecError, match="assisted decoding"):
                greedy(model, prompt(40), 2, prompt_lookup_num_tokens=3)
        assert run.cache is not None
        found.append(live_sets(run.cache))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the name of the switch is about to change
@pytest.mark.parametrize("when", ["before the context", "inside it"])
def test_gradient_checkpointing_leaves_the_cache_out(when: str) -> None:
    model, words = build("llama"), "gradient checkpointing disables the cache"
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


@pytest.mark.parametrize(("dtype", "options", "words"), [
    (torch.complex64, {}, r"dtype = torch.complex64: must be one of"),
    (torch.float32, {"position_bias": torch.zeros(2)}, "a position bias"),
])
def test_attention_beyond_q_and_k_is_refused(dtype: torch.dtype, options: dict[str, Tensor], words: str) -> None:
    tensor = torch.zeros(1, 2, 3, 4, dtype=dtype)
    seen = Attended(0, tensor, tensor, tensor, None, None, options)
    with pytest.raises(SpecError, match=words):
        Recorder(Needs("observed", None)).record(describe(build("llama")).attention[0], seen)


def test_a_model_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = tiny("Llama", **_GQA)
    refused: list[Callable[[], object]] = [
        lambda: METHODS["crystalcache"]()(model), lambda: method("adakv")(model), lambda: observe(model, prompt(40)),
    ]
    for act in refused:
        with pytest.raises(SpecError, match=r"'LlamaModel': has weights without values \(device meta\)"):
            act()
