"""Sessions under policies from text, and prompts in blocks, equal the masked model."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.studies.subject import policy_in_rows
from kvspec.cli.serve import server_settings
from models_integration import CrystalCache, CustomPolicy, RetainedCache, RetentionPolicy, prefill
from models_integration.cache.renumbering import RENUMBERED
from models_integration.engines.vllm.arguments import parse_request
from models_integration.model.cache_argument import cache_name
from models_integration.pocket import load_pocket
from models_integration.policies.learned import learned_constants
from models_integration.policies.methods import constants_of, parse_policy, policy_from_name
from models_integration.session.device_choice import policy_on_device
from reference.policies import policy_from_score
from reference.policies.describe import describe_policy
from reference.policies.grammar import parse_composition
from reference.policies.layers import is_layerwise
from reference.policies.names import NAMES, make_policy
from reference.policies.parts import equal_parts
from reference.policies.texts import text_of
from spec.backend import resolve
from spec.budget import Budget
from spec.errors import SpecError
from tests.conformance.random_texts import policy_texts
from tests.models_integration.session.families import ENDS, METHODS, at_once, build, prompt, relative, step_by_step
from tests.models_integration.session.masked import HeadSets, MaskedModel
from tests.models_integration.session.running_cache import POLICIES, subject
from tests.models_integration.session.sessions import PROMPT, REHEARSED, TOLERANCE, calibration, live_sets, published
from tests.models_integration.session.test_session_machine import SessionMachine, converse, run
from tests.reference.test_policy_texts import BY_NAME

pytestmark = pytest.mark.law("eviction-equals-masking")

SEED = 62
LAYERS_AND_HEADS = "snapkv:W=4/layers=pyramid:beta=4/heads=adaptive:safeguard=0.5"
STEPS = (
    "snapkv:W=4/every=3", "keydiff/recent=2/every=3", "snapkv:W=4/steps=keydiff/every=3", "knorm/recent=1/steps=h2o",
    "q-filters/every=3",
)


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-COMPOSE")
@pytest.mark.parametrize("text", [
    LAYERS_AND_HEADS, "adakv:W=4/layers=pyramid/block=4", "snapkv:W=4/chunks=4:gate=2", *STEPS,
    "streamingllm/sets=head/values=2", "streamingllm/sets=head/critical=0.5",
])
def test_a_conversation_under_a_composed_policy_equals_the_masked_model(
    text: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, text, policy_from_name(text, 12, **data_of(text)))
    met = run(partial(converse, policy=text))
    assert met["a segment that evicts"] > 0
    assert (met["a step that evicts"] > 0) == (text in STEPS)


def read_once(machine: SessionMachine, policy: str) -> None:
    """Run a prompt in two forward passes, steps, tokens inside `reading()`, and more steps."""
    life: Any = machine.prompt(policy, 45, cuts=(20,))
    machine.steps(life, 4)
    machine.reading(life, 3)
    machine.steps(life, 2)
    assert not life.dead


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-PIECES")
@pytest.mark.parametrize("text", ["snapkv:W=3/pieces=16", "keydiff/recent=2/pieces=20/layers=global"])
def test_a_prompt_evicted_in_pieces_equals_the_masked_model(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, text, policy_from_name(text, 20))
    assert run(partial(read_once, policy=text))["a segment that evicts"] > 0


@pytest.mark.spec("PO-PIECES")
@pytest.mark.parametrize("budget", [20, 1.0])
def test_a_later_turn_is_not_evicted_in_pieces(budget: float) -> None:
    model = build("llama")
    with policy_from_name("snapkv:W=3/pieces=16", budget)(model) as session, torch.no_grad():
        model(input_ids=prompt(PROMPT))
        assert session.cache is not None
        with pytest.raises(SpecError, match="evicts from the first prompt only"):
            at_once(model, prompt(12, seed=6), session.cache)
        with session.reading():  # the refusal left the cache as it was
            at_once(model, prompt(12, seed=6), session.cache)
        assert session.cache.get_seq_length() == PROMPT + 12


def read_turns(machine: SessionMachine, policy: str) -> None:
    """Run a prompt, 40 steps, two turns and more steps. The machine compares each result with the masked model."""
    life: Any = machine.prompt(policy, 45)
    machine.steps(life, 40)
    machine.turn(life, 12)
    machine.turn(life, 9)
    machine.steps(life, 3)
    if life.dead:  # a part multiplies scores by norms, and some scores of the prompt or of a step are below 0
        assert {"values", "critical"} & parse_composition(policy).parts.keys()


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-THRESHOLD")
def test_a_layer_without_a_kept_token_equals_the_masked_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No score of KeyDiff is above 1, so all layers evict the whole prompt and both turns."""
    text = "keydiff/threshold=1.5"
    monkeypatch.setitem(POLICIES, text, policy_from_name(text, 12))
    met = run(partial(read_turns, policy=text))
    assert met["a segment that evicts"] == 3


