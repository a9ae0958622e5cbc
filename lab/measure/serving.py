"""Measure requests inside vLLM with and without eviction: `nox -s vllm -- gain`.

The command writes the tables of docs/results/vllm.md. One process measures all rows of a table, with one pool of blocks
and the same prompts.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from conformance.paths import DOCS
from lab import pages
from models_integration.pocket import model_folder

BLOCK, BUDGET = 32, 0.3
BLOCKS, REQUESTS, PROMPT, SHARED, ANSWER = 84, 16, 600, 192, 200
"""Pool and requests of the tables about many requests. The prompts begin with the same SHARED tokens."""
LONG, REPEATS = 1024, 3
"""Number of tokens of a prompt, and of prompts, of the table about single requests."""
ROWS: Sequence[tuple[str, str | None]] = (
    ("full cache", None), ("streamingllm", "streamingllm"), ("snapkv", "snapkv"), ("full cache, again", None),
)

Rows = list[list[str]]


class Load(NamedTuple):
    """Measurement of one load of requests."""

    most: int
    mean: float
    steps: int
    seconds: float
    first: float
    decision: float


def engine(model: str, blocks: int, cached: bool) -> Any:
    """Return vLLM with eviction, in this process, with a pool of `blocks` blocks."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_V2_MODEL_RUNNER="0")
    from vllm import LLM

    from models_integration.engines.vllm.plugin import register

    register()
    return LLM(
        model=str(model_folder(model)), dtype="float32", enforce_eager=True, block_size=BLOCK, max_model_len=LONG + 64,
        num_gpu_blocks_override=blocks + 1, kv_cache_memory_bytes=2**28, max_num_batched_tokens=512, max_num_seqs=32,
        disable_log_stats=True, enable_prefix_caching=cached, additional_config={"kvspec": {}},
    )


def measure(llm: Any, policy: str | None, prompts: Sequence[list[int]], answer: int = ANSWER) -> Load:
    """Serve all prompts at once, and return the measurement."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    runner, extra = core.model_executor.driver_worker.worker.model_runner, {"policy": policy, "budget": BUDGET}
    parameters = SamplingParams(
        temperature=0, max_tokens=answer, ignore_eos=True, extra_args=None if policy is None else {"kvspec": extra},
    )
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{policy}{number}{time.monotonic()}", {"prompt_token_ids": prompt}, parameters)
    running, spent, first = list[int](), [0.0], dict[str, float]()
    if runner.kvspec is not None:
        for name in ("decide", "begin"):
            _timed(runner.kvspec, name, spent)
    begun = time.process_time()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            first.setdefault(output.request_id, time.process_time() - begun)
        running.append(len(core.scheduler.running))
    seconds = time.process_time() - begun
    return Load(
        max(running), sum(running) / len(running), len(running), seconds, sum(first.values()) / len(first), spent[0]
    )


def _timed(model: Any, name: str, spent: list[float]) -> None:
    method = getattr(type(model), name)

    def timed(*args: Any) -> None:
        begun = time.process_time()
        method(model, *args)
        spent[0] += time.process_time() - begun

    setattr(model, name, timed)


def text(model: str) -> list[int]:
    """Return token ids of a long text."""
    written = (DOCS / "examples" / "lighthouse.txt").read_text(encoding="utf-8")
    ids: list[int] = AutoTokenizer.from_pretrained(str(model_folder(model)))(written).input_ids
    return ids * 8


def many_requests(cached: bool) -> Rows:
    """Return the rows of a table about requests that are sent at once to the pocket model."""
    ids, llm = text("pocket"), engine("pocket", BLOCKS, cached)
    starts = (SHARED + 13 * number for number in range(REQUESTS))
    prompts = [ids[:SHARED] + ids[start : start + PROMPT - SHARED] for start in starts]
    for _, policy in ROWS:  # warm-up for code that compiles on the first call
        measure(llm, policy, prompts[:1])
    return [
        [name, str(one.most), f"{one.mean:.1f}", str(one.steps), f"{one.seconds:.1f} s",
         f"{REQUESTS / one.seconds:.2f}", f"{one.first:.1f} s", f"{one.decision:.2f} s"]
        for name, policy in ROWS for one in [measure(llm, policy, prompts)]
    ]


def single_requests() -> Rows:
    """Return the rows of the table about single requests to SmolLM2."""
    ids, llm = text("smollm2"), engine("smollm2", 2 * LONG // BLOCK, False)
    for _, policy in ROWS:
        measure(llm, policy, [ids[:64]], 3)
    measured = {
        name: [measure(llm, policy, [ids[11 * at : 11 * at + LONG]], 3) for at in range(REPEATS)]
        for name, policy in ROWS
    }
    prefill = sum(one.first for one in measured["full cache"]) / REPEATS
    return [
        [name, f"{sum(one.first for one in loads) / REPEATS:.2f} s", f"{1000 * decision:.0f} ms",
         f"{100 * decision / prefill:.1f} %"]
        for name, loads in measured.items() for decision in [sum(one.decision for one in loads) / REPEATS]
    ]


def apart(function: Callable[..., Rows], *arguments: Any) -> Rows:
    """Return the rows of a function that runs in a separate process, because vLLM starts once in a process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


MANY = (
    "policy", "requests at once", "in the mean", "steps", "time", "answers per second", "mean time to the first token",
    "decisions and compactions",
)
ONE = ("policy", "time to the first token", "decision and compaction", "share of the prefill")


def main() -> None:
    """Measure all tables, and write them to their page. The page states the numbers at the top of this module."""
    load = f"The load average was {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.\n"
    cached, uncached = (pages.table(MANY, apart(many_requests, cached)) for cached in (True, False))
    tables = {"load": load, "cached": cached, "uncached": uncached, "one": pages.table(ONE, apart(single_requests))}
    pages.write(DOCS / "results" / "vllm.md", tables.__getitem__)


if __name__ == "__main__":
    main()
