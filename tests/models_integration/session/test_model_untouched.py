"""A full budget changes no bit, and a session leaves the model unchanged, after an error and if it is never left."""

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from conformance.verify.function import Verdict
from models_integration import CrystalCache, FullCache, RetainedCache, RetentionPolicy, StreamingLLM, prefill
from models_integration.attention import capture
from models_integration.model.architecture import DECODERS_IN_SESSION, attention_modules, describe
from reference.crystalcache import prefill as decided
from reference.crystalcache.coattention import attention
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs
from spec.records import CrystalRetention
from tests.models_integration.session.families import (
    _ALTERNATING,
    _GQA,
    ENDS,
    FAMILIES,
    METHODS,
    at_once,
    build,
    greedy,
    prepare,
    prompt,
    relative,
    step_by_step,
    tiny,
)
from tests.models_integration.session.sessions import Failing, check_as_it_was, method, method_of, shown, snapshot

pytestmark = pytest.mark.law("the-model-stays-as-it-was")


def whole() -> RetentionPolicy:
    return CrystalCache(1.0, ENDS, TINY, backend="numpy")


FULL: dict[str, Callable[[], RetentionPolicy]] = {
    "fullcache": FullCache, "crystalcache": whole,
    **{name: partial(method, name, 1.0) for name in ("adakv", "chunkkv", "h2o", "snapkv")},
}


@pytest.mark.parametrize(("family", "name", "dtype"), [
    *product(["llama"], FULL, [torch.float32]), ("gemma3", "snapkv", torch.float32),
    *product([family for family in FAMILIES if family != "llama"], ["crystalcache"], [torch.float32]),
    ("llama", "crystalcache", torch.float64), ("gemma3", "crystalcache", torch.bfloat16),
    ("llama", "crystalcache", torch.float16),
])
def test_a_full_budget_changes_no_bit(family: str, name: str, dtype: torch.dtype) -> None:
    model, ids, following = build(family, dtype=dtype), prompt(50), prompt(6, seed=9)
    cache = DynamicCache(config=model.config)
    plain = torch.cat([at_once(model, ids, cache), step_by_step(model, following, cache)], dim=1)
    tokens = greedy(model, ids, 10)
    with FULL[name]()(model) as run:
        assert torch.equal(greedy(model, ids, 10), tokens)
        cache = RetainedCache(model.config)
        assert torch.equal(torch.cat([at_once(model, ids, cache), step_by_step(model, following, cache)], dim=1), plain)
    assert run.stored == run.seen == 56
    assert run.bytes_freed == 0
    assert run.over_budget == 0


def test_a_full_budget_still_runs_every_stage() -> None:
    model = build("llama")
    with whole()(model) as run:
        greedy(model, prompt(50), 2)
    (retention,) = run.retentions
    assert isinstance(retention, CrystalRetention)
    assert len(retention.coattention.salience) == 50
    assert len(retention.trunks.sizes) > 1
    assert set(run.timings) == {"capture", "decision", "compaction"}
    assert all(seconds > 0 for seconds in run.timings.values())


class Boom(Exception):
    pass


def failing_at(model: torch.nn.Module, layer: int, error: BaseException) -> torch.utils.hooks.RemovableHandle:
    def fail(*_: object) -> None:
        raise error

    mlp = model.get_submodule(f"model.layers.{layer}.mlp")
    return mlp.register_forward_pre_hook(fail)


