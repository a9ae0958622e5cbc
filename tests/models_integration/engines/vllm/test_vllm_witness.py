"""The witness on vLLM with eviction, without a second process: a right engine, and faults planted in the engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conformance.server_suite.judge import Witness
from conformance.witness.client import Answer, Server
from models_integration.pocket import load_pocket
from spec.budget import parse_budget
from tests.conformance.server_verdicts import check_fault_is_named, check_right, verdicts
from tests.models_integration.engines.vllm.engine import NEEDS_VLLM, Engine
from tests.models_integration.engines.vllm.test_vllm_random import Plant, positions_are_shifted, replaced, with_slots

pytestmark = [pytest.mark.law("the-proof-has-teeth"), *NEEDS_VLLM]

POLICIES = {
    "snapkv": {"policy": "snapkv", "budget": 0.3, "W": 16},
    "crystalcache": {"policy": "crystalcache", "budget": 0.3, "decode": True, "T_breath": 4, "W_recent": 16},
}
SHARED, CANCELLED = "shared prefixes", "cancelled"
LAYER = 1
"""Number of the layer with a fault that only one layer has."""
NUMBERS = count()


@dataclass(frozen=True)
class InProcess(Server):
    """Engine in this process that answers one request at a time, with the statements of kvspec's streams."""

    engine: Any = None
    policy: str = "snapkv"

    async def outputs(self, name: str, ids: Sequence[int], tokens: int, seed: int) -> AsyncIterator[Any]:
        """Yield the outputs of a request, one for each token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        core = self.engine.llm.llm_engine
        core.add_request(name, {"prompt_token_ids": list(ids)}, SamplingParams(
            temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True, logprobs=0,
            output_kind=RequestOutputKind.DELTA, extra_args={"kvspec": POLICIES[self.policy]},
        ))
        while core.has_unfinished_requests():
            for output in core.step():
                yield output

    def complete(self, ids: Sequence[int], tokens: int, stream: bool = False, seed: int = 0) -> Answer:
        """Return the answer to a prompt."""
        return asyncio.run(self._complete(Answer(list(ids)), tokens, seed))

    async def _complete(self, answer: Answer, tokens: int, seed: int) -> Answer:
        from models_integration.engines.vllm.front_end import _stream  # needs vLLM

        outputs = self.outputs(f"{next(NUMBERS)}", answer.prompt_ids, tokens, seed)
        async for chunk in _stream(chunks, None, SimpleNamespace(n=1), outputs):
            answer.take(json.loads(chunk.removeprefix("data: ")))
        self.engine.check_nothing_left()
        return answer

    def cancel(self, ids: Sequence[int], tokens: int, seed: int = 0) -> None:
        """Cancel a request after the first tokens of its answer."""
        asyncio.run(self._cancel(f"{next(NUMBERS)}", ids, tokens, seed))

    async def _cancel(self, name: str, ids: Sequence[int], tokens: int, seed: int) -> None:
        outputs = self.outputs(name, ids, tokens, seed)
        for _ in range(3):
            await anext(outputs)
        self.engine.llm.llm_engine.abort_request([name])
        self.engine.llm.llm_engine.step()


async def chunks(serving: Any, request: Any, result_generator: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Yield the events of a stream, as vLLM's server does."""
    async for output in result_generator:
        (one,) = output.outputs
        logprobs = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        choice = {"text": one.text, "token_ids": list(one.token_ids), "logprobs": {"token_logprobs": logprobs}}
        yield f"data: {json.dumps({'choices': [choice]})}"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def judge(engine: Engine, group: str, policy: str = "snapkv") -> dict[str, list[str]]:
    """Return the verdicts of the witness on the answers of an engine."""
    model, tokenizer = load_pocket()
    server = InProcess("", "pocket", engine=engine, policy=policy)
    return verdicts(Witness(model, server, tokenizer=tokenizer), group)


@pytest.mark.parametrize(("policy", "group"), [
    ("snapkv", SHARED), ("snapkv", CANCELLED), ("snapkv", "recalled"), ("crystalcache", "recalled"),
])
def test_the_engine_does_as_it_states(engine: Engine, policy: str, group: str) -> None:
    check_right(judge(engine, group, policy))


def nothing_moves(original: Any) -> Any:
    """Keep all tokens, and state the eviction."""
    def decided(model: Any, name: str, decider: Any, end: int, token: Any) -> Any:
        report = original(model, name, decider, end, token)
        if report is None or report.eviction is None:
            return report
        decider.kept.clear()
        return replace(report, kept=end)

    return decided


