"""Eviction equals masking: programs of the state machine, and mutants (mutants.toml) that fail the named checks."""

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from transformers import PreTrainedModel

from lab.faults import WELL
from lab.mutants.edits import Edit, replaced
from models_integration import prefill
from models_integration.attention.capture import observing
from models_integration.cache.snapshot import load_cache, save_cache
from models_integration.model.architecture import describe
from spec.errors import SpecError
from tests.models_integration.session import (
    test_capture,
    test_memory,
    test_model_untouched,
    test_other_architectures,
    test_ragged,
    test_renumbered,
    test_snapshots,
    test_streams,
    test_turns,
)
from tests.models_integration.session.families import (
    FAMILIES,
    METHODS,
    SLIDING,
    at_once,
    build,
    crossed,
    greedy,
    prompt,
    relative,
)
from tests.models_integration.session.masked import Masked
from tests.models_integration.session.running_cache import POLICIES
from tests.models_integration.session.saved import lived, same
from tests.models_integration.session.sessions import (
    NEW,
    PLACES,
    PROMPT,
    TOLERANCE,
    Trip,
    live_sets,
    method,
    read_prompt,
    skip_without_attention,
)
from tests.models_integration.session.test_session_machine import SessionMachine

pytestmark = pytest.mark.law("eviction-equals-masking")


def converse(machine: SessionMachine, policy: str) -> None:
    """Run a prompt in pieces, steps, a turn in pieces, generate, a file, and tokens outside the context."""
    life: Any = machine.prompt(policy, 45, cuts=(20, 21))
    machine.steps(life, 9)
    machine.turn(life, 12, cuts=(5, 6))
    machine.generate(life, 5, 6)
    machine.reading(life, 2)
    machine.steps(life, 1)
    machine.reading(life, 3)
    machine.turn(life, 9)
    machine.crop(life, 1)
    machine.save(life, WELL)
    machine.steps(life, 3)
    machine.outside(life, 4)
    assert not life.dead
    assert life.tokens > 45 + 9


def converse_in_rows(machine: SessionMachine, policy: str) -> None:
    """Run rows of different lengths. Some rows get different lengths again in a turn.

    Later the rows are reordered, selected and repeated.
    """
    life = machine.prompt(policy, 45, rows=3, padding=(20, 0, 1))
    machine.steps(life, 4)
    machine.crop(life, 2)
    machine.turn(life, 12, padding=(5, 0, 1))
    machine.mistake(life, "hole")
    machine.reading(life, 2)
    machine.turn(life, 9, padding=(0, 4, 0), cuts=(3, 5), holes=(2, 7))
    machine.generate(life, 5, 6)
    machine.outside(life, 1)
    other = machine.copy(life)
    machine.choose_rows(life, "reorder", [1, 1, 0])
    machine.steps(life, 4)
    machine.choose_rows(other, "select", [1, 0, 0])
    machine.choose_rows(other, "repeat", [])
    machine.steps(other, 2)
    machine.steps(life, 1)
    machine.save(other, WELL)
    machine.save(life, WELL)


def converse_with_chunks(machine: SessionMachine, policy: str) -> None:
    """Run a chunk first, then chunks with and without gaps.

    The chunks follow steps, a turn, and both sides of a decode-time eviction.
    """
    begun: Any = machine.begin(policy)
    machine.splice(begun, [9, 14], evicted=(0, 3, 4))
    machine.turn(begun, 12)
    life: Any = machine.prompt(policy, 45)
    for _ in range(3):
        machine.steps(life, 3)
        machine.splice(life, [9])
        machine.steps(life, 1)
    machine.turn(life, 12)
    machine.splice(life, [9, 14], evicted=(0, 3, 4))
    machine.steps(life, 1)
    machine.save(life, WELL)
    machine.turn(life, 7)
    machine.generate(life, 5, 6)
    machine.crop(life, 3)
    assert life.tokens > 45 + 27


def run(program: Callable[[SessionMachine], object], family: str = "llama") -> Counter[str]:
    """Run a program on a new machine, and return the counts of the states met."""
    met = Counter[str]()
    machine = SessionMachine(family, met)
    try:
        program(machine)
    finally:
        machine.teardown()
    return met


