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
from transformers import PreTrainedModel

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
TOLERANCE, ROUNDING = 1e-4, 2
"""Allowed difference of log-probabilities: the larger of TOLERANCE, and ROUNDING times the difference of float32."""
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
    statement = {"prompt_ids": [*prompt], "answer_ids": [*answer], "logprobs": [0.0] * len(answer)}
    actual = parse_statement(body, statement)
    for one in actual.evictions:
        assert one.digest == digest_of(one.seen, one.sets, one.layers)
    return actual


@cache
def masked_model(model: PreTrainedModel | None, dtype: torch.dtype) -> MaskedModel:
    """Return the masked model in a dtype. None is the pocket model. The reading in float64 is the truth."""
    loaded: Any = load_pocket()[0] if model is None else copy.deepcopy(model)
    return MaskedModel(loaded.to(dtype))


def read_masked(row: Row, model: PreTrainedModel | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the log-probabilities (n, vocabulary) of the masked model for a row. By default, of the pocket model."""
    return torch.log_softmax(masked_model(model, dtype).expect(row).logits, dim=-1).double()


def row_of(ids: Sequence[int], evictions: Sequence[Any] = ()) -> Row:
    """Return the row of a text, with the stated sets of kept tokens."""
    ends = [*(one.seen for one in evictions), len(ids)]
    row: Row = masked_model(None, torch.float64).nothing.read(ids[: ends[0]])
    for one, end in zip(evictions, ends[1:], strict=True):
        row = row.read(ids[one.seen : end], one.positions(*SHAPE))
    return row


def check_logprobs(
    row: Row, first: int, given: Sequence[Mapping[int, float]], model: PreTrainedModel | None = None,
) -> float:
    """Check log-probabilities against the reading in float64, and return the allowed difference.

    At rare tokens, the rounding of float32 can exceed TOLERANCE. How much depends on the processor. Then the masked
    model reads the row in float32 too, and ROUNDING times its difference from float64 at these queries is allowed.

    Args:
        row: text, and the positions that each query attends to.
        first: position of the first query.
        given: log-probabilities by token, for each query from `first` on.
        model: model without masks. None is the pocket model.
    """
    tokens = [token for table in given for token in table]
    places = [first + at for at, table in enumerate(given) for _ in table], tokens
    actual = torch.tensor([one for table in given for one in table.values()], dtype=torch.float64)
    exact = read_masked(row, model)
    worst, allowed = float((actual - exact[places]).abs().max()), TOLERANCE
    if not worst < TOLERANCE:
        rounding = (read_masked(row, model, torch.float32) - exact)[first : first + len(given)]
        allowed = max(TOLERANCE, ROUNDING * float(rounding.abs().max()))
    assert worst < allowed, f"{worst} from masking, and {allowed} is allowed"
    return allowed


def check_masked(
    prompt: Sequence[int], output: Any, greedy: bool = True, model: PreTrainedModel | None = None,
) -> None:
    """Check that each answer of a request is an answer of the masked model.

    Args:
        prompt: ids of the prompt.
        output: output of the request, with one or several answers.
        greedy: False if the tokens of the answers were drawn.
        model: model without masks. None is the pocket model.
    """
    bodies, first = output.kv_transfer_params["kvspec"], len(prompt) - 1
    for one, body in zip(output.outputs, bodies if isinstance(bodies, list) else [bodies], strict=True):
        assert "until" not in body
        answer = list(one.token_ids)
        row = row_of([*prompt, *answer], parsed(prompt, answer, body).evictions)
        given = [{token: entry.logprob for token, entry in each.items()} for each in one.logprobs]
        allowed = check_logprobs(row, first, given, model)
        if greedy:
            rows = read_masked(row, model)[first : first + len(answer)]
            assert (rows[list(range(len(answer))), answer] >= rows.max(dim=-1).values - allowed).all()


@cache
def witness() -> Witness:
    model, tokenizer = load_pocket()
    return Witness(model, Server("", "pocket"), tokenizer=tokenizer)


def reading(prompt: Sequence[int], output: Any) -> Reading:
    """Return what `kvspec verify --server` judges of an answer."""
    actual = output.outputs[0]
    logprobs = [entry[token].logprob for token, entry in zip(actual.token_ids, actual.logprobs, strict=True)]
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
