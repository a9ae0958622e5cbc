"""Random requests with arrivals, aborts, preemption and shared prefixes, and planted errors that they must notice."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conformance.paths import ROOT
from tests.models_integration.engines.vllm.engine import NEEDS_VLLM, Engine, asking, check_masked, cut

pytestmark = [pytest.mark.law("eviction-equals-masking"), *NEEDS_VLLM]

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("streamingllm", {}), ("snapkv", {"W": 16}), ("keydiff", {}), ("knorm", {}), ("h2o-described", {"W": 8}),
    ("tova", {}), ("rkv", {"every": 16}), ("morphkv", {"W": 8}),
)


MOST_STEPS = 3000
"""Number of steps after which requests count as stuck. 30 requests need about 600 steps."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine with 39 blocks, in which requests preempt each other."""
    return Engine(blocks=39, max_model_len=512, max_num_batched_tokens=128, max_num_seqs=8)


def asked(random: Random) -> Any:
    if random.random() < 0.15:
        return asking(None, random.randint(1, 60))
    name, constants = random.choice(POLICIES)
    budget = random.choice([0.3, 0.5, 40, 100])
    return asking(name, random.randint(1, 60), budget=budget, **constants)


def serve(engine: Engine, random: Random, count: int) -> float:
    """Run random requests, and return the largest difference from the masked model."""
    core, waiting, worst = engine.llm.llm_engine, [], 0.0
    for number in range(count):
        prompt = cut(random.randint(0, 3) * 32, 64 * random.randint(0, 2)) + cut(random.randint(1, 250), 9 * number)
        waiting.append((f"{random.random()}", prompt, asked(random)))
    prompts, steps = {name: prompt for name, prompt, _ in waiting}, 0
    while waiting or core.has_unfinished_requests():
        while waiting and (random.random() < 0.3 or not core.has_unfinished_requests()):
            name, prompt, parameters = waiting.pop()
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        assert (steps := steps + 1) < MOST_STEPS, "requests do not end"
        for output in core.step():
            if output.finished:
                worst = max(worst, check_masked(prompts.pop(output.request_id), output))
            elif random.random() < 0.002:
                core.abort_request([output.request_id])
    core.step()
    engine.check_nothing_left()
    return worst


@pytest.mark.parametrize("seed", range(2))
def test_random_requests(engine: Engine, seed: int) -> None:
    before = engine.scheduler.evicted
    assert serve(engine, Random(seed), 30) < 1e-4
    assert engine.scheduler.evicted > before


def no_shift_of_slots(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    table = engine.runner.input_batch.block_table
    own = table.compute_slot_mapping

    def unshifted(rows: int, starts: Any, positions: Any) -> None:
        own(rows, starts, engine.runner.positions[: len(positions)])

    patch.setattr(table, "compute_slot_mapping", unshifted)


def replaced(module: str, name: str, make: Callable[[Any], Any]) -> Callable[[Engine, pytest.MonkeyPatch], None]:
    """Return a function that replaces a function or method of kvspec by an error."""
    def plant(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        from importlib import import_module

        owner: Any = import_module(f"models_integration.engines.vllm.{module}")
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        patch.setattr(owner, last, make(getattr(owner, last)))

    return plant


def shuffled_heads(own: Any) -> Any:
    def slots(decider: Any, sets: Any, layer: int) -> Any:
        found = own(decider, sets, layer)
        return found.flip(0) if found.ndim == 2 else found

    return slots


def other_layer(own: Any) -> Any:
    return lambda decider, sets, layer: own(decider, sets, 0)


def one_token_exchanged(own: Any) -> Any:
    def slots(decider: Any, sets: Any, layer: int) -> Any:
        found = own(decider, sets, layer).clone()
        found[..., 0] = found[..., 0] + 1
        return found

    return slots


ERRORS: dict[str, Callable[[Engine, pytest.MonkeyPatch], None]] = {
    "lengths are positions": replaced("runner", "shift_lengths", lambda own: lambda *_: None),
    "heads are exchanged": replaced("runner", "_Model._slots", lambda own: staticmethod(shuffled_heads(own))),
    "every layer keeps the tokens of the first": replaced(
        "runner", "_Model._slots", lambda own: staticmethod(other_layer(own))
    ),
    "the first kept token is the next": replaced(
        "runner", "_Model._slots", lambda own: staticmethod(one_token_exchanged(own))
    ),
    "requests go on without a decision": replaced(
        "plan", "Plan.is_event", lambda own: lambda self, seen: seen != self.n and own(self, seen)
    ),
    "the shift survives a preemption": replaced("plan", "Plan.restart", lambda own: lambda self: None),
    "the window is skipped by a shared prefix": replaced(
        "plan", "Plan.reusable_blocks", lambda own: lambda self, size: self.n // size
    ),
    "one block too few": replaced(
        "plan", "Plan.slots", lambda own: lambda self, tokens: max(1, own(self, tokens) - 32)
    ),
    "keys are not moved": replaced("pages", "Pages.write", lambda own: lambda self, *_: None),
    "the table keeps the old blocks": replaced("runner", "replace_block_table", lambda own: lambda *_: None),
    "queries of the wrong tokens": replaced("selection", "Decider.wants", lambda own: lambda self, position: False),
}


UNNOTICED = (
    "the shift survives a preemption", "the window is skipped by a shared prefix", "queries of the wrong tokens",
)
"""Errors that the test does not notice yet.

The second and third error change the kept set, and the statement repeats the changed set.
"""


@pytest.mark.law("the-proof-has-teeth")
@pytest.mark.parametrize("error", [
    pytest.param(one, marks=pytest.mark.xfail(strict=True, reason="not noticed yet")) if one in UNNOTICED else one
    for one in ERRORS
])
def test_planted_errors_are_noticed(error: str) -> None:
    """A check of kvspec or of this test notices each error. An exception of vLLM or a time limit does not count."""
    engine = Engine(blocks=39, max_model_len=512, max_num_batched_tokens=128, max_num_seqs=8)
    with pytest.MonkeyPatch.context() as patch:
        ERRORS[error](engine, patch)
        with pytest.raises(AssertionError) as caught:
            serve(engine, Random(0), 24)
    assert Path(caught.traceback[-1].path).is_relative_to(ROOT), caught.getrepr()
