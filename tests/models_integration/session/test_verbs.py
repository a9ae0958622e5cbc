"""One observation gives bit for bit the result of a context for each policy, and the rehearsal leaves no trace."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.methods.kvzip import chunks
from experiments.studies.subject import SHIPPED, Loading
from models_integration import (
    CrystalCache,
    CustomPolicy,
    Decision,
    FullCache,
    NamedPolicy,
    ObservedSegment,
    RetainedCache,
    RetentionPolicy,
    StreamingLLM,
    compact,
    decide,
    observe,
    repeat_template,
)
from models_integration.archive.splice import computed
from models_integration.model.architecture import attention_modules
from models_integration.model.rotation import recognise
from models_integration.pocket import load_pocket_tokenizer
from models_integration.session import observed as module
from models_integration.session.verbs import EVERYTHING, read, side_by_side
from reference.policies import kvzip, policy_from_score, snapkv
from reference.policies.names import DIVERSE, NAMES
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs, Rehearsal
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import (
    _GQA,
    ENDS,
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
from tests.models_integration.session.sessions import (
    CLASSES,
    ONE_SEGMENT,
    PROMPT,
    REHEARSED,
    TOLERANCE,
    batch,
    live_sets,
    prompts,
    published,
    skip_without_attention,
)
from tests.models_integration.session.sessions import same as same_cache

pytestmark = pytest.mark.law("parts-equal-the-whole")

N = 160
REHEARSAL = kvzip(**REHEARSED).scorer.needs.rehearsal
BUDGETS = (0.5, 0.1)
Make = Callable[[PreTrainedModel, float], RetentionPolicy]

MAKERS: dict[str, Make] = {
    "crystalcache": lambda model, budget: CrystalCache(budget, ENDS, TINY, backend="numpy"),
    "crystalcache with breaths": lambda model, budget: CrystalCache(budget, ENDS, TINY, backend="numpy", decode=True),
    "crystalcache of the last layer": lambda model, budget: CrystalCache(
        budget, ENDS, replace(TINY, observed_layer=-1), backend="numpy"
    ),
    "StreamingLLM": lambda model, budget: StreamingLLM(budget, N_sink=2),
    "FullCache": lambda model, budget: FullCache(),
}


def make_policy(name: str, model: PreTrainedModel, budget: float) -> RetentionPolicy:
    return MAKERS[name](model, budget) if name in MAKERS else published(name, model, budget)


def same(actual: object, expected: object) -> bool:
    """Return whether two values are equal to the bit. Records are compared field by field."""
    if type(actual) is not type(expected):
        return False
    if is_dataclass(actual):
        return all(same(getattr(actual, one.name), getattr(expected, one.name)) for one in fields(actual))
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return torch.equal(actual, expected)
    if isinstance(actual, np.ndarray) and isinstance(expected, np.ndarray):
        return actual.dtype == expected.dtype and np.array_equal(actual, expected, equal_nan=True)
    return actual == expected


def goes_on(model: PreTrainedModel, policy: RetentionPolicy, cache: RetainedCache, turn: bool) -> list[Tensor]:
    """Return the logits of steps, of a turn, and of a step after the turn, in a separate context."""
    rows = cache.full_layers[0].batch
    pieces = [1, 1, 1, *([7, 1] if turn else [])]
    with policy(model):
        return [at_once(model, prompt(n, seed=20 + at).repeat(rows, 1), cache) for at, n in enumerate(pieces)]


def check(
    model: PreTrainedModel, policy: RetentionPolicy, observed: ObservedSegment, *, steps: bool = True,
    turn: bool = True, **mask: Tensor,
) -> Decision:
    """Check that retentions, stored tensors and logits equal those of a context that reads the same prompts."""
    with policy(model) as run, torch.no_grad():
        model(input_ids=observed.input_ids, **mask)
    assert run.cache is not None
    decision = decide(policy.on(model), observed)
    assert same(decision.retentions, run.retentions)
    assert decision.over_budget == run.over_budget
    cache = compact(observed.cache, decision)
    same_cache(cache, run.cache)
    assert same(cache.continuation, run.cache.continuation)
    if steps:
        assert all(map(torch.equal, goes_on(model, policy, cache, turn), goes_on(model, policy, run.cache, turn)))
        same_cache(cache, run.cache)
    return decision


@pytest.fixture(scope="module")
def llama(one_thread: None) -> Iterator[tuple[PreTrainedModel, ObservedSegment]]:
    """Yield a model and one observation for all policies. Then check that the full cache is unchanged."""
    model = build("llama")
    observed = observe(model, prompt(N), needs=replace(EVERYTHING, rehearsal=REHEARSAL, hidden=True))
    before = [tensor.clone() for tensor in tensors(observed.cache)]
    yield model, observed
    assert all(torch.equal(x, y) for x, y in zip(tensors(observed.cache), before, strict=True))
    assert live_sets(observed.cache) == {layer: [list(range(N))] * 2 for layer in range(3)}


@pytest.mark.parametrize("name", [*MAKERS, *(name for name in NAMES if name not in CLASSES)])
def test_one_observation_serves_every_policy_at_every_budget(
    name: str, llama: tuple[PreTrainedModel, ObservedSegment],
) -> None:
    """A diverse policy is checked at the smaller budget only. Sessions continue from the smaller budget."""
    model, observed = llama
    for budget in BUDGETS[name.startswith(DIVERSE) :]:
        policy = make_policy(name, model, budget)
        turn = name.removeprefix(DIVERSE) not in ONE_SEGMENT
        decision = check(model, policy, observed, steps=budget == BUDGETS[-1], turn=turn)
        sets = [kept for heads in live_sets(compact(observed.cache, decision)).values() for kept in heads]
        if budget == BUDGETS[0] and name != "simlayerkv":  # no layer of this model is lazy
            assert (sets.count(sets[0]) < 6) == (policy.on(model).policy.granularity is not Granularity.MODEL)
        if name not in MAKERS:
            assert decision.over_budget == 0
            assert sum(map(len, sets)) <= 6 * parse_budget(budget).tokens(N)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "crystalcache"), ("llama", "adakv"), ("gemma3", "h2o"), ("gemma3", "crystalcache")],
)
def test_rows_of_a_padded_batch_too(name: str, family: str) -> None:
    model = build(family)
    ids, mask = batch(prompts())
    observed = observe(model, ids, mask)
    check(model, make_policy(name, model, 0.3), observed, turn=name == "crystalcache", attention_mask=mask)


@pytest.mark.parametrize(("name", "dtype", "attention"), [
    ("crystalcache", torch.bfloat16, "sdpa"), ("crystalcache", torch.float64, "eager"),
    ("snapkv", torch.float64, "sdpa"), ("tova", torch.bfloat16, "eager"),
])
def test_other_precisions_and_attention_without_a_log_sum_exp(name: str, dtype: torch.dtype, attention: str) -> None:
    if attention == "sdpa":
        skip_without_attention(dtype)
    model = build("llama", dtype=dtype, attention=attention)
    check(model, make_policy(name, model, 0.3), observe(model, prompt(N)))


@pytest.mark.law("the-model-stays-as-it-was")
def test_the_last_logits_are_those_that_generate_asks_for() -> None:
    model, ids = build("llama"), prompt(N)
    with FullCache()(model), torch.no_grad():
        expected = model(input_ids=ids, logits_to_keep=1).logits
    logits = observe(model, ids).logits
    assert logits is not None
    assert torch.equal(logits, expected)


def test_a_small_observation_serves_those_whom_it_is_enough_for() -> None:
    """Check that other policies raise an error. An observation of all tensors never does."""
    model = build("llama")
    small = observe(model, prompt(N), needs=Needs("observed", None, token_ids=True))
    check(model, make_policy("crystalcache", model, 0.3), small)
    check(model, make_policy("StreamingLLM", model, 0.3), small)
    for name in ("snapkv", "knorm"):
        with pytest.raises(SpecError, match=r"observation = .*lacks tensors that the policy needs"):
            decide(make_policy(name, model, 0.3).on(model), small)
    rows = observe(model, prompt(N), needs=Needs("all", 8, values=True))
    check(model, CustomPolicy(snapkv(W=8), 0.3), rows)
    with pytest.raises(SpecError, match="lacks tensors that the policy needs"):
        decide(CustomPolicy(snapkv(W=9), 0.3).on(model), rows)


@pytest.mark.law("refused-before-anything-changes")
def test_what_cannot_be_observed_or_compacted_is_named() -> None:
    model, ids = build("llama"), prompt(N)
    observed = observe(model, ids)
    with pytest.raises(SpecError, match="a single token is a decode step"):
        observe(model, prompt(1))
    with pytest.raises(SpecError, match="right padding and gaps are not supported"):
        observe(model, ids, torch.ones_like(ids).index_fill(1, torch.tensor([N - 1]), 0))
    with pytest.raises(SpecError, match=f"must lie in .0, {VOCABULARY}"):
        observe(model, ids + VOCABULARY)
    with FullCache()(model), pytest.raises(SpecError, match="is already inside `with policy"):
        observe(model, ids)
    kept, empty = Retention.shared(np.arange(9), N), RetainedCache(model.config)
    with pytest.raises(SpecError, match="an empty cache': has no rows"):
        compact(empty, Decision((kept,)))
    with pytest.raises(SpecError, match="an empty cache': has no rows"):
        side_by_side(empty, 2)
    with pytest.raises(SpecError, match="must be for the 1 rows of the cache"):
        compact(observed.cache, Decision((kept, kept)))
    with pytest.raises(SpecError, match="must cover all 160 tokens"):
        compact(observed.cache, Decision((Retention.shared(np.arange(9), N - 1),)))
    assert compact(observed.cache, Decision((kept,))).stored_positions().tolist() == list(range(9))


@pytest.mark.law("unusable-after-a-failure")
def test_a_cache_cannot_be_used_after_a_forward_pass_that_was_stopped() -> None:
    model = build("llama")
    cache = observe(model, prompt(N)).cache

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hook = attention_modules(model.model)[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        read(model, cache, prompt(3))
    hook.remove()
    with pytest.raises(SpecError, match="a forward pass failed; start again with a new one"):
        read(model, cache, prompt(3))


@pytest.mark.law("figures-are-counted-right")
def test_a_decision_that_fails_changes_no_later_timings() -> None:
    observed = observe(build("llama"), prompt(N))

    def failing(observation: object) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decide(CustomPolicy(policy_from_score(failing), 0.5), observed)
    decide(StreamingLLM(0.5), observed)
    assert min(observed.watch.read().values()) > 0


@pytest.mark.law("the-model-stays-as-it-was")
def test_a_new_cache_that_fails_leaves_the_full_one_alone() -> None:
    """Check tensors of sliding layers, which both caches share, and the reset of some releases would set to zero."""
    model = build("gemma3")
    observed = observe(model, prompt(N))
    before = [tensor.clone() for tensor in tensors(observed.cache)]
    cache = compact(observed.cache, decide(FullCache().on(model), observed))
    at_once(model, prompt(3), cache)
    cache.reset()
    assert all(torch.equal(x, y) for x, y in zip(tensors(observed.cache), before, strict=True))
    assert observed.cache.get_seq_length() == N


PLAN = Rehearsal(REHEARSED["template"], 4, 3, 25, 8)
POLICY = kvzip(**REHEARSED, N_recent=3)


def rehearsed(model: Any, ids: Tensor) -> ObservedSegment:
    return observe(model, ids, needs=replace(EVERYTHING, rehearsal=PLAN))


@pytest.mark.spec("PO-REHEARSAL")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_neox"])
def test_a_repeat_asks_and_is_asked_as_in_the_whole_text(family: str) -> None:
    """Compare with one forward pass. Queries come from kvspec's capture, keys from the cache of transformers."""
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
            turn_keys = keys[layer].keys[0, :, PROMPT:]
            assert relative(torch.as_tensor(actual.k), turn_keys) < 1e-5
            assert relative(torch.as_tensor(actual.q), torch.as_tensor(whole[layer].q)[:, PROMPT:]) < 1e-5


