"""Random requests with arrivals, aborts, preemption and shared prefixes, and planted errors that they must notice."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

from conformance.paths import ROOT
from models_integration.engines.vllm.arguments import Settings, parse_request
from reference.policies.kept import most_kept
from spec.budget import parse_budget
from tests.models_integration.engines.vllm.engine import (
    NEEDS_VLLM,
    Engine,
    asking,
    check_masked,
    check_sets,
    cut,
    stated,
)

pytestmark = [pytest.mark.law("eviction-equals-masking"), *NEEDS_VLLM]

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("streamingllm", {}), ("snapkv", {"W": 16}), ("keydiff", {}), ("knorm", {}), ("h2o-described", {"W": 8}),
    ("tova", {}), ("rkv", {"every": 16}), ("morphkv", {"W": 8}),
)
REQUESTS = int(os.environ.get("KVSPEC_VLLM_REQUESTS", "100"))
"""Number of requests of each seed at night."""
MOST_STEPS = 50
"""Number of steps per request after which requests count as stuck. Requests need about 25 steps each."""


def new_engine() -> Engine:
    """Return an engine with 14 blocks, in which requests preempt each other. One request can need all blocks."""
    return Engine(blocks=14, max_model_len=448, max_num_batched_tokens=128, max_num_seqs=8)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine()


def asked(random: Random) -> Any:
    if random.random() < 0.15:
        return asking(None, random.randint(1, 150))
    name, constants = random.choice(POLICIES)
    budget = random.choice([0.5, 0.9, 60, 150])
    return asking(name, random.randint(1, 150), budget=budget, **constants)


def check_evicted(prompt: list[int], parameters: Any, output: Any) -> None:
    """Check that the prompt was evicted, if it exceeds the budget and the answer has a second token."""
    asked = parse_request((parameters.extra_args or {}).get("kvspec"), Settings())
    if asked is not None and len(output.outputs[0].token_ids) > 1:
        kept_most = most_kept(asked.policy, asked.budget, len(prompt))
        assert kept_most == len(prompt) or stated(output)["evictions"][0]["seen"] == len(prompt), stated(output)


def serve(engine: Engine, random: Random, count: int) -> None:
    """Run random requests, and check each answer and each kept set."""
    core, waiting = engine.llm.llm_engine, []
    for number in range(count):
        prompt = cut(random.randint(0, 3) * 32, 64 * random.randint(0, 2)) + cut(random.randint(1, 200), 9 * number)
        waiting.append((f"{random.random()}", prompt, asked(random)))
    given, steps = {name: (prompt, parameters) for name, prompt, parameters in waiting}, 0
    while waiting or core.has_unfinished_requests():
        while waiting and (random.random() < 0.6 or not core.has_unfinished_requests()):
            name, prompt, parameters = waiting.pop()
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        assert (steps := steps + 1) < MOST_STEPS * count, "requests do not end"
        outputs = core.step()
        engine.check_blocks()
        for output in outputs:
            if output.finished:
                prompt, parameters = given.pop(output.request_id)
                assert "Error:" not in (reason := stated(output).get("reason", "")), reason
                check_evicted(prompt, parameters, output)
                check_masked(prompt, output)
                check_sets(prompt, output)
            elif random.random() < 0.002:
                core.abort_request([output.request_id])
    core.step()
    engine.check_nothing_left()
    of_worker = engine.runner.kvspec
    assert (of_worker.deciders, of_worker.shifts, of_worker.reports) == ({}, {}, {})


def test_random_requests(engine: Engine) -> None:
    serve(engine, Random(1), 24)
    assert engine.compacts.called
    assert engine.preempts.called


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_many_random_requests(engine: Engine, seed: int) -> None:
    serve(engine, Random(seed), REQUESTS)


Plant: TypeAlias = Callable[[Engine, pytest.MonkeyPatch], None]


def replaced(module: str, name: str, make: Callable[[Any], Any]) -> Plant:
    """Return a function that replaces a function or method of kvspec by an error."""
    def plant(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        owner: Any = import_module(f"models_integration.engines.vllm.{module}")
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        patch.setattr(owner, last, make(getattr(owner, last)))

    return plant


def with_slots(change: Callable[[Any, int], Any]) -> Plant:
    """Plant an error: move the tokens of wrong slots, which `change` computes from slots and layer."""
    return replaced("runner", "_Model._slots", lambda original: staticmethod(
        lambda decider, sets, layer: change(original(decider, sets, layer), layer)
    ))


def first_is_next(slots: Any, layer: int) -> Any:
    slots = slots.clone()
    slots[..., 0] += 1
    return slots


def with_shifts(change: Callable[[Any], Any]) -> Plant:
    """Plant an error: subtract wrong shifts from lengths and slots."""
    return replaced(
        "seams", "shift_lengths",
        lambda original: lambda runner, shifts, counts: original(runner, change(shifts), counts),
    )


def positions_are_shifted(original: Any) -> Any:
    def shift(runner: Any, shifts: Any, counts: Any) -> None:
        original(runner, shifts, counts)
        each = np.repeat(shifts, counts)
        runner.positions[: len(each)] -= runner.positions.new_tensor(each)

    return shift


def slots_are_positions(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    table = engine.runner.input_batch.block_table
    original = table.compute_slot_mapping
    patch.setattr(
        table, "compute_slot_mapping",
        lambda rows, starts, positions: original(rows, starts, engine.runner.positions[: len(positions)]),
    )


def blocks_stay_allocated(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Compactions return no block to the pool."""
    original = engine.scheduler._manager.compact

    def compact(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(engine.pool, "free_blocks", lambda blocks: None)
            return original(*args)

    patch.setattr(engine.scheduler._manager, "compact", compact)


def pieces_are_late(original: Any) -> Any:
    def prepare(model: Any, counts: Any) -> None:
        original(model, counts)
        model._pieces = [(decider, max(0, start - 1), stop - 1) for decider, start, stop in model._pieces]

    return prepare


def one_token_fewer(original: Any) -> Any:
    return lambda policy, budget, one: original(policy, parse_budget(max(1, budget.tokens(one.seen) - 1)), one)


def values_stay(original: Any) -> Any:
    return lambda pages, blocks, slots, keys, values: original(pages, blocks, slots, keys, pages.read(blocks, slots)[1])


ERRORS: dict[str, Plant] = {
    "lengths are positions": replaced("seams", "shift_lengths", lambda original: lambda *_: None),
    "slots are positions": slots_are_positions,
    "positions are slots": replaced("seams", "shift_lengths", positions_are_shifted),
    "each request has the shift of the next": with_shifts(lambda shifts: np.roll(shifts, 1)),
    "a shift is one token short": with_shifts(lambda shifts: np.maximum(shifts - 1, 0)),
    "heads are exchanged": with_slots(lambda slots, layer: slots.flip(0) if slots.ndim == 2 else slots),
    "the first kept token is the next": with_slots(first_is_next),
    "every layer keeps the tokens of the first": replaced(
        "runner", "_Model._slots",
        lambda original: staticmethod(lambda decider, sets, layer: original(decider, sets, 0)),
    ),
    "requests go on without a decision": replaced(
        "plan", "Plan.is_event", lambda original: lambda self, seen: seen != self.n and original(self, seen)
    ),
    "steps pass decisions": replaced("plan", "Plan.limit", lambda original: lambda self, done, tokens: tokens),
    "the shift survives a preemption": replaced("plan", "Plan.restart", lambda original: lambda self: None),
    "the window is skipped by a shared prefix": replaced(
        "plan", "Plan.reusable_blocks", lambda original: lambda self, size: self.n // size
    ),
    "one block too few": replaced(
        "plan", "Plan.slots", lambda original: lambda self, tokens: max(1, original(self, tokens) - 32)
    ),
    "decisions get lost": replaced("scheduler", "_Evicting._note", lambda original: lambda *_: None),
    "blocks get lost": blocks_stay_allocated,
    "keys and values are not moved": replaced("pages", "Pages.write", lambda original: lambda *_: None),
    "values are not moved": replaced("pages", "Pages.write", values_stay),
    "keys are read from the wrong blocks": replaced(
        "pages", "Pages.read", lambda original: lambda self, blocks, slots: original(self, blocks.flip(0), slots)
    ),
    "the table keeps the old blocks": replaced("seams", "replace_block_table", lambda original: lambda *_: None),
    "queries are missing": replaced(
        "selection", "Decider.first_query", lambda original: lambda self, done: sys.maxsize
    ),
    "queries are those of the token before": replaced("runner", "_Model.prepare", pieces_are_late),
    "a set has one token fewer": replaced("selection", "retain", one_token_fewer),
    "layers are stated in reverse": replaced(
        "selection", "make_eviction", lambda original: lambda seen, kept: original(seen, kept[::-1])
    ),
}


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("error", ERRORS)
def test_planted_errors_are_noticed(error: str) -> None:
    """Check that an assertion of kvspec or of this test detects each error.

    Exceptions of vLLM and time limits do not count.
    """
    engine = new_engine()
    with pytest.MonkeyPatch.context() as patch:
        ERRORS[error](engine, patch)
        with pytest.raises(AssertionError) as caught:
            serve(engine, Random(1), 24)
    assert Path(caught.traceback[-1].path).is_relative_to(ROOT), caught.getrepr()