@pytest.mark.parametrize(("family", "where", "error"), [
    ("llama", "layer", KeyboardInterrupt()), ("llama", "policy", Boom()), ("gemma3", "caller", KeyboardInterrupt()),
])
def test_the_model_is_as_it_was_after_an_error(family: str, error: BaseException, where: str) -> None:
    """Check errors in a layer, in a policy and in the caller, during generation too."""
    model = build(family)
    greedy(model, prompt(20), 2)
    before = snapshot(model)
    policy = method_of(Failing(error)) if where == "policy" else METHODS["crystalcache"]()
    fails = failing_at(model, 1, error) if where == "layer" else nullcontext()
    with fails, pytest.raises(type(error)), policy(model):
        assert vars(model)["generate"].__name__ == "generate"
        greedy(model, prompt(40), 4)
        raise error
    check_as_it_was(before, model)


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.law("parts-equal-the-whole")
def test_several_prompts_and_steps_interleave_inside_one_context() -> None:
    model, following = build("llama"), prompt(3, seed=9)
    prompts = [prompt(40, seed=4), prompt(55, seed=5)]
    alone = [step_by_step(model, following, prefill(model, METHODS["crystalcache"](), ids).cache) for ids in prompts]
    with METHODS["crystalcache"]()(model):
        caches = [RetainedCache(model.config) for _ in prompts]
        for ids, cache in zip(prompts, caches, strict=True):
            at_once(model, ids, cache)
        turns = [[at_once(model, token, cache) for cache in caches] for token in torch.split(following, 1, dim=1)]
    for row, expected in enumerate(alone):
        assert relative(torch.cat([turn[row] for turn in turns], dim=1), expected) < 1e-6


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.law("parts-equal-the-whole")
def test_contexts_of_two_models_do_not_interact() -> None:
    llama, gemma, ids = build("llama"), build("gemma3"), prompt(50)
    alone = []
    for model in (llama, gemma):
        with METHODS["crystalcache"]()(model):
            alone.append(greedy(model, ids, 6))
    with METHODS["crystalcache"]()(llama) as first, METHODS["crystalcache"]()(gemma) as second:
        assert torch.equal(greedy(gemma, ids, 6), alone[1])
        assert first.kept is None
        assert torch.equal(greedy(llama, ids, 6), alone[0])
        assert second.kept is not None
        assert first.kept is not None


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("given", ["model", "decoder"])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_a_copy_that_is_made_inside_is_free_of_the_policy(copied: Callable[[Any], Any], given: str) -> None:
    model: Any = build("llama")
    plain = greedy(model, prompt(40), 6)
    subject = model if given == "model" else model.model
    with METHODS["streamingllm"]()(subject) as run:
        twin = copied(subject)
        assert not {"generate", "__getstate__"} & vars(twin).keys()
        decoder = twin.get_decoder()
        if copied is not copy.copy or given == "decoder":
            assert not decoder._forward_pre_hooks
            assert not decoder._forward_hooks
            assert not decoder._forward_pre_hooks_with_kwargs
            assert not decoder._forward_hooks_always_called
            cache = DynamicCache()
            at_once(model if given == "decoder" else twin, prompt(40), cache) if given == "model" else decoder(
                input_ids=prompt(40), past_key_values=cache
            )
            assert type(cache) is DynamicCache
            assert run.cache is None
        greedy(model, prompt(40), 2)
        assert run.kept is not None
    assert torch.equal(greedy(model, prompt(40), 6), plain)
    if given == "model":
        assert torch.equal(greedy(twin, prompt(40), 6), plain)


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_what_a_session_did_can_be_copied(copied: Callable[[Any], Any]) -> None:
    model = build("llama")
    with METHODS["streamingllm"]()(model) as run:
        greedy(model, prompt(40), 2)
        inside = copied(run)
    for twin in (inside, copied(run)):
        assert repr(twin) == repr(run)
        assert twin.kept.tolist() == run.kept.tolist()  # type: ignore[union-attr]
        with pytest.raises(SpecError, match="a session can be used once"), twin:
            raise AssertionError
        with pytest.raises(SpecError, match="must be inside `with policy"), twin.reading():
            raise AssertionError


N = 40
# With a prompt this long and several seeds, a wrong scaling changes a kept set.
DECIDED = 120
SEEDS = range(4)
TOLERANCE = 1e-5
# There are three query heads for each KV head. The head dimension is not hidden_size / heads.
_SIX: dict[str, Any] = {**_GQA, "num_attention_heads": 6}
_WINDOWS = {**_SIX, **_ALTERNATING, "query_pre_attn_scalar": 256}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Return parameters of rotary positions with the given base."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


