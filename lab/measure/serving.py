"""Measure requests inside vLLM with and without eviction: `nox -s vllm -- gain`.

The command writes docs/results/vllm.md. One process measures all rows of a table, with one pool of blocks and the same
prompts.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from conformance.paths import ROOT
from models_integration.pocket import model_folder

BLOCK, BUDGET = 32, 0.3
BLOCKS, REQUESTS, PROMPT, SHARED, ANSWER = 84, 16, 600, 192, 200
"""Pool and requests of the tables about many requests. The prompts begin with the same SHARED tokens."""
LONG, REPEATS = 1024, 3
"""Number of tokens of a prompt, and of prompts, of the table about single requests."""
ROWS: Sequence[tuple[str, str | None]] = (
    ("full cache", None), ("streamingllm", "streamingllm"), ("snapkv", "snapkv"), ("full cache, again", None),
)


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
    written = (ROOT / "docs" / "examples" / "lighthouse.txt").read_text(encoding="utf-8")
    ids: list[int] = AutoTokenizer.from_pretrained(str(model_folder(model)))(written).input_ids
    return ids * 8


def many_requests(cached: bool) -> list[str]:
    """Return the rows of a table about requests that are sent at once to the pocket model."""
    ids, llm = text("pocket"), engine("pocket", BLOCKS, cached)
    starts = (SHARED + 13 * number for number in range(REQUESTS))
    prompts = [ids[:SHARED] + ids[start : start + PROMPT - SHARED] for start in starts]
    for _, policy in ROWS:  # warm-up for code that compiles on the first call
        measure(llm, policy, prompts[:1])
    return [
        f"| {name} | {one.most} | {one.mean:.1f} | {one.steps} | {one.seconds:.1f} s | {REQUESTS / one.seconds:.2f}"
        f" | {one.first:.1f} s | {one.decision:.2f} s |"
        for name, policy in ROWS for one in [measure(llm, policy, prompts)]
    ]


def single_requests() -> list[str]:
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
        f"| {name} | {sum(one.first for one in loads) / REPEATS:.2f} s | {1000 * decision:.0f} ms |"
        f" {100 * decision / prefill:.1f} % |"
        for name, loads in measured.items() for decision in [sum(one.decision for one in loads) / REPEATS]
    ]


def apart(function: Any, *arguments: Any) -> list[str]:
    """Return the rows of a function that runs in a separate process, because vLLM starts once in a process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        rows: list[str] = pool.submit(function, *arguments).result()
    print(*rows, sep="\n", flush=True)
    return rows


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from (
        "# Eviction inside vLLM", "",
        f"All tables: vLLM 0.32 on a CPU with one thread, float32, and policies that keep {100 * BUDGET:.0f} % of the",
        "prompt. Times are processor times of the process. One process measured all rows of a table. The last row",
        "repeats the first row, and shows how much the machine varies. The load average was"
        f" {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores. No row was measured on a GPU.",
        "`nox -s vllm -- gain` measures again.", "",
        "## Many requests", "",
        f"{REQUESTS} requests of {PROMPT} prompt tokens and {ANSWER} answer tokens are sent at once to the pocket",
        f"model. The pool has {BLOCKS} blocks of {BLOCK} tokens. All prompts begin with the same {SHARED} tokens. The",
        "pocket model is small, so the time of a step is mostly the time of vLLM's own Python code.",
    )
    for cached in (True, False):
        yield from (
            "", f"Prefix caching {'on' if cached else 'off'}:", "",
            "| policy | requests at once | in the mean | steps | time | answers per second |"
            " mean time to the first token | decisions and compactions |",
            "|---|---|---|---|---|---|---|---|", *apart(many_requests, cached),
        )
    yield from (
        "", "## One request", "",
        f"The table shows means of {REPEATS} requests of {LONG} prompt tokens to SmolLM2 (135 M parameters), one after",
        "another, without prefix caching. The share is that of the prefill in the first row.", "",
        "| policy | time to the first token | decision and compaction | share of the prefill |", "|---|---|---|---|",
        *apart(single_requests),
    )


if __name__ == "__main__":
    Path(ROOT / "docs" / "results" / "vllm.md").write_text("\n".join(page()) + "\n", encoding="utf-8")