@pytest.mark.spec("PO-TABLE-BUDGET")
@pytest.mark.parametrize("text", [
    "knorm/layers=table:shares=3_2", "adakv:W=8/layers=table:shares=1_2_3_4",
    "tova/every=none/layers=table:shares=1_2_3_4_5_6",
])
def test_a_table_for_a_different_model_is_refused_before_the_model_reads(text: str) -> None:
    policy = policy_from_name(text, 12)
    with pytest.raises(SpecError, match="weights': must be 3, one for each layer, or"):
        policy(build("llama"))


def data_of(text: str) -> dict[str, Any]:
    """Return the constants of a text that depend on the model: a calibration, and the template of a rehearsal."""
    known = constants_of(text)
    template = {"template": REHEARSED["template"]} if "template" in known else {}
    return template | ({"calibration": calibration(subject("llama").model)} if "calibration" in known else {})


def sized(text: str, at: int) -> RetentionPolicy:
    """Return the policy of a text with a budget between its smallest number of tokens and 14 tokens more."""
    data = data_of(text)
    policy = policy_from_name(text, 1.0, **data).on(subject("llama").model).policy
    least = max(1, policy.floor, int(policy.protection(45).sum()))
    return policy_from_name(text, Budget(count=least + at * 7 % 15), **data)


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.spec("PO-COMPOSE")
@pytest.mark.parametrize("number", [4, pytest.param(300, marks=pytest.mark.nightly)])
def test_sessions_under_random_texts_equal_the_masked_model(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare accepted texts until `number` prompts were read. Scores below 0 can refuse a prompt."""
    met = Counter[str]()
    for at, text in enumerate(policy_texts(SEED)):
        monkeypatch.setitem(POLICIES, text, sized(text, at))
        actual = run(partial(read_turns, policy=text))
        decides = POLICIES[text].on(subject("llama").model).decode
        met.update(["decides in steps"] * decides, **{name: int(count > 0) for name, count in actual.items()})
        if met["a prompt in one forward"] == number:
            break
    assert met["a segment that evicts"] > 0.9 * number
    assert met["a step that evicts"] >= 0.5 * met["decides in steps"]


WITH_TEXT = [name for name in NAMES if name not in BY_NAME]
BY_DAY = (
    ("h2o", "numpy"), ("critical-adakv", "torch"), ("diverse-tova", "numpy"), ("kvzap", "torch"),
    ("pyramidkv", "numpy"),
)


def by_name_and_text(name: str, backend: str) -> tuple[RetentionPolicy, RetentionPolicy]:
    """Return the policy of a name with small constants, and the policy of its text."""
    model, numpy, chosen = subject("llama").model, {"backend": "numpy"}, {"backend": backend}
    if "backend" not in constants_of(name):
        numpy, chosen = {}, {}
    policy, data = published(name, model, 20, **numpy).on(model).policy, data_of(name)
    text = text_of(policy, data | learned_constants(name, model, None, on_device=False))
    assert text.partition(":")[0] != name
    return published(name, model, 20, **chosen), policy_from_name(text, 20, backend=backend, **data_of(text))


def kept_in_turns(policy: RetentionPolicy, later_turns: bool) -> list[HeadSets]:
    """Return the stored tokens after a prompt, after 40 steps, and after each of two turns."""
    model = subject("llama").model
    with policy(model) as session, torch.no_grad():
        model(input_ids=prompt(PROMPT))
        kept = [live_sets(session.cache)]
        step_by_step(model, prompt(40, seed=5), session.cache)
        kept.append(live_sets(session.cache))
        for seed in (6, 7):
            with nullcontext() if later_turns else session.reading():
                at_once(model, prompt(12, seed=seed), session.cache)
            kept.append(live_sets(session.cache))
    return kept


@pytest.mark.spec("PO-COMPOSE")
@pytest.mark.parametrize(("name", "backend"), [
    pytest.param(*one, marks=() if one in BY_DAY else pytest.mark.nightly)
    for one in product(WITH_TEXT, ("numpy", "torch"))
])
def test_a_text_keeps_the_tokens_of_the_name_over_steps_and_turns(name: str, backend: str) -> None:
    """Compare the records that sessions read, and the results of both sessions."""
    both, later_turns = by_name_and_text(name, backend), describe_policy(name).later_turns
    first, second = (policy.on(subject("llama").model).policy for policy in both)
    assert equal_parts(replace(second, promises=first.promises), first)
    one, other = (kept_in_turns(policy, later_turns) for policy in both)
    assert one == other
    assert any(len(head) < PROMPT for heads in one[0].values() for head in heads) == (name != "fullcache")


@pytest.mark.spec("PO-COMPOSE")
@pytest.mark.parametrize(("text", "by_layer", "on_device"), [
    ("snapkv/layers=pyramid", True, True), (LAYERS_AND_HEADS, True, False), ("snapkv/layers=global", False, True),
    ("cake/heads=adaptive", False, False), ("snapkv/threshold=0.1", True, False), ("snapkv/every=8", True, True),
    ("snapkv/steps=h2o", True, False), ("snapkv/pieces=16", True, False), ("snapkv/chunks=10", True, False),
    ("keydiff/every=8", True, True),
    ("tova/every=none", True, True), ("chunkkv/layers=pyramid", True, True),
])
def test_the_path_of_a_policy_follows_from_its_parts(text: str, by_layer: bool, on_device: bool) -> None:
    policy = make_policy(text, {})
    assert is_layerwise(policy) == by_layer
    assert (policy_on_device(policy, resolve("torch")) is not None) == on_device


@pytest.mark.spec("PO-COMPOSE")
def test_a_text_is_accepted_where_a_name_is() -> None:
    assert parse_policy("SnapKV:window=16") == parse_policy("snapkv(W=16)") == ("snapkv", {"W": 16})
    assert parse_policy("adakv:safeguard=0.2") == ("adakv", {"safeguard": Fraction(1, 5)})
    assert parse_policy("Snap-KV:W=16/layers=pyramid") == ("snapkv:W=16/layers=pyramid", {})
    assert parse_policy("h2o:backend=torch/every=8") == ("h2o/every=8", {"backend": "torch"})
    assert policy_from_name("snapkv:backend=torch/layers=pyramid", 40).on(build("llama")).engine.name == "torch"
    assert policy_in_rows("snapkv/layers=pyramid") == "snapkv/layers=pyramid"
    assert policy_from_name("streamingllm:N_sink=2", 12).on(build("llama")).policy.protection.size == 2
    settings = server_settings("kvcrush:W=8:share=0.5", "0.3", None, "snapkv:W=8/crush=0.5", "refuse")
    default = parse_request(None, settings)
    asked = parse_request({"policy": "snapkv:W=8/crush=0.5", "budget": 0.3}, settings)
    assert default is not None
    assert asked is not None
    assert (default.policy.name, asked.policy.name) == ("kvcrush", "kvcrush")
    with pytest.raises(SpecError, match="is not allowed here"):
        parse_request({"policy": "snapkv/every=8", "budget": 0.3}, settings)
    with pytest.raises(SpecError, match="must be constant=value"):  # nothing is imported by the name of a client
        parse_request({"policy": "os:path/every=8", "budget": 0.3}, settings)


B, BLOCK, N = 20, 16, 85
Seen = list[tuple[Tensor, dict[int, list[list[int]]]]]
"""Logits of each block, and the stored sets after the block."""


def recorded(model: PreTrainedModel, run: Callable[[], Any]) -> tuple[Any, Seen]:
    """Return the result of a function, and the logits and stored sets of each forward pass."""
    seen: Seen = []

    def after(_: object, args: object, output: Any) -> None:
        cache: RetainedCache = output.past_key_values
        seen.append((output.logits[0], dict(live_sets(cache))))  # type: ignore[arg-type]

    with model.register_forward_hook(after):
        return run(), seen


@pytest.mark.parametrize("text", [
    "streamingllm", "snapkv:W=4", "keydiff", "lagkv:lag=8", "adakv:W=4", "h2o", "snapkv:W=4/every=3", "morphkv:W=4",
    "snapkv:W=4/layers=pyramid:beta=4/heads=adaptive", "curdkv:window=4", "crystalcache",
])
def test_each_block_equals_the_masked_model(text: str) -> None:
    model = build("llama")
    backend = {} if text == "streamingllm" else {"backend": "numpy"}
    policy = METHODS[text]() if text == "crystalcache" else policy_from_name(text, B, **backend)
    (logits, cache, run), seen = recorded(model, lambda: prefill(model, policy, prompt(N), BLOCK))
    oracle, ids = MaskedModel(model), prompt(N)[0].tolist()
    row, at, stored = oracle.nothing, 0, None
    for before, after in seen:
        row = row.read(ids[at : at + len(before)], stored)
        at, stored = at + len(before), list(after.values())
        assert relative(before, oracle.expect(row).logits[-len(before) :]) < TOLERANCE
    assert [len(before) for before, _ in seen] == [BLOCK] * 5 + [N % BLOCK]
    assert at == run.seen == N
    assert torch.equal(logits[0], seen[-1][0][-1:])
    assert run.stored < N / 2
    with policy(model), torch.no_grad():
        row = row.read([7], stored)
        before = step_by_step(model, torch.tensor([[7]]), cache)[0]
    assert relative(before, oracle.expect(row).logits[-1:]) < TOLERANCE


def test_a_last_block_of_one_token_belongs_to_the_block_before() -> None:
    model = build("llama")
    _, seen = recorded(model, lambda: prefill(model, policy_from_name("keydiff", B), prompt(33), BLOCK))
    assert [len(before) for before, _ in seen] == [16, 17]
    assert {len(kept) for sets in seen[-1][1].values() for kept in sets} == {B}


@pytest.mark.parametrize("positions", ["kept", RENUMBERED])
def test_one_block_is_the_whole_prompt(positions: str) -> None:
    model = build("llama")
    policy = policy_from_name("streamingllm", B, positions=positions)
    whole, parts = prefill(model, policy, prompt(N)), prefill(model, policy, prompt(N), N)
    assert torch.equal(whole.logits, parts.logits)
    assert not whole.logits.requires_grad
    assert live_sets(whole.cache) == live_sets(parts.cache)


REFUSED: list[tuple[Callable[[], RetentionPolicy], Any, str]] = [
    (lambda: policy_from_name("chunkkv", B, N_reuse=2, W=4), BLOCK, "policy = 'chunkkv': evicts from one whole prompt"),
    (lambda: CustomPolicy(policy_from_score(lambda _: np.zeros((4, N))), B), BLOCK, "evicts from one whole prompt"),
    (lambda: policy_from_name("kvzip", B, template=((5,), (8,), (10,))), BLOCK, "evicts from one whole prompt only"),
    (lambda: CrystalCache(200, ENDS, stream=True), BLOCK, "a stream has blocks of 1024 tokens"),
    (lambda: policy_from_name("keydiff", B), 1, "block = 1: must be a number of tokens, at least 2"),
    (lambda: policy_from_name("keydiff", B), 0.5, "block = 0.5: must be a number of tokens"),
]


def test_a_prompt_without_tokens_is_refused_as_without_blocks() -> None:
    for block in (None, BLOCK):
        with pytest.raises(SpecError, match="must not be empty"):
            prefill(build("llama"), policy_from_name("keydiff", B), prompt(0), block)


@pytest.mark.parametrize(("make", "block", "shown"), REFUSED)
def test_blocks_are_refused_before_the_model_reads(
    make: Callable[[], RetentionPolicy], block: Any, shown: str,
) -> None:
    model = build("llama")
    calls: list[object] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(None))
    with hook, pytest.raises(SpecError, match=shown):
        prefill(model, make(), prompt(N), block)
    assert not calls


@pytest.mark.parametrize(("n", "budget", "block"), [
    (2048, 256, 128), pytest.param(32_768, 1024, 512, marks=pytest.mark.nightly),
])
@pytest.mark.filterwarnings("ignore:the text has")
def test_the_cache_never_stores_more_than_the_budget_and_one_block(n: int, budget: int, block: int) -> None:
    model, _ = load_pocket()
    stored: list[int] = []

    def before(module: Any, args: object, kwargs: dict[str, Any]) -> None:
        layer = kwargs[cache_name(module)].layers[module.layer_idx]
        held = [len(layer.head_positions(0, head)) for head in range(layer.heads)] if layer.get_seq_length() else [0]
        stored.append(max(held) + kwargs["hidden_states"].shape[1])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
    ids = torch.randint(5, 100, (1, n), generator=torch.Generator().manual_seed(0))
    run = prefill(model, policy_from_name("keydiff", budget), ids, block).run
    assert len(stored) == n // block * len(model.model.layers)
    assert max(stored) == budget + block
    assert run.stored == budget
