"""One observation and many decisions give bit for bit the result of a separate context for each policy and budget."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models_integration import (
    CrystalCache,
    CustomPolicy,
    Decision,
    FullCache,
    ObservedSegment,
    RetainedCache,
    RetentionPolicy,
    StreamingLLM,
    compact,
    decide,
    observe,
)
from models_integration.session.verbs import EVERYTHING, side_by_side
from reference.policies import kvzip, snapkv
from reference.policies.names import DIVERSE, NAMES
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Needs
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import ENDS, VOCABULARY, at_once, build, prompt, tensors
from tests.models_integration.session.saved import same as same_cache
from tests.models_integration.session.sessions import (
    CLASSES,
    ONE_SEGMENT,
    REHEARSED,
    batch,
    live_sets,
    prompts,
    published,
    skip_without_attention,
)

pytestmark = pytest.mark.law("parts-equal-the-whole")

N = 160
REHEARSAL = kvzip(**REHEARSED).scorer.needs.rehearsal
BUDGETS = (0.5, 0.1)
Make = Callable[[PreTrainedModel, float], RetentionPolicy]

OWN: dict[str, Make] = {
    "crystalcache": lambda model, budget: CrystalCache(budget, ENDS, TINY, backend="numpy"),
    "crystalcache with breaths": lambda model, budget: CrystalCache(budget, ENDS, TINY, backend="numpy", decode=True),
    "crystalcache of the last layer": lambda model, budget: CrystalCache(
        budget, ENDS, replace(TINY, observed_layer=-1), backend="numpy"
    ),
    "StreamingLLM": lambda model, budget: StreamingLLM(budget, N_sink=2),
    "FullCache": lambda model, budget: FullCache(),
}


def made(name: str, model: PreTrainedModel, budget: float) -> RetentionPolicy:
    return OWN[name](model, budget) if name in OWN else published(name, model, budget)


def same(found: object, expected: object) -> bool:
    """Return whether two values are equal to the bit. Records are compared field by field."""
    if type(found) is not type(expected):
        return False
    if is_dataclass(found):
        return all(same(getattr(found, one.name), getattr(expected, one.name)) for one in fields(found))
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected, equal_nan=True)
    return found == expected


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


@pytest.mark.parametrize("name", [*OWN, *(name for name in NAMES if name not in CLASSES)])
def test_one_observation_serves_every_policy_at_every_budget(
    name: str, llama: tuple[PreTrainedModel, ObservedSegment],
) -> None:
    """Check each policy at each budget. A diverse policy is checked at the smaller budget only.

    Sessions continue from the smaller budget. Published policies keep the budget, at their granularity.
    """
    model, observed = llama
    for budget in BUDGETS[name.startswith(DIVERSE) :]:
        policy = made(name, model, budget)
        turn = name.removeprefix(DIVERSE) not in ONE_SEGMENT
        decision = check(model, policy, observed, steps=budget == BUDGETS[-1], turn=turn)
        sets = [own for heads in live_sets(compact(observed.cache, decision)).values() for own in heads]
        if budget == BUDGETS[0] and name != "simlayerkv":  # no layer of this model is lazy
            assert (sets.count(sets[0]) < 6) == (policy.on(model).policy.granularity is not Granularity.MODEL)
        if name not in OWN:
            assert decision.over_budget == 0
            assert sum(map(len, sets)) <= 6 * parse_budget(budget).tokens(N)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "crystalcache"), ("llama", "adakv"), ("gemma3", "h2o"), ("gemma3", "crystalcache")],
)
def test_rows_of_a_padded_batch_too(name: str, family: str) -> None:
    model = build(family)
    ids, mask = batch(prompts())
    observed = observe(model, ids, mask)
    check(model, made(name, model, 0.3), observed, turn=name == "crystalcache", attention_mask=mask)


@pytest.mark.parametrize(("name", "dtype", "attention"), [
    ("crystalcache", torch.bfloat16, "sdpa"), ("crystalcache", torch.float64, "eager"),
    ("snapkv", torch.float64, "sdpa"), ("tova", torch.bfloat16, "eager"),
])
def test_other_precisions_and_attention_without_a_log_sum_exp(name: str, dtype: torch.dtype, attention: str) -> None:
    if attention == "sdpa":
        skip_without_attention(dtype)
    model = build("llama", dtype=dtype, attention=attention)
    check(model, made(name, model, 0.3), observe(model, prompt(N)))


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
    check(model, made("crystalcache", model, 0.3), small)
    check(model, made("StreamingLLM", model, 0.3), small)
    for name in ("snapkv", "knorm"):
        with pytest.raises(SpecError, match=r"observation = .*lacks tensors that the policy needs"):
            decide(made(name, model, 0.3).on(model), small)
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


@pytest.mark.law("the-model-stays-as-it-was")
def test_a_new_cache_that_fails_leaves_the_full_one_alone() -> None:
    """Check tensors that both caches share: those of sliding layers.

    The reset of some releases would set them to zero.
    """
    model = build("gemma3")
    observed = observe(model, prompt(N))
    before = [tensor.clone() for tensor in tensors(observed.cache)]
    cache = compact(observed.cache, decide(FullCache().on(model), observed))
    at_once(model, prompt(3), cache)
    cache.reset()
    assert all(torch.equal(x, y) for x, y in zip(tensors(observed.cache), before, strict=True))
    assert observed.cache.get_seq_length() == N
