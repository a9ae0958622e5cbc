"""A policy evicts from each layer right after that layer, and keeps what it would keep after the forward pass."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from conformance.own.models_integration.session.families import (
    _GQA,
    METHODS,
    WHOLE,
    at_once,
    build,
    crossed,
    prepare,
    prompt,
    step_by_step,
)
from conformance.own.models_integration.session.sessions import Looking, method_of, published
from models_integration import RetainedCache, RetentionPolicy, Session, StreamingLLM
from models_integration.cache.dense_layer import DenseLayer
from models_integration.model.architecture import describe
from reference.policies.describe import describe_policy, list_policies
from spec.policy import Needs
from spec.records import CrystalRetention
from spec.retention import Retention

pytestmark = pytest.mark.law("freed-memory")


N = 64
L = 3
H_KV = 2
D = 12


def read(model: PreTrainedModel, method: RetentionPolicy, ids: Tensor, *, streamed: bool) -> tuple[Session, Tensor]:
    """A prompt in one forward; inside `run.prompt()` it is decided and compacted when the forward is over."""
    cache = RetainedCache(model.config)
    with method(model) as run:
        if streamed:
            return run, at_once(model, ids, cache)
        with run.prompt():
            logits = at_once(model, ids, cache)
    return run, logits


@crossed("method", METHODS, whole=("llama",))
@pytest.mark.spec("CC-COMPACT")
def test_the_result_is_that_of_compaction_after_the_forward(family: str, method: str) -> None:
    model, ids, following = build(family), prompt(N), prompt(5, seed=9)
    runs = [read(model, METHODS[method](), ids, streamed=streamed) for streamed in (True, False)]
    (first, logits), (second, other) = runs
    assert torch.equal(logits, other)
    assert first.cache is not None
    assert second.cache is not None
    for a, b in zip(first.cache.layers, second.cache.layers, strict=True):
        assert torch.equal(a.keys, b.keys)  # type: ignore[union-attr, arg-type]
        assert torch.equal(a.values, b.values)  # type: ignore[union-attr, arg-type]
    assert torch.equal(first.cache.stored_positions(), second.cache.stored_positions())
    assert first.bytes_freed == second.bytes_freed
    assert first.over_budget == second.over_budget
    if isinstance(first.retention, CrystalRetention):
        assert isinstance(second.retention, CrystalRetention)
        np.testing.assert_array_equal(first.retention.scores, second.retention.scores)
    steps = [step_by_step(model, following, run.cache) for run, _ in runs if run.cache is not None]
    assert torch.equal(*steps)


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "crystalcache"), ("gemma3", "streamingllm"), ("llama", "snapkv")],
)
def test_one_layer_at_most_is_whole(family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a layer's keys come, those of all earlier layers are compacted, and the whole ones are freed."""
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    update = DenseLayer.update

    def watched(layer: DenseLayer, *tensors: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        counts.append(sum(reference() is not None for reference in alive))
        keys, values = update(layer, *tensors, **others)
        alive.extend((weakref.ref(keys), weakref.ref(values)))
        return keys, values

    monkeypatch.setattr(DenseLayer, "update", watched)
    model = build(family)
    policy = METHODS[method]() if method in METHODS else published(method, model)
    policy(model)  # what is found out at the door, once a model, is no forward of this prompt
    full = len(describe(model).full_layers)
    for streamed, expected in ((True, [0] * full), (False, [2 * done for done in range(full)])):
        alive.clear()
        counts.clear()
        read(model, policy, prompt(N), streamed=streamed)
        assert counts == expected
        assert sum(reference() is not None for reference in alive) == 0


BY_LAYER = tuple(one.name for one in list_policies() if one.layer_by_layer and one.layers == "all")


def of_two_prompts(name: str, *, streamed: bool) -> tuple[Session, Tensor]:
    """Two prompts under a policy, one of them padded where the policy takes padding, and three decode steps.

    Inside `run.prompt()` a prompt is decided and compacted when the forward is over.
    """
    model, ids = build("llama"), torch.cat([prompt(N), prompt(N, seed=4)])
    mask = torch.ones_like(ids)
    mask[1, : 9 * describe_policy(name).padded_batches] = 0
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad(), published(name, model)(model) as run:
        if streamed:
            logits = [model(**given).logits]
        else:
            with run.prompt():
                logits = [model(**given).logits]
        for step in range(3):
            given = {"input_ids": prompt(2, seed=5 + step).T, "past_key_values": run.cache}
            logits.append(model(**given).logits)
    return run, torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", [*BY_LAYER, "diverse-snapkv", "diverse-tova"])
def test_layers_that_are_decided_alone_keep_what_they_would_together(name: str) -> None:
    (first, logits), (second, other) = (of_two_prompts(name, streamed=streamed) for streamed in (True, False))
    assert torch.equal(logits, other)
    assert isinstance(first.retention, tuple)
    assert isinstance(second.retention, tuple)
    for mine, theirs in zip(first.retention, second.retention, strict=True):
        assert isinstance(mine, Retention)
        assert isinstance(theirs, Retention)
        assert mine.positions.tolist() == theirs.positions.tolist()
        assert mine.offsets.tolist() == theirs.offsets.tolist()
    assert first.cache is not None
    assert second.cache is not None
    for a, b in zip(first.cache.full_layers, second.cache.full_layers, strict=True):
        assert type(a) is type(b)
        assert all(
            torch.equal(a.head_positions(row, head), b.head_positions(row, head))
            for row in range(a.batch) for head in range(a.heads)
        )
    for what in ("bytes_freed", "over_budget"):
        assert getattr(first, what) == getattr(second, what)
    assert first.cache.layers_differ == second.cache.layers_differ


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that tensors on the CPU took during the run, beyond what they took before."""
    gc.collect()  # what other tests left would be freed during the run
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    used = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    return peak


def test_the_peak_of_a_deep_model_is_that_of_one_whole_layer() -> None:
    layers, n = 24, 512
    torch.manual_seed(0)
    config = LlamaConfig(**{**_GQA, "num_hidden_layers": layers, "num_key_value_heads": 4})
    model = prepare(LlamaForCausalLM(config))
    base, kept, ids, method = model.base_model, n // 8, prompt(n), StreamingLLM(0.125)
    one = 2 * 4 * 12 * n * 4

    def reading(*, streamed: bool) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                if streamed:
                    with method(model):
                        base(input_ids=ids)
                else:
                    with method(model) as session, session.prompt():
                        base(input_ids=ids)

        return run

    streamed, deferred = (peak_bytes(reading(streamed=way)) for way in (True, False))
    assert deferred - streamed > 0.95 * (layers - 2) * one * (1 - kept / n)
    assert streamed < deferred / 3


@pytest.mark.law("a-cache-like-any-other")
@pytest.mark.parametrize("family", WHOLE)
def test_masks_and_lengths_of_later_layers_are_undisturbed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model asks the cache during the forward, the answers are those of a whole cache."""
    answers: list[object] = []
    for name in ("get_mask_sizes", "get_seq_length", "get_query_offset"):
        original = getattr(RetainedCache, name)

        def asked(cache: RetainedCache, *args: Any, original: Any = original, **kwargs: Any) -> object:
            answer = original(cache, *args, **kwargs)
            answers.append(answer)
            return answer

        monkeypatch.setattr(RetainedCache, name, asked)
    model, found = build(family), []
    for method in ("crystalcache", "fullcache"):
        METHODS[method]()(model)  # what is found out at the door, once a model, is no forward of this prompt
        answers.clear()
        read(model, METHODS[method](), prompt(N), streamed=True)
        found.append(list(answers))
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(
    ("needs", "when"), [(Needs(), 0), (Needs("observed", 4), 0), (Needs("all", 4), 3)],
    ids=["none", "observed", "all"],
)
def test_a_policy_decides_as_soon_as_it_can(needs: Needs, when: int) -> None:
    model = build("llama")
    attended: list[int] = []
    scorer = Looking(needs)
    decided: list[int] = []
    looking = scorer.__call__

    class Noting(Looking):
        def __call__(self, *args: Any) -> Any:
            decided.append(len(attended))
            return looking(*args)

    handles = [
        module.register_forward_hook(lambda *_: attended.append(1)) for module in describe(model).attention.values()
    ]
    with method_of(Noting(needs))(model):
        at_once(model, prompt(N), RetainedCache(model.config))
    for handle in handles:
        handle.remove()
    assert decided == [when]


@pytest.mark.law("figures-are-counted-right")
def test_the_stages_take_no_longer_than_the_forward() -> None:
    model = build("llama")
    start = time.perf_counter()
    run, _ = read(model, METHODS["crystalcache"](), prompt(N), streamed=True)
    whole = time.perf_counter() - start
    assert set(run.timings) == {"capture", "decision", "compaction"}
    assert all(seconds > 0 for seconds in run.timings.values())
    assert sum(run.timings.values()) < whole
