"""Measure requests that run at once inside vLLM with and without eviction: `nox -s vllm -- gain`.

The command writes docs/results/vllm.md. All rows are measured in one process, with one pool of blocks and the same
prompts.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conformance.paths import ROOT
from models_integration.pocket import ASSETS, load_pocket_tokenizer

BLOCKS, BLOCK, REQUESTS, PROMPT, ANSWER = 84, 32, 16, 600, 200
BYTES = 3 * 2 * 2 * BLOCK * 32 * 4
"""Bytes of one block of the pocket model: 3 layers, 2 KV heads, keys and values of 32 numbers in float32."""
ROWS: Sequence[tuple[str, dict[str, Any] | None]] = (
    ("full cache", None), ("streamingllm", {"policy": "streamingllm", "budget": 0.3}),
    ("snapkv", {"policy": "snapkv", "budget": 0.3}), ("full cache, again", None),
)


class Load(NamedTuple):
    """Measurement of one load of requests."""

    most: int
    mean: float
    steps: int
    seconds: float
    first: float
    decision: float


def engine() -> Any:
    """Return vLLM with eviction and prefix caching, in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_V2_MODEL_RUNNER="0")
    from vllm import LLM

    from models_integration.engines.vllm.plugin import register

    register()
    return LLM(
        model=str(ASSETS), dtype="float32", enforce_eager=True, block_size=BLOCK, max_model_len=1024,
        kv_cache_memory_bytes=(BLOCKS + 1) * BYTES, max_num_batched_tokens=512, max_num_seqs=32,
        disable_log_stats=True, enable_prefix_caching=True, additional_config={"kvspec": {}},
    )


def measure(llm: Any, asked: dict[str, Any] | None, prompts: Sequence[list[int]]) -> Load:
    """Serve all prompts at once, and return the measurement."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    runner, extra = core.model_executor.driver_worker.worker.model_runner, asked and {"kvspec": asked}
    parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, extra_args=extra)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{asked}{number}{time.monotonic()}", {"prompt_token_ids": prompt}, parameters)
    running, spent, first = list[int](), [0.0], dict[str, float]()
    if runner.kvspec is not None:
        for name in ("decide", "begin"):
            _timed(runner.kvspec, name, spent)
    begun = time.perf_counter()
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            first.setdefault(output.request_id, time.perf_counter() - begun)
        running.append(len(core.scheduler.running))
    seconds = time.perf_counter() - begun
    return Load(
        max(running), sum(running) / len(running), len(running), seconds, sum(first.values()) / len(first), spent[0]
    )


def _timed(model: Any, name: str, spent: list[float]) -> None:
    own = getattr(type(model), name)

    def timed(*args: Any) -> None:
        begun = time.perf_counter()
        own(model, *args)
        spent[0] += time.perf_counter() - begun

    setattr(model, name, timed)


def table() -> list[str]:
    """Return the rows of the table."""
    ids = load_pocket_tokenizer()((ROOT / "docs" / "examples" / "lighthouse.txt").read_text(encoding="utf-8")).input_ids
    prompts = [(ids * 8)[13 * number : 13 * number + PROMPT] for number in range(REQUESTS)]
    llm = engine()
    for _, asked in ROWS:  # warm-up for code that compiles on the first call
        measure(llm, asked, prompts[:1])
    result = []
    for name, asked in ROWS:
        one = measure(llm, asked, prompts)
        result.append(
            f"| {name} | {one.most} | {one.mean:.1f} | {one.steps} | {one.seconds:.1f} s |"
            f" {REQUESTS / one.seconds:.2f} | {one.first:.1f} s | {one.decision:.2f} s |"
        )
        print(result[-1], flush=True)
    return result


def main() -> None:
    """Measure the table, and write the page."""
    head = [
        "| policy | requests at once | in the mean | steps | time | answers per second | mean time to the first token"
        " | decisions and compactions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    page = [
        "# Eviction inside vLLM", "",
        f"The tables show {REQUESTS} requests of {PROMPT} prompt tokens and {ANSWER} answer tokens, all sent at once.",
        f"The pool has {BLOCKS} blocks of {BLOCK} tokens. Each policy keeps 30 % of the prompt. The model is the",
        "pocket model in float32 on a CPU with one thread, in vLLM 0.32. One process measured all rows of a table. The",
        "last row repeats the first row, and shows how much the machine varies. `nox -s vllm -- gain` measures again.",
        "", "The pocket model is small, so the time of a step is mostly the time of vLLM's own Python code. No row was",
        "measured on a GPU. Prefix caching is on, and the prompts share no prefix.",
    ]
    page += ["", *head, *table()]
    Path(ROOT / "docs" / "results" / "vllm.md").write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
