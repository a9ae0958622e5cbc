"""vLLM's engine in this process, requests, and the masked model that judges the answers."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from conformance.own.models_integration.session.masked import MaskedModel, Row
from conformance.paths import ROOT
from models_integration.engines.vllm.statement import kept_positions
from models_integration.pocket import ASSETS, load_pocket

NEEDS_VLLM = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: nox -s vllm runs this"),
    pytest.mark.filterwarnings("default"),  # vLLM warns about its own dependencies
]
TOLERANCE = 1e-4
BLOCK = 32
BYTES = 3 * 2 * 2 * BLOCK * 32 * 4
"""Bytes of one block of the pocket model: 3 layers, 2 KV heads, keys and values of 32 numbers in float32."""


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
        # vLLM replaces Triton's kernels in all modules at each start; a second time fails at a function of llvmlite.
        dispatcher: Any = import_module("vllm.triton_utils.dispatcher")
        dispatcher.register_kernels = lambda overrides: None
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler, self.runner = core.scheduler, core.model_executor.driver_worker.worker.model_runner
        self.pool = self.scheduler.kv_cache_manager.block_pool

    def answer(self, prompts: Sequence[list[int]], parameters: Sequence[Any]) -> list[Any]:
        """Return the outputs of all requests, and check that no block is lost."""
        free = self.pool.get_num_free_blocks()
        given = [{"prompt_token_ids": one} for one in prompts]
        outputs: list[Any] = self.llm.generate(given, list(parameters), use_tqdm=False)
        self.check_nothing_left()
        assert self.pool.get_num_free_blocks() == free
        return outputs

    def check_nothing_left(self) -> None:
        """Check that no data of ended requests is left."""
        if not self.llm.llm_engine.has_unfinished_requests():
            assert not self.scheduler._plans
            requests = self.scheduler._requests
            assert not any((requests.asked, requests.reasons, requests.decisions, requests.stored))
            assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1


def asking(policy: str | None, tokens: int = 16, options: Mapping[str, Any] | None = None, **constants: Any) -> Any:
    """Return greedy sampling parameters with a policy."""
    from vllm import SamplingParams

    given = None if policy is None else {"kvspec": {"policy": policy, "record": True, **constants}}
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5, extra_args=given, **options or {}
    )


def stated(output: Any) -> dict[str, Any]:
    statement: dict[str, Any] = output.kv_transfer_params["kvspec"]
    return statement


@cache
def masked_model() -> MaskedModel:
    model, _ = load_pocket()
    return MaskedModel(model)


def expected(prompt: Sequence[int], answer: Sequence[int], statement: Mapping[str, Any]) -> torch.Tensor:
    """Return the log-probabilities (n, vocabulary) of the masked model, with the stated sets of kept tokens."""
    ids, model = [*prompt, *answer], masked_model()
    decisions = statement["decisions"] if statement["evicted_tokens"] else []
    ends = [*(one["seen"] for one in decisions), len(ids)]
    row: Row = model.nothing.read(ids[: ends[0]])
    for one, end in zip(decisions, ends[1:], strict=True):
        if end > one["seen"]:
            row = row.read(ids[one["seen"] : end], kept_positions(one["kept"]))
    return torch.log_softmax(model.expect(row).logits, dim=-1)


def check_masked(prompt: Sequence[int], output: Any) -> float:
    """Check that an answer is the greedy answer of the masked model, and return the largest difference."""
    answer, worst = list(output.outputs[0].token_ids), 0.0
    rows = expected(prompt, answer, stated(output))[len(prompt) - 1 :]
    for token, row, found in zip(answer, rows, output.outputs[0].logprobs, strict=False):
        assert row[token] >= row.max() - TOLERANCE
        worst = max(worst, *(abs(float(row[one]) - own.logprob) for one, own in found.items()))
    assert worst < TOLERANCE, worst
    return worst