TELLING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {**_WINDOWS, "attn_logit_softcapping": 0.2, **rope(300.0)}),
    "gemma3": ("Gemma3", {**_WINDOWS, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in (("sliding_attention", 40.0), ("full_attention", 300.0))
    }}),
    "granite": (
        "Granite", {**_SIX, "head_dim": 8, "attention_multiplier": 1.1, "embedding_multiplier": 3.0, **rope(300.0)},
    ),
    "gpt_neox": ("GPTNeoX", {**_SIX, "num_attention_heads": 3, **rope(30.0, partial_rotary_factor=0.25)}),
    "phi3": ("Phi3", {**_SIX, "sliding_window": None, **rope(300.0, partial_rotary_factor=0.5)}),
    "gpt_oss": ("GptOss", {**_WINDOWS, "num_local_experts": 2, "num_experts_per_tok": 1, **rope(300.0)}),
    "llama": ("Llama", {**_SIX, "head_dim": 20, "attention_bias": True, **rope(300.0)}),
}
"""Classes and configs in which no field has its default value."""


def telling_model(family: str) -> PreTrainedModel:
    """Return a model with eager attention, which also supports a soft cap."""
    name, fields = TELLING[family]
    return prepare(tiny(name, **fields), attention="eager")


def check_shown(model: PreTrainedModel) -> None:
    """Check that the tensors that a scorer receives give the attention weights of the layer."""
    ((layer, view),) = shown(model, prompt(N), Needs("observed", None)).layers.items()
    places = np.arange(N)
    q, k = view.q.astype(np.float64), view.k.astype(np.float64)
    sinks = None if view.sinks is None else view.sinks.astype(np.float64)
    actual = attention(q, k, places, places, view.scaling, view.softcap, sinks)
    with torch.no_grad():
        weights = model(input_ids=prompt(N), output_attentions=True).attentions[layer][0]
    assert relative(torch.from_numpy(actual).float(), weights) < TOLERANCE


def check_decided(model: PreTrainedModel) -> None:
    """Check that kept sets follow from q and k with the scaling, cap and sinks of the module."""
    cap = getattr(model.config, "attn_logit_softcapping", None)
    for seed in SEEDS:
        ids = prompt(DECIDED, seed)
        ((layer, view),) = shown(model, ids, Needs("observed", None)).layers.items()
        module = attention_modules(model)[layer]
        scaling, sinks = float(module.scaling), getattr(module, "sinks", None)  # type: ignore[arg-type]
        expected = decided(
            view.q, view.k, ids[0].numpy(), ENDS, 0.3, TINY, scaling=scaling, softcap=cap,
            sinks=None if sinks is None else sinks.detach().numpy(),
        )
        kept = prefill(model, CrystalCache(0.3, ENDS, TINY, backend="numpy"), ids).cache.stored_positions()
        assert kept.tolist() == expected.kept.tolist()


@pytest.mark.parametrize("family", [*TELLING, *(name for name in FAMILIES if name not in TELLING)])
@pytest.mark.spec("CC-ATTENTION")
def test_what_a_scorer_is_shown_gives_the_layer_s_attention(family: str) -> None:
    check_shown(telling_model(family) if family in TELLING else build(family, attention="eager"))


@pytest.mark.parametrize("family", TELLING)
@pytest.mark.spec("CC-PREFILL")
def test_the_decision_is_that_of_the_model_s_own_scaling_and_cap(family: str) -> None:
    check_decided(telling_model(family))


@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "h2o"])
def test_a_session_without_references_ends(policy: str) -> None:
    model: Any = build("llama")
    decoder = describe(model).decoder
    run = method(policy)(model).__enter__()
    greedy(model, prompt(40), 3)
    assert decoder in DECODERS_IN_SESSION
    held = [run]
    del run
    with pytest.warns(RuntimeWarning, match="evicts nothing from now on: write `with policy"):
        held.clear()
    gc.collect()
    assert decoder not in DECODERS_IN_SESSION
    assert not decoder._forward_pre_hooks
    assert not decoder._forward_hooks
    assert "generate" not in vars(model)
    with method(policy)(model) as run:
        greedy(model, prompt(40), 3)
    assert run.bytes_freed > 0


def test_a_session_that_is_entered_and_thrown_away_warns_at_once() -> None:
    """Check the warning, because `generate` would otherwise use a full cache in silence."""
    model: Any = build("llama")
    with pytest.warns(RuntimeWarning, match="nothing holds the session of this LlamaForCausalLM"):
        method("snapkv")(model).__enter__()


