"""vLLM's engine in this process, requests, and the masked model for the comparison of answers."""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

from conformance.paths import ROOT, SPEC
from conformance.server_suite.judge import Reading, Witness, check_policy
from conformance.witness.client import Answer, Server
from conformance.witness.statement import Statement, digest_of, parse_statement
from models_integration.pocket import ASSETS, load_pocket
from spec.budget import parse_budget
from tests.models_integration.session.masked import MaskedModel, Row

NEEDS_VLLM = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: nox -s vllm runs this"),
    pytest.mark.filterwarnings("default"),  # vLLM warns about its dependencies.
]
TOLERANCE = 1e-4
BLOCK = 32
SHAPE = (3, 2)
"""Number of layers and of KV heads of the pocket model."""
BYTES = 3 * 2 * 2 * BLOCK * 32 * 4
"""Bytes of one block of the pocket model: 3 layers, 2 KV heads, keys and values of 32 numbers in float32."""


ALIVE: list["Engine"] = []
"""All engines. If one is collected, vLLM destroys the process groups that the remaining engines use (vLLM 0.32)."""


@cache
def text() -> list[int]:
    """Return token ids of a long text."""
    _, tokenizer = load_pocket()
    ids: list[int] = tokenizer((ROOT / "docs" / "examples" / "lighthouse.txt").read_text(encoding="utf-8")).input_ids
    return ids * 8


def cut(tokens: int, start: int = 0) -> list[int]:
    return text()[start : start + tokens]


class Engine:
    """vLLM with eviction, without a second process.

    Args:
        settings: settings of kvspec.
        blocks: number of blocks in the pool, without the null block.
        options: options of vLLM.

    Attributes:
        compacts: calls of the manager's method `compact`, including those that lacked blocks.
        preempts: calls of the scheduler's method `_preempt_request`.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, blocks: int = 400, **options: Any) -> None:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_V2_MODEL_RUNNER="0")
        from vllm import LLM

        from models_integration.engines.vllm.plugin import register

        register()
        self.llm = LLM(**{
            "model": str(ASSETS), "dtype": "float32", "enforce_eager": True, "block_size": BLOCK, "max_model_len": 1024,
            "kv_cache_memory_bytes": (blocks + 1) * BYTES, "max_num_seqs": 16, "disable_log_stats": True,
            "enable_prefix_caching": True, "additional_config": {"kvspec": settings or {}}, **options,
        })
        # vLLM replaces Triton's kernels in all modules at each start. The second replacement fails at a function of
        # llvmlite. Version 0.30 has no such replacement.
        if find_spec("vllm.triton_utils.dispatcher") is not None:
            dispatcher: Any = import_module("vllm.triton_utils.dispatcher")
            dispatcher.register_kernels = lambda overrides: None
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler, self.runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        self.pool = self.scheduler.kv_cache_manager.block_pool
        manager = self.scheduler._manager
        self.compacts = manager.compact = Mock(wraps=manager.compact)
        self.preempts = self.scheduler._preempt_request = Mock(wraps=self.scheduler._preempt_request)
        ALIVE.append(self)

    def answer(
        self, prompts: Sequence[list[int]], parameters: Sequence[Any], adapters: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return the outputs of all requests, and check that no block is lost."""
        free = self.pool.get_num_free_blocks()
        given = [{"prompt_token_ids": one} for one in prompts]
        outputs: list[Any] = self.llm.generate(
            given, list(parameters), use_tqdm=False, lora_request=adapters and list(adapters)
        )
        self.check_nothing_left()
        assert self.pool.get_num_free_blocks() == free
        return outputs

    def check_blocks(self) -> None:
        """Check that each block except the null block is free, or held by a request."""
        rows = self.scheduler._manager.req_to_blocks.values()
        held = {block.block_id for row in rows for block in row}
        assert self.pool.get_num_free_blocks() + len(held) == self.pool.num_gpu_blocks - 1, "a block was lost"

    def check_nothing_left(self) -> None:
        """Check that no data of ended requests is left."""
        if not self.llm.llm_engine.has_unfinished_requests():
            assert not self.scheduler._plans
            assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1


def asking(policy: str | None, tokens: int = 16, options: Mapping[str, Any] | None = None, **constants: Any) -> Any:
    """Return greedy sampling parameters with a policy."""
    from vllm import SamplingParams

    given = None if policy is None else {"kvspec": {"policy": policy, **constants}}
    return SamplingParams(**{
        "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 5, "extra_args": given,
        **(options or {}),
    })


@cache
def schema() -> Any:
    return json.loads((SPEC / "witness.schema.json").read_text(encoding="utf-8"))


def stated(output: Any) -> dict[str, Any]:
    """Return the statement of an answer, checked by its schema."""
    body: dict[str, Any] = output.kv_transfer_params["kvspec"]
    jsonschema.validate(body, schema())
    return body


