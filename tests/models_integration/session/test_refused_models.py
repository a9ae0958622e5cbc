"""Unsupported models raise an error with the true reason before anything is read. Wrappers of models are supported."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.ctrl import modeling_ctrl
from transformers.models.llama import modeling_llama

from models_integration import RetentionPolicy, StreamingLLM, observe
from models_integration.archive.layer_masks import layer_masks
from models_integration.attention.capture import Attended, Recorder, observing
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.model.architecture import describe
from models_integration.model.cache_argument import CACHE
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import (
    _GQA,
    _SIZES,
    METHODS,
    SMALL,
    WINDOW,
    at_once,
    build,
    prepare,
    prepared,
    prompt,
    relative,
    tiny,
)
from tests.models_integration.session.masked import Masked
from tests.models_integration.session.sessions import (
    PROMPT,
    check_as_it_was,
    check_continuation,
    live_sets,
    method,
    read_prompt,
    snapshot,
)

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
"""Model that accepts images."""


def with_slot_bias() -> PreTrainedModel:
    """Return a model without an ALiBi option whose attention adds a bias by the distance of slots."""
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

OTHER = "the attention must use the keys and values that the cache returns, but uses different tensors"
APART = "needs the same tokens in all layers and heads of the cache"
MASK = f"{APART}: the model makes a separate attention mask$"

differential = partial(prepared, "DiffLlama", **_GQA)
"""Model that rearranges values between cache and attention, and computes attention twice."""
dynamic_masks = partial(prepared, "Doge", **_GQA)
"""Model that computes a separate mask from the stored values."""
experts = partial(prepared, "JetMoe", **_GQA, kv_channels=12, num_local_experts=4, num_experts_per_tok=2)
"""Model that repeats keys and values for its experts. The query heads cycle through the KV heads."""
HANDED: dict[str, tuple[Callable[[], Any], Callable[[], RetentionPolicy], str]] = {
    "rearranged values, a set for each head": (differential, lambda: method("adakv"), f"{APART}: {OTHER}"),
    "rearranged values, decisions in steps": (differential, lambda: method("h2o"), APART),
    "a mask of its own, a set for each head": (dynamic_masks, lambda: method("snapkv"), MASK),
    "a mask of its own, a set for each layer": (dynamic_masks, lambda: method("chunkkv"), MASK),
    "repeated keys, a set for each head": (experts, lambda: method("adakv"), OTHER),
    "repeated keys, a set for each layer": (experts, lambda: method("chunkkv"), OTHER),
    # A later turn would show the keys of the cache, and pair them with other queries.
    "repeated keys, one set": (experts, METHODS["crystalcache"], OTHER),
}


@pytest.mark.parametrize("name", [*MODELS, *HANDED])
@pytest.mark.filterwarnings("ignore")  # Some of these configurations issue warnings.
def test_a_model_that_cannot_be_served_is_named_before_it_has_read_anything(
    name: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy: Callable[[], RetentionPolicy] = METHODS["crystalcache"]
    if name in HANDED:
        make, policy, words = HANDED[name]
    else:
        make, words = MODELS[name]
    monkeypatch.setattr(modeling_ctrl, "eager_attention_forward", modeling_ctrl.eager_attention_forward)
    model, calls = make(), list[int]()
    before = snapshot(model) if isinstance(model, PreTrainedModel) else {}
    hook = getattr(model, "base_model", model).register_forward_pre_hook(lambda *_: calls.append(1))
    with hook, pytest.raises(SpecError, match=words) as caught:
        policy()(model)
    assert (caught.value.argument, caught.value.value) == ("model", type(model).__name__)
    assert not calls
    if before:
        check_as_it_was(before, model)


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


@pytest.mark.parametrize(("dtype", "options", "words"), [
    (torch.complex64, {}, r"dtype = torch.complex64: must be one of"),
    (torch.float32, {"position_bias": torch.zeros(2)}, "a position bias"),
])
def test_attention_beyond_q_and_k_is_refused(dtype: torch.dtype, options: dict[str, Tensor], words: str) -> None:
    tensor = torch.zeros(1, 2, 3, 4, dtype=dtype)
    seen = Attended(0, tensor, tensor, tensor, None, None, options)
    with pytest.raises(SpecError, match=words):
        Recorder(Needs("observed", None)).record(describe(build("llama")).attention[0], seen)


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize("make", [differential, dynamic_masks, experts])
def test_what_looks_at_nothing_that_is_rearranged_holds(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    if make is differential:
        for chosen in ("crystalcache", "streamingllm"):
            check_continuation(model, METHODS[chosen]())
    run, _ = read_prompt(model, StreamingLLM(20))
    assert run.kept is not None
    assert len(run.kept) == 20


@pytest.mark.law("parts-equal-the-whole")
def test_attention_that_runs_twice_has_asked_once() -> None:
    """Check that each query is recorded once, in one forward pass and in pieces."""
    model, at_once = differential(), {}
    for pieces in (1, 2):
        with METHODS["crystalcache"]()(model) as run, torch.no_grad():
            cache = None
            with run.prompt():
                for piece in torch.split(prompt(PROMPT), PROMPT // pieces, dim=1):
                    cache = model(input_ids=piece, past_key_values=cache, use_cache=True).past_key_values
        assert run.kept is not None
        at_once[pieces] = run.kept.tolist()
    assert at_once[1] == at_once[2]


def test_an_observation_of_other_values_is_refused() -> None:
    model = differential()
    with pytest.raises(SpecError, match=OTHER):
        observe(model, prompt(PROMPT))
    assert observe(model, prompt(PROMPT), needs=Needs("all", None)).columns == PROMPT
    with pytest.raises(SpecError, match=OTHER):
        observe(experts(), prompt(PROMPT), needs=Needs("observed", 1))


@pytest.mark.parametrize("read", ["session", "layer masks"])
def test_a_cache_whose_heads_differ_is_refused_wherever_it_is_read(read: str) -> None:
    """Check a cache that was created outside of any session."""
    model = differential()
    cache = observe(model, prompt(PROMPT), needs=Needs("all", None)).cache
    kept = torch.tensor([0, 1, 5]).repeat(6).numpy()
    kept[2] = 9
    cache.compact([Retention(kept, torch.arange(0, 19, 3).numpy(), PROMPT, Granularity.HEAD)])
    before = live_sets(cache)
    reader = StreamingLLM(20)(model) if read == "session" else layer_masks(model, cache)
    with torch.no_grad(), pytest.raises(SpecError, match=OTHER), reader:
        model(input_ids=prompt(1), past_key_values=cache)
    assert live_sets(cache) == before
    assert cache.get_seq_length() == PROMPT


def handing(change: Callable[[Tensor], Tensor], which: str) -> Callable[..., Any]:
    """Return Llama's attention with a different tensor in place of the keys or values that its cache returned."""
    own: Any = modeling_llama.LlamaAttention.forward

    def forward(module: nn.Module, *args: Any, **options: Any) -> Any:
        cache: Any = options.get(CACHE)

        class Between:
            def update(self, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
                keys, values = cache.update(*given, **more)
                return (change(keys), values) if which == "keys" else (keys, change(values))

        replaced: Any = {**options, CACHE: None if cache is None else Between()}
        return own(module, *args, **replaced)

    return forward


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("change", [torch.clone, torch.neg, lambda tensor: tensor.flip(0)])
def test_a_model_that_attends_to_changed_tensors_is_refused(
    change: Callable[[Tensor], Tensor], which: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", handing(change, which))
    with pytest.raises(SpecError, match=OTHER):
        method("adakv")(build("llama"))


@pytest.mark.parametrize("policy", ["adakv", "chunkkv"])
@pytest.mark.parametrize(
    ("mask", "words"), [(True, MASK), (False, f"{APART}: AttributeError, '.*' object has no attribute 'handed'$")]
)
def test_only_a_model_that_makes_masks_is_told_so(
    mask: bool, words: str, policy: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check two models that fail at a mask that is no tensor. Only one of them creates a mask."""
    own: Any = modeling_llama.LlamaAttention.forward

    def forward(module: nn.Module, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        if not isinstance(attention_mask, Tensor | None):
            attention_mask = attention_mask.handed
        elif mask and attention_mask is not None:
            attention_mask = attention_mask + 0
        replaced: Any = {**options, "attention_mask": attention_mask}
        return own(module, *args, **replaced)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(SpecError, match=words):
        method(policy)(build("llama"))


def test_one_that_changes_behind_the_door_is_refused_where_it_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method("adakv"))
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", handing(torch.neg, "values"))
    with observing(describe(model), cache), torch.no_grad(), pytest.raises(SpecError, match=OTHER):
        model(input_ids=prompt(1), past_key_values=cache)


@pytest.mark.law("the-model-stays-as-it-was")
def test_looking_leaves_no_trace() -> None:
    """Check that hooks, random numbers and the mode of the model are unchanged."""
    model = build("llama")
    model.config.attention_dropout = 0.5
    model.train(True)
    calls: list[nn.Module] = []
    seen, state = [], torch.get_rng_state()
    model.base_model.register_forward_hook(lambda module, *_: calls.append(module))
    first: Any = model.base_model.get_submodule("layers.0")
    first.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        method("adakv")(model)
    assert model.training
    assert not calls
    assert not seen
    assert len(first._forward_hooks) == 1
    assert torch.equal(torch.get_rng_state(), state)
    model.train(False)
    check_continuation(model, method("adakv"))


def failing(error: Exception) -> Callable[..., Any]:
    def update(*_: object, **__: object) -> None:
        raise error

    return update


@pytest.mark.law("as-it-is-described")
def test_a_model_that_was_refused_once_is_served_when_the_cause_is_gone() -> None:
    """Check that an error for lack of memory is not reported as an unsupported model."""
    model = build("llama")
    memory = torch.OutOfMemoryError("full")
    for error, caught in ((RuntimeError("not now"), SpecError), (memory, torch.OutOfMemoryError)):
        for part in (RaggedLayer, DenseLayer):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(caught, match=f"{error}"):
                patch.setattr(part, "update", failing(error))
                method("adakv")(model)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SpecError, match=OTHER):
        patch.setattr(modeling_llama.LlamaAttention, "forward", handing(torch.neg, "values"))
        method("adakv")(model)
    check_continuation(model, method("adakv"))


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_heads_that_differ_are_served_under_autocast(family: str) -> None:
    """Check keys and values of different dtypes, which are combined as in a plain cache."""
    model, token = build(family), prompt(1, seed=9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = read_prompt(model, method("adakv"))
        kept = live_sets(cache)
        with observing(describe(model), cache):
            actual = at_once(model, token, cache)
        expected = Masked(model, prompt(PROMPT), kept).read(token)
    assert relative(actual.float(), expected.float()) < 5e-2
    check_continuation(model, method("adakv"))
