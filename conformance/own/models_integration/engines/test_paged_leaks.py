"""Requests that are cancelled, or fail, leave no block behind."""

import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from conformance.measure.paged import greedy, pool
from conformance.own.models_integration.engines.serving import Between, all_free, prompts, serve
from conformance.own.models_integration.session.families import build
from models_integration import CustomPolicy, StreamingLLM
from models_integration.engines.paged import PagedSession
from spec.arrays import BoolVector
from spec.policy import Observation, Scores

pytestmark = pytest.mark.law("freed-memory")


class Moody:
    """A scorer that fails on every third length."""

    def __init__(self, scorer: Any) -> None:
        self.needs, self._own = scorer.needs, scorer

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        if observation.seen % 3 == 0:
            raise ArithmeticError(f"not {observation.seen} tokens")
        scores: Scores = self._own(observation, protected)
        return scores


def moody() -> CustomPolicy:
    policy = StreamingLLM(0.4, N_sink=2).method.policy
    return CustomPolicy(replace(policy, scorer=Moody(policy.scorer)), 0.4)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.nightly)])
def test_cancelled_and_failed_requests_leave_no_block(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, random, watched, ends = build("llama"), Random(2), Between(monkeypatch), list[Any]()
    served: Any = model
    texts = prompts(count, (2, 60))
    with (
        PagedSession(moody(), model) as run,
        served.continuous_batching_context_manager(
            generation_config=greedy(12),
            continuous_batching_config=pool(48, page=4, chunk=64),
        ) as manager,
    ):
        for place, text in enumerate(texts):
            manager.add_request(text, request_id=str(place))
            if random.random() < 0.5:
                manager.cancel_request(str(random.randrange(max(0, place - 8), place + 1)))
            if random.random() < 0.2:
                time.sleep(0.01)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and manager.batch_processor.has_pending_requests():
            time.sleep(0.02)
        while (output := manager.get_result(timeout=0.3)) is not None:
            ends.append(output)
        processor = watched.processors[-1]
        assert all_free(processor)
    failed = [output for output in ends if output.error]
    assert len(failed) > count // 20
    assert {len(output.prompt_ids) % 3 for output in failed} == {0}
    assert "ArithmeticError" in failed[0].error or "tokens" in failed[0].error
    assert count // 20 < len(ends) - len(failed) < count - len(failed)  # some were answered, and some cancelled
    assert run.freed_pages > 0


def test_a_forward_that_fails_leaves_no_block_and_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, watched, forwards = build("llama"), Between(monkeypatch), []

    def fail(*_: object) -> None:
        forwards.append(1)
        if len(forwards) == 4:
            raise RuntimeError("out of memory")

    handle = model.lm_head.register_forward_hook(fail)
    texts = prompts(6, (20, 40))
    with PagedSession(StreamingLLM(0.4), model):
        outputs = serve(model, texts, pool(30, chunk=48), new=12)
    handle.remove()
    assert sum(output.error is None for output in outputs.values()) < len(texts)
    assert all_free(watched.processors[-1])
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert model(torch.tensor([texts[0]])).logits.isfinite().all()