@crossed("policy", POLICIES, always=["stream", "h2o"], whole=("llama",))
@pytest.mark.spec("CC-COMPACT")
def test_a_conversation_equals_the_masked_model(family: str, policy: str) -> None:
    """Check each family and each policy."""
    met = run(partial(converse, policy=policy), family)
    assert (met["a segment that evicts"] > 0) == (policy != "fullcache")
    assert policy not in ("breathing", "stream", "h2o", "tova", "rkv") or met["a step that evicts"] > 0


@crossed("policy", ["crystalcache", "streamingllm", "adakv", "breathing", "fullcache"])
def test_rows_equal_the_masked_model(family: str, policy: str) -> None:
    check_rows(policy, family)


@pytest.mark.law("saved-is-what-was")
@pytest.mark.parametrize("policy", ["adakv", "chunkkv"])
def test_rows_that_differ_are_saved_beside_columns_without_a_token(policy: str) -> None:
    def program(machine: SessionMachine) -> None:
        life = machine.prompt("fullcache", 45, rows=3, padding=(20, 0, 1))
        machine.turn(life, 9, padding=(0, 4, 2))
        machine.turn(life, 20, other=policy)
        machine.save(life, WELL)
        machine.steps(life, 1)

    met = run(program)
    assert met["a padded turn"] == met["a cache is saved and loaded"] == 1


@pytest.mark.law("a-splice-equals-a-block-mask")
@pytest.mark.parametrize(
    "policy", ["breathing", "crystalcache", "streamingllm", "snapkv", "chunkkv", "adakv", "nestedkv"],
)
def test_a_conversation_with_chunks_equals_the_masked_model(policy: str) -> None:
    met = run(partial(converse_with_chunks, policy=policy))
    assert met["a segment that evicts"] > 1


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("policy", ["h2o", "tova", "rkv"])
def test_a_policy_with_records_of_each_token_refuses_what_it_has_not_read(policy: str) -> None:
    def program(machine: SessionMachine) -> None:
        life: Any = machine.prompt(policy, 45)
        machine.splice(life, [9])
        machine.turn(life, 12)
        assert life.tokens == 45 + 9

    assert run(program)["refused, and nothing has changed"] == 1


def fail_at(machine: SessionMachine, policy: str, place: str, at: int) -> None:
    """Raise an exception at a call of a prompt in pieces, of a turn, of steps, and of a text inside `reading()`."""
    trip = Trip(place, at)
    machine.prompt(policy, 45, rows=2, trip=trip)
    machine.prompt(policy, 45, cuts=(20,), trip=trip)
    machine.turn(machine.prompt(policy, 45), 12, trip=trip)
    machine.steps(machine.prompt(policy, 45), 9, trip=trip)
    machine.reading(machine.prompt(policy, 45), 3, trip=trip)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in machine.model.modules())


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize(("policy", "place"), [
    pytest.param(policy, place, marks=[pytest.mark.nightly] * ((at + to) % 2))
    for at, policy in enumerate(["breathing", "stream", "adakv", "h2o", "kvzip"]) for to, place in enumerate(PLACES)
])
def test_a_failure_leaves_the_cache_as_it_was_or_unusable(policy: str, place: str) -> None:
    met = Counter[str]()
    for at in (0, 2):
        met += run(partial(fail_at, policy=policy, place=place, at=at))
    assert any(state.startswith("unusable") for state in met), met


@pytest.mark.parametrize(("family", "policy"), [("llama", "adakv"), ("gemma3", "breathing"), ("gemma3", "chunkkv")])
def test_eager_attention_is_served_as_it_is(family: str, policy: str) -> None:
    run(partial(converse, policy=policy), f"{family} eager")


def check_hidden_token(model: PreTrainedModel, policy: str = "crystalcache") -> None:
    """Check that a 2D mask hides the same token in every head, in whichever slot the head stores the token."""
    following, (_, cache) = prompt(NEW, seed=9), read_prompt(model, method(policy))
    kept = live_sets(cache)
    own = kept[max(kept)][0]
    hidden = own[4]
    # The offset between slot and position must differ from the offset at the end. Otherwise a mask by slot would pass
    # too.
    assert hidden - 4 < PROMPT - len(own)
    mask = torch.ones(1, PROMPT + NEW, dtype=torch.int64)
    mask[0, hidden] = 0
    left = {layer: [[at for at in one if at != hidden] for one in sets] for layer, sets in kept.items()}
    # The token stays visible to the sliding layers of the oracle. Therefore models with sliding layers are excluded.
    expected = Masked(model, prompt(PROMPT), left).read(following)
    with observing(describe(model), cache) if cache.layers_differ else nullcontext():
        assert relative(at_once(model, following, cache, attention_mask=mask), expected) < TOLERANCE