def parsed(prompt: Sequence[int], answer: Sequence[int], body: Mapping[str, Any]) -> Statement:
    """Return the statement, checked as `kvspec verify --server` checks it."""
    own = {"prompt_ids": [*prompt], "answer_ids": [*answer], "logprobs": [0.0] * len(answer)}
    actual = parse_statement(body, own)
    for one in actual.evictions:
        assert one.digest == digest_of(one.seen, one.sets, one.layers)
    return actual


@cache
def masked_model() -> MaskedModel:
    """Return the masked model in float64. In float32, at rare tokens, its own rounding reaches 2e-4."""
    model, _ = load_pocket()
    return MaskedModel(copy.deepcopy(model).double())


def expected(
    prompt: Sequence[int], answer: Sequence[int], body: Mapping[str, Any], model: MaskedModel | None = None,
) -> torch.Tensor:
    """Return the log-probabilities (n, vocabulary) of the masked model, with the stated sets of kept tokens.

    Args:
        prompt: ids of the prompt.
        answer: ids of the answer.
        body: statement of the answer.
        model: masked model. None is that of the pocket model.
    """
    ids, model, evictions = [*prompt, *answer], model or masked_model(), parsed(prompt, answer, body).evictions
    assert "until" not in body
    ends = [*(one.seen for one in evictions), len(ids)]
    row: Row = model.nothing.read(ids[: ends[0]])
    for one, end in zip(evictions, ends[1:], strict=True):
        row = row.read(ids[one.seen : end], one.positions(*SHAPE))
    return torch.log_softmax(model.expect(row).logits, dim=-1)


def check_masked(
    prompt: Sequence[int], output: Any, greedy: bool = True, model: MaskedModel | None = None,
) -> float:
    """Check that each answer of a request is an answer of the masked model, and return the largest difference.

    Args:
        prompt: ids of the prompt.
        output: output of the request, with one or several answers.
        greedy: False if the tokens of the answers were drawn.
        model: masked model. None is that of the pocket model.
    """
    bodies, worst = output.kv_transfer_params["kvspec"], 0.0
    for one, body in zip(output.outputs, bodies if isinstance(bodies, list) else [bodies], strict=True):
        rows = expected(prompt, list(one.token_ids), body, model)[len(prompt) - 1 :]
        for token, row, actual in zip(one.token_ids, rows, one.logprobs, strict=False):
            assert not greedy or row[token] >= row.max() - TOLERANCE
            worst = max(worst, *(abs(float(row[own]) - given.logprob) for own, given in actual.items()))
    assert worst < TOLERANCE, worst
    return worst


@cache
def witness() -> Witness:
    model, tokenizer = load_pocket()
    return Witness(model, Server("", "pocket"), tokenizer=tokenizer)


def reading(prompt: Sequence[int], output: Any) -> Reading:
    """Return what `kvspec verify --server` judges of an answer."""
    actual = output.outputs[0]
    logprobs = [own[token].logprob for token, own in zip(actual.token_ids, actual.logprobs, strict=True)]
    return Reading(witness(), Answer([*prompt], [*actual.token_ids], logprobs, stated(output)))


def check_norms(prompt: Sequence[int], body: Mapping[str, Any]) -> None:
    """Check that no key that Knorm keeps is longer than a key that Knorm evicts, up to rounding.

    In the first layer, all tokens with the same id have keys of the same length. Rounding decides which of the tokens
    are kept, and a different processor rounds in a different way.
    """
    (one,) = parsed(prompt, [], body).evictions
    cache = load_pocket()[0](torch.tensor([[*prompt]]), use_cache=True).past_key_values
    for layer, heads in zip(cache.layers, one.positions(*SHAPE), strict=True):
        for norms, kept in zip(layer.keys[0].detach().norm(dim=-1), heads, strict=True):
            assert len(kept) == parse_budget(body["budget"]).tokens(len(prompt))
            evicted = sorted({*range(len(prompt))} - {*kept})
            assert norms[list(kept)].max() <= norms[evicted].min() * (1 + 1e-5)


def check_answers(engine: Engine, prompts: Sequence[list[int]], parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the statements of answers that equal masking, with the kept sets of a session."""
    outputs = engine.answer(prompts, parameters)
    for prompt, output in zip(prompts, outputs, strict=True):
        check_masked(prompt, output)
        check_sets(prompt, output)
    return [stated(output) for output in outputs]


def check_sets(prompt: Sequence[int], output: Any) -> None:
    """Check that the stated sets are those that a session keeps for the same text, up to rounding."""
    body = stated(output)
    if body["evictions"] and body["policy"] == "knorm":
        check_norms(prompt, body)
    elif body["evictions"]:
        try:
            check_policy(reading(prompt, output))
        except pytest.skip.Exception as undecided:
            raise AssertionError(str(undecided)) from undecided
