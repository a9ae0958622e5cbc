"""A policy is shown, and heads that differ attend to, what the cache returned: other models are refused at the door."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from conformance.own.models_integration.session.families import (
    _GQA,
    METHODS,
    at_once,
    build,
    prepared,
    prompt,
    relative,
)
from conformance.own.models_integration.session.masked import Masked
from conformance.own.models_integration.session.sessions import (
    PROMPT,
    check_as_it_was,
    check_continuation,
    live_sets,
    method,
    read_prompt,
    snapshot,
)
from models_integration import RetentionPolicy, StreamingLLM, observe
from models_integration.archive.layer_masks import layer_masks
from models_integration.attention.capture import observing
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.model.architecture import describe
from models_integration.model.cache_argument import CACHE
from spec.errors import SpecError
from spec.policy import Needs
from spec.retention import Granularity, Retention

pytestmark = pytest.mark.law("refused-before-anything-changes")

OTHER = "the attention must use the keys and values that the cache returns, but uses different tensors"
APART = "needs the same tokens in all layers and heads of the cache"
MASK = f"{APART}: the model makes a separate attention mask$"


differential = partial(prepared, "DiffLlama", **_GQA)
"""Rearranges values between cache and attention, and attends twice."""
dynamic_masks = partial(prepared, "Doge", **_GQA)
"""Works a mask of its own out of the stored values."""
experts = partial(prepared, "JetMoe", **_GQA, kv_channels=12, num_local_experts=4, num_experts_per_tok=2)
"""Repeats keys and values for its experts; its query heads go round the KV heads."""
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], RetentionPolicy], str]] = {
    "rearranged values, a set for each head": (differential, lambda: method("adakv"), f"{APART}: {OTHER}"),
    "rearranged values, decisions in steps": (differential, lambda: method("h2o"), APART),
    "a mask of its own, a set for each head": (dynamic_masks, lambda: method("snapkv"), MASK),
    "a mask of its own, a set for each layer": (dynamic_masks, lambda: method("chunkkv"), MASK),
    "repeated keys, a set for each head": (experts, lambda: method("adakv"), OTHER),
    "repeated keys, a set for each layer": (experts, lambda: method("chunkkv"), OTHER),
    # A later turn would show the cache's keys, and pair them with other queries.
    "repeated keys, one set": (experts, METHODS["crystalcache"], OTHER),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_hands_on_other_tensors_is_refused_before_it_has_read_anything(name: str) -> None:
    make, policy, words = REFUSED[name]
    model = make()
    before, calls = snapshot(model), []
    with (
        model.base_model.register_forward_pre_hook(lambda *_: calls.append(1)),
        pytest.raises(SpecError, match=words) as caught,
    ):
        policy()(model)
    assert (caught.value.argument, caught.value.value) == ("model", type(model).__name__)
    assert not calls
    check_as_it_was(before, model)


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
    """In pieces, each query is noted once."""
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
    """It was made outside of any session."""
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
    """Llama's attention with another tensor in the place of what its cache returned."""
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
def test_a_model_that_nobody_has_named_is_found_out(
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
    """Both models stop over a mask that is no tensor, and one of them makes its own."""
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
    """Neither hooks nor random numbers nor the model's mode know of it."""
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
    """And memory that runs out is no refusal of the model."""
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
    """Keys and values then have dtypes of their own, which meet as in a plain cache."""
    model, token = build(family), prompt(1, seed=9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = read_prompt(model, method("adakv"))
        kept = live_sets(cache)
        with observing(describe(model), cache):
            found = at_once(model, token, cache)
        expected = Masked(model, prompt(PROMPT), kept).read(token)
    assert relative(found.float(), expected.float()) < 5e-2
    check_continuation(model, method("adakv"))