@pytest.mark.parametrize(("family", "attention", "policy"), [
    ("llama", "eager", "crystalcache"), ("llama", "sdpa", "adakv"), ("llama", "sdpa", "chunkkv"),
    *((family, "sdpa", "crystalcache") for family in FAMILIES if family not in SLIDING),
])
def test_a_2d_mask_counts_tokens_and_not_slots(family: str, attention: str, policy: str) -> None:
    check_hidden_token(build(family, attention=attention), policy)


def test_generate_goes_on_outside_the_context() -> None:
    model, ids, following = build("llama"), prompt(PROMPT), prompt(5, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    oracle = Masked(model, ids, cache.stored_positions().tolist())
    chosen = [int(oracle.read(following)[0, -1].argmax())]
    while len(chosen) < 6:
        chosen.append(int(oracle.read(torch.tensor([[chosen[-1]]]))[0, -1].argmax()))
    whole = torch.cat([ids, following], dim=1)
    assert greedy(model, whole, 6, past_key_values=cache)[0].tolist() == chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_served(dtype: torch.dtype) -> None:
    skip_without_attention(dtype)
    model, ids, following = build("llama", dtype=dtype), prompt(PROMPT), prompt(8, seed=9)
    cache = prefill(model, METHODS["crystalcache"](), ids).cache
    expected = Masked(model, ids, cache.stored_positions().tolist()).read(following)
    tolerance = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-12}[dtype]
    assert relative(at_once(model, following, cache), expected) < tolerance


MUTANTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))


def with_long_runs(machine: SessionMachine) -> None:
    machine.set_sizes(1, 64)
    machine.keep(machine.prompt("fullcache", 60), "model", 0.7)


def check_saved() -> None:
    """Check that a loaded cache equals the saved cache, and that a file with one changed byte is refused."""
    model, cache = lived("llama")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        save_cache(cache, model, path)
        same(load_cache(path, model), cache)
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        refused = False
        try:
            load_cache(path, model)
        except SpecError:
            refused = True
        assert refused


def check_rows(policy: str, family: str = "llama") -> None:
    """Check rows of different lengths. Heads that differ and sliding windows refuse padded turns."""
    served = policy != "adakv" and family not in SLIDING
    assert (run(partial(converse_in_rows, policy=policy), family)["a padded turn"] > 0) == served


def check_beams() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_streams.test_beams_keep_their_states(patch)


