"""Asynchronous scheduling: vLLM schedules a step before the results of the step before are known."""

from collections.abc import Iterator
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch

from tests.models_integration.engines.vllm.engine import (
    NEEDS_VLLM,
    Engine,
    asking,
    check_answers,
    check_masked,
    check_sets,
    cut,
)
from tests.models_integration.engines.vllm.test_vllm_random import new_engine, serve

pytestmark = [pytest.mark.law("eviction-equals-masking"), *NEEDS_VLLM]


class Nothing:
    """Stream or event of a device whose operations are finished at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield an engine with asynchronous scheduling, which vLLM 0.32 switches off on a CPU.

    Scheduler, model runner and queue of batches are those of vLLM. Only streams and events of CUDA are replaced.
    """
    from vllm.platforms import current_platform

    kind = type(current_platform)
    original = kind.check_and_update_config

    def check(config: Any) -> None:
        original(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "check_and_update_config", staticmethod(check))
        patch.setattr(torch.cuda, "Event", Nothing)
        patch.setattr(torch.cuda, "Stream", Nothing)
        patch.setattr(torch.cuda, "current_stream", Nothing)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        engine = new_engine()
        assert type(engine.scheduler).__name__ == "EvictingAsyncScheduler"
        assert engine.llm.llm_engine.engine_core.engine_core.batch_queue is not None
        yield engine


def test_decisions_come_one_step_late(engine: Engine) -> None:
    """Policies of a prompt, of each token and of every sixteen tokens run in one batch."""
    asked = [
        asking("snapkv", 40, budget=0.3, W=16), asking("tova", 40, budget=64), asking("rkv", 40, budget=60, every=16),
        asking("h2o-described", 40, budget=0.5), asking(None, 40),
        asking("crystalcache", 40, budget=64, sentence_ends=[5, 9], decode=True, T_breath=8, W_recent=8),
    ]
    prompts = [cut(60 + 7 * at, 31 * at) for at in range(6)]
    assert not any("Error" in one.get("reason", "") for one in check_answers(engine, prompts, asked))


def test_random_requests_with_asynchronous_scheduling(engine: Engine) -> None:
    serve(engine, Random(2), 24)
    assert engine.compacts.called
    assert engine.preempts.called


def test_an_abort_between_the_decision_and_the_first_token(engine: Engine) -> None:
    """The worker has decided about the prompt, and the scheduler frees the request before it reads the decision."""
    core, prompts, asked = engine.llm.llm_engine, {"first": cut(60), "aborted": cut(90, 31)}, asking(
        "snapkv", 40, budget=0.3, W=16
    )
    outputs = list[Any]()
    for name, prompt in prompts.items():
        core.add_request(name, {"prompt_token_ids": prompt}, asked)
        while not any(len(prompt) in one.kept for one in getattr(engine.runner.kvspec, "deciders", {}).values()):
            outputs += core.step()
    assert {one.request_id for one in outputs} <= {"first"}
    core.abort_request(["aborted"])
    while core.has_unfinished_requests():
        outputs += core.step()
        engine.check_blocks()
    core.step()
    assert {one.request_id for one in outputs} == {"first"}
    check_masked(prompts["first"], outputs[-1])
    check_sets(prompts["first"], outputs[-1])
    engine.check_nothing_left()
    of_worker = engine.runner.kvspec
    assert (of_worker.deciders, of_worker.shifts, of_worker.reports) == ({}, {}, {})