@pytest.mark.law("refused-before-anything-changes")
def test_a_second_task_is_told_of_a_lock() -> None:
    model: Any = build("llama")

    async def work() -> None:
        with StreamingLLM(0.5)(model):
            await asyncio.sleep(0.01)

    async def both() -> Any:
        return await asyncio.gather(work(), work(), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None
    assert isinstance(second, SpecError)
    assert "use a lock around the blocks of all threads and tasks" in str(second)


@pytest.mark.law("refused-before-anything-changes")
def test_a_second_thread_in_a_forward_pass_is_told_of_the_first() -> None:
    """Check the error during a forward pass, when the model's attention name is one of kvspec."""
    model, actual = build("llama"), list[str]()

    def other() -> None:
        with pytest.raises(SpecError) as caught:
            StreamingLLM(0.5)(model)
        actual.append(str(caught.value))

    def during(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with describe(model).attention[1].register_forward_hook(during), method("snapkv")(model), torch.no_grad():
        model(input_ids=prompt(40))
    (text,) = actual
    assert "is in a forward pass of a different thread: join the thread" in text
    assert "kvspec_" not in text


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", ["snapkv", "tova"])
def test_a_second_thread_that_calls_the_model_of_an_open_block_is_told_of_the_first(name: str) -> None:
    """Check that the first forward pass is as without a second thread, and that threads may call in turns."""
    model, refused = build("llama"), list[str]()

    def other() -> None:
        with pytest.raises(SpecError) as caught:
            at_once(model, prompt(30), RetainedCache(model.config))
        refused.append(str(caught.value))

    def during(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    def logits() -> torch.Tensor:
        with method(name)(model) as run:
            result = at_once(model, prompt(40), RetainedCache(model.config))
            assert run.seen == 40
            in_turn = threading.Thread(target=at_once, args=(model, prompt(30), RetainedCache(model.config)))
            in_turn.start()
            in_turn.join()
            assert run.seen == 30
        return result

    expected = logits()
    with describe(model).attention[1].register_forward_hook(during):
        assert torch.equal(logits(), expected)
    (text,) = refused
    assert "is in a forward pass of a different thread: join the thread, or use a lock around each call" in text


@pytest.mark.law("refused-before-anything-changes")
def test_a_second_thread_that_enters_at_the_same_time_is_told_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a model that another thread begins to read after the first check of this thread."""
    model = build("llama")
    monkeypatch.setattr(capture, "attention_of", lambda config: "kvspec_sdpa")
    with pytest.raises(SpecError, match="is in a forward pass of a different thread: join the thread"):
        StreamingLLM(0.5)(model)


@pytest.mark.law("figures-are-counted-right")
def test_the_sentence_ends_of_a_text_are_counted() -> None:
    model, ids = build("llama"), prompt(40)
    ends = frozenset({int(ids[0, 7]), int(ids[0, 20])})
    with CrystalCache(0.5, ends, TINY, backend="numpy")(model) as run, torch.no_grad():
        assert run.sentence_ends is None
        model(input_ids=ids)
    assert run.sentence_ends == sum(int(token) in ends for token in ids[0])
    with method("snapkv")(model) as run, torch.no_grad():
        model(input_ids=ids)
    assert run.sentence_ends is None


@pytest.mark.law("figures-are-counted-right")
def test_results_show_themselves_in_a_notebook() -> None:
    model: Any = build("llama")
    with method("snapkv")(model) as run, torch.no_grad():
        model(input_ids=prompt(40))
    shown = run._repr_html_()
    assert f"<tr><th>bytes_freed</th><td>{run.bytes_freed}</td></tr>" in shown
    assert "<caption>snapkv</caption>" in shown
    assert f"<tr><th>kept</th><td>{run.kept_tokens[0]}</td></tr>" in shown  # The budget is in the adjacent column.
    assert "no prompt yet" in method("snapkv")(model)._repr_html_()
    verdict = Verdict(False, "<b>1 of 2</b> failed", ("PO-<i>",), {}, (), "text")._repr_html_()
    assert "&lt;b&gt;1 of 2&lt;/b&gt; failed" in verdict
    assert "PO-&lt;i&gt;" in verdict
    assert "<b>" not in verdict