CHECKS: dict[str, Callable[[], object]] = {
    "a hidden token": lambda: check_hidden_token(build("llama")),
    "a hidden token of heads": lambda: check_hidden_token(build("llama"), "adakv"),
    "turns of the reference": lambda: test_turns.test_the_kept_sets_are_those_of_the_reference(30, 0),
    "beams": check_beams, "a cascade": test_memory.check_cascades, "a saved cache": check_saved,
    "steps without decode": test_streams.test_steps_read_without_decode_do_not_fade,
    "protected tokens": (
        lambda: test_streams.test_the_newest_tokens_are_safe_unless_the_paper_s_rule_is_asked_for("sink+recent")
    ),
    "a mistake": partial(run, lambda machine: machine.mistake(machine.prompt("crystalcache", 45), "positions")),
    "a reading": partial(run, lambda machine: machine.reading(machine.prompt("crystalcache", 45), 6)),
    "a token that is not stored": partial(
        run, lambda machine: machine.keep(machine.prompt("streamingllm", 45), "layer", 0.7, unstored=True)
    ),
    "long runs": partial(run, with_long_runs),
    "copies": test_other_architectures.test_the_caches_of_two_decisions_do_not_share_states,
    "sinks in a turn": (
        test_other_architectures.test_in_a_turn_each_kept_set_is_scored_with_the_sinks_of_its_own_heads
    ),
    "h2o": test_ragged.test_h2o_drops_the_smallest_sum,
    "tova": test_ragged.test_tova_drops_the_least_attended_key_of_the_last_query,
    "small keys": test_ragged.test_a_turn_is_decided_over_each_head_s_own_keys,
    "the log-sum-exp": lambda: test_capture.test_it_is_the_sum_over_what_each_query_sees("llama", torch.float64, 1e-14),
    "a scaled rope": lambda: test_renumbered.test_a_session_equals_the_oracle("llama, linear", "streamingllm"),
    "a renumbered stream": (
        lambda: test_renumbered.test_an_endless_text_stays_in_the_range_of_the_model("streamingllm")
    ),
    "the bits": lambda: test_model_untouched.test_a_full_budget_changes_no_bit("llama", "crystalcache", torch.float32),
}
WORDS: dict[str, Callable[[str], object]] = {
    "converse": lambda policy: run(partial(converse, policy=policy)),
    "rows": check_rows,
    "stores": lambda name: test_other_architectures.check_conversation(
        test_other_architectures.build(name), "streamingllm"
    ),
    "pinned": test_other_architectures.test_an_image_that_is_pinned_stays,
    "last queries": test_other_architectures.test_layers_that_share_a_cache_read_the_last_queries_alone,
    "padded by head": lambda name: test_other_architectures.test_padded_rows_equal_their_single_runs(name, "keydiff"),
    "renumbered": lambda policy: test_renumbered.test_a_session_equals_the_oracle("llama", policy),
    "a quarter": test_ragged.test_a_quarter_of_the_bytes,
    "shown": lambda family: test_model_untouched.check_shown(test_model_untouched.telling_model(family)),
    "decided": lambda family: test_model_untouched.check_decided(test_model_untouched.telling_model(family)),
}


def run_test(name: str) -> None:
    """Run a test function of this folder: "test_MODULE.FUNCTION", then its argument, or all arguments as JSON."""
    path, _, text = name.partition(" ")
    module, _, function = path.partition(".")
    test = getattr(import_module(f"{__package__}.{module}"), function)
    arguments = json.loads(text) if text.startswith("[") else [text] * bool(text)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        fixtures = {"tmp_path": Path(folder), "monkeypatch": patch, "saved": test_snapshots.saving(Path(folder))}
        test(*arguments, **{name: fixtures[name] for name in fixtures if name in signature(test).parameters})


def check(name: str) -> None:
    """Run a check by its name: a test function, one of CHECKS, or one of WORDS and its argument."""
    words, _, argument = name.rpartition(" ")
    if name.startswith("test_"):
        run_test(name)
    else:
        CHECKS[name]() if name in CHECKS else WORDS[words](argument)


def place(name: str) -> str:
    return name if name.startswith("reference.") else f"models_integration.{name}"


def mutate(stack: ExitStack, name: str) -> None:
    """Apply the mutant to this process until the stack is closed, and forget cached models."""
    test_other_architectures.build.cache_clear()
    stack.callback(test_other_architectures.build.cache_clear)
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for constant, value in MUTANTS[name].get("sizes", {}).items():
        patch.setattr(place(constant), value)
    for edit in MUTANTS[name]["edits"]:
        stack.enter_context(replaced(Edit(**{**edit, "of": place(edit["of"])})))


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize(("name", "judge"), [(name, judge) for name in MUTANTS for judge in MUTANTS[name]["checks"]])
def test_a_mutant_is_killed(name: str, judge: str) -> None:
    """Check that a check kills the mutant.

    A different test runs the same check without the mutant.
    """
    with ExitStack() as stack:
        mutate(stack, name)
        with pytest.raises((AssertionError, pytest.fail.Exception)):  # the second if an error is not raised
            check(judge)


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("name", [
    "a cascade", "a saved cache", "a mistake", "a reading", "a token that is not stored", "long runs",
])
def test_a_check_that_is_no_test_passes(name: str) -> None:
    check(name)


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["unchecked_step", "reading_decides", "half_compacted"])
def test_random_programs_find_it(name: str) -> None:
    unguided = settings(
        max_examples=2000, stateful_step_count=15, phases=[Phase.generate], database=None, deadline=None
    )
    with ExitStack() as stack:
        mutate(stack, name)
        with pytest.raises(AssertionError):
            run_state_machine_as_test(
                partial(SessionMachine, "llama", Counter[str]()), settings=unguided,  # type: ignore[arg-type]
            )