def exchange_token(rows: Any) -> Any:
    """Exchange a token in the middle of each row for the first evicted token."""
    rows = rows.copy() if isinstance(rows, np.ndarray) else rows.clone()
    for row in rows.reshape(-1, rows.shape[-1]):
        kept = set(row.tolist())
        row[len(row) // 2] = min(set(range(max(kept))) - kept)
    return rows


def another_set_is_decided(original: Any) -> Any:
    def retain(*args: Any) -> Any:
        retention = original(*args)
        rows = retention.positions.reshape(retention.groups, -1)
        return replace(retention, positions=np.sort(exchange_token(rows)).reshape(-1))

    return retain


def one_token_more(original: Any) -> Any:
    return lambda policy, budget, one: original(policy, parse_budget(budget.tokens(one.seen) + 1), one)


def a_layer_stays_whole(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Let the attention of one layer read copies of all keys and values, made before each compaction."""
    model = engine.runner.kvspec
    layer, pages, whole = model.layers[LAYER], model.pages[LAYER], dict[str, torch.Tensor]()
    compact, original = model._compact, layer.impl.forward

    def copy(job: Any) -> None:
        whole["k"], whole["v"] = pages.read(model._blocks(job.source), torch.arange(job.event))
        compact(job)

    def forward(module: Any, q: Any, k: Any, v: Any, cache: Any, metadata: Any, output: Any, **kwargs: Any) -> Any:
        result = original(module, q, k, v, cache, metadata, output, **kwargs)
        if model.shifts and len(q) == 1:
            for name, new in (("k", k), ("v", v)):
                whole[name] = torch.cat([whole[name], new.transpose(0, 1)], dim=1)
            attended = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), whole["k"], whole["v"], scale=layer.impl.scale, enable_gqa=True
            )
            output.copy_(attended.transpose(0, 1).reshape(output.shape))
        return result

    patch.setattr(model, "_compact", copy)
    patch.setattr(layer.impl, "forward", forward)


def sets_of_another_request(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Give each request the kept set of the previous request with equally many kept tokens."""
    before = dict[tuple[int, int], Any]()

    def change(slots: Any, layer: int) -> Any:
        previous, before[layer, slots.shape[-1]] = before.get((layer, slots.shape[-1]), slots), slots
        return previous

    with_slots(change)(engine, patch)


def sets_of_cancelled_requests(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Give each request the kept set of the previous request, if the previous request was cancelled."""
    last, stale, finish = dict[int, Any](), dict[int, Any](), engine.scheduler.finish_requests

    def change(slots: Any, layer: int) -> Any:
        last[layer] = slots
        return stale.pop(layer, slots)

    def finished(*args: Any, **kwargs: Any) -> Any:
        stale.update(last)
        return finish(*args, **kwargs)

    with_slots(change)(engine, patch)
    patch.setattr(engine.scheduler, "finish_requests", finished)


def log_probabilities_of_the_full_cache(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn after eviction, and their log-probabilities are those of the full cache."""
    model, _ = load_pocket()

    def full(logits: Any) -> Any:
        *_, state = engine.runner.requests.values()
        with torch.no_grad():
            row = model(input_ids=torch.tensor([[*state.prompt_token_ids, *state.output_token_ids]])).logits[:, -1]
        return row.float().log_softmax(dim=-1)

    patch.setattr(engine.runner.sampler, "compute_logprobs", full)


def digests_are_late(original: Any) -> Any:
    def take(statement: Any, news: Any, finished: bool) -> None:
        original(statement, news, finished)
        statement.late = [*getattr(statement, "late", ()), *statement.digests]
        statement.digests = statement.late if finished else []

    return take


FAULTS: dict[str, tuple[Plant, str]] = {
    "no eviction": (replaced("runner", "_Model._decided", nothing_moves), "nothing was evicted"),
    "another set": (with_slots(lambda slots, layer: exchange_token(slots)), "masking by the stated set"),
    "another set, as stated": (replaced("selection", "retain", another_set_is_decided), "against the policy"),
    "other positions": (replaced("seams", "shift_lengths", positions_are_shifted), "'slots', not 'kept'"),
    "budget by one": (replaced("selection", "retain", one_token_more), "1 more than the budget"),
    "a layer whole": (a_layer_stays_whole, f"full-attention layer {LAYER} evicted nothing"),
    "heads exchanged": (
        with_slots(lambda slots, layer: slots.flip(0) if layer == LAYER else slots),
        f"KV heads 0 and 1 of full-attention layer {LAYER} are exchanged",
    ),
    "another request's set": (sets_of_another_request, "that of a different request"),
    "a cancelled request's set": (sets_of_cancelled_requests, "that of a cancelled request"),
    "full log-probabilities": (log_probabilities_of_the_full_cache, "those of the full cache"),
    "fixed after the fact": (replaced("statement", "Statement.take", digests_are_late), "answer tokens"),
}
"""Faults, each with words of the witness that name the fault."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_engine_is_named(engine: Engine, name: str) -> None:
    plant, words = FAULTS[name]
    group = CANCELLED if "cancelled" in name else SHARED
    if engine.runner.kvspec is None:  # The engine reads its layers with the first request.
        InProcess("", "pocket", engine=engine).complete([5, 6, 7], 1)
    with pytest.MonkeyPatch.context() as patch:
        plant(engine, patch)
        check_fault_is_named(judge(engine, group), words)