@pytest.mark.spec("PO-KVZIP-PLUS", "PO-REHEARSAL")
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


@pytest.mark.spec("PO-REHEARSAL")
@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cache_is_as_it_was(family: str) -> None:
    """Check tensors of sliding layers too. Later tokens do not attend to the repeat."""
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


def same_rotation(model: PreTrainedModel, actual: dict[str, Any]) -> bool:
    now = rotation(model)
    pairs = ((torch.as_tensor(now[key]), torch.as_tensor(actual[key])) for key in now)
    return now.keys() == actual.keys() and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.spec("PO-REHEARSAL")
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


@pytest.mark.spec("PO-REHEARSAL")
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


@pytest.mark.spec("PO-REHEARSAL")
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


@pytest.mark.spec("PO-REHEARSAL")
@pytest.mark.law("parts-equal-the-whole")
def test_rows_of_a_batch_are_rehearsed_each() -> None:
    model, rows = build("llama"), torch.cat([prompt(PROMPT), prompt(PROMPT, seed=7)])
    with CustomPolicy(POLICY, 0.3)(model) as run, torch.no_grad():
        model(input_ids=rows)
    assert "rehearsal" in run.timings
    for row, actual in enumerate(run.retentions):
        (alone,) = decide(CustomPolicy(POLICY, 0.3).on(model), rehearsed(model, rows[row : row + 1])).retentions
        assert np.array_equal(actual.positions, alone.positions)


@pytest.mark.spec("PO-REHEARSAL")
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


@pytest.mark.spec("PO-REHEARSAL")
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
