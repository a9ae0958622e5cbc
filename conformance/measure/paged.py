"""Continuous batching with eviction and without it, in the same pool: `python -m conformance.measure.paged`.

Prints a line of JSON for each policy. Requests arrive all at once; texts are the pages of the specification.
"""

import argparse
import json
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from conformance.paths import ROOT
from models_integration import RetentionPolicy
from models_integration.engines.paged import PagedSession
from models_integration.model.published_weights import located
from models_integration.policies.methods import policy_from_name
from models_integration.policies.values import sentence_ends


@dataclass(frozen=True)
class Load:
    """Requests that arrive all at once, and the pool that they share."""

    requests: int = 64
    tokens: int = 512
    new: int = 32
    pool: int = 8
    """Requests that fit into it whole."""
    page: int = 16
    chunk: int = 1024
    """Tokens of a forward, at most."""


def greedy(new: int) -> Any:
    """The most likely token each time, `new` of them."""
    return GenerationConfig(  # type: ignore[no-untyped-call]  # by transformers
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


def pool(pages: int, page: int = 8, chunk: int = 64, **others: Any) -> ContinuousBatchingConfig:
    """Blocks of `page` tokens; `chunk` tokens go into one forward. transformers 5.23 calls a block a page."""
    config: Any = ContinuousBatchingConfig
    size = "page_size" if hasattr(config(), "page_size") else "block_size"
    made: ContinuousBatchingConfig = config(**{
        size: page, "num_blocks": pages, "max_batch_tokens": chunk, "allow_block_sharing": False, **others,
    })
    return made


def main() -> None:
    options = _options()
    load = Load(*(getattr(options, field.name) for field in fields(Load)))
    folder = Path(located(options.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).train(False)
    texts = _texts(tokenizer, load)
    ends = sentence_ends(tokenizer)
    for name in options.policies.split(","):
        constants = {"sentence_ends": ends} if name == "crystalcache" else {}
        policy = None if name == "none" else policy_from_name(name, options.budget, **constants)
        print(json.dumps({"policy": name, **vars(options), **served(model, texts, load, policy)}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policies", default="none,crystalcache", help="none: without a session")
    parser.add_argument("--budget", default="0.3")
    for name, default in asdict(Load()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _texts(tokenizer: Any, load: Load) -> list[list[int]]:
    pages = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "spec").glob("*.md")))
    ids = tokenizer(pages).input_ids
    starts = np.linspace(0, len(ids) - load.tokens, load.requests).astype(int)
    return [ids[start : start + load.tokens] for start in starts]


def served(model: Any, texts: Sequence[list[int]], load: Load, policy: RetentionPolicy | None) -> dict[str, Any]:
    """What a whole run took under a policy, or without a session; every request is answered, or RuntimeError."""
    run = None if policy is None else PagedSession(policy, model)
    with run or nullcontext():
        found = _answered(model, texts, load)
    if run is not None:
        found |= {"freed pages": run.freed_pages, "most pages": run.peak_pages, "most in flight": run.peak_requests}
    return found


def _answered(model: Any, texts: Sequence[list[int]], load: Load) -> dict[str, Any]:
    pages = load.pool * -(-(load.tokens + load.new) // load.page)
    # What a session refuses is off without one too: both run the same forwards.
    config = pool(pages, load.page, load.chunk, use_cuda_graph=False, use_async_batching=False)
    forwards: list[int] = []
    counting = model.register_forward_hook(lambda *_: forwards.append(1))
    start, processor_start = time.perf_counter(), time.process_time()
    outputs = model.generate_batch(
        list(texts), generation_config=greedy(load.new), continuous_batching_config=config, record_timestamps=True,
    )
    seconds, processor = time.perf_counter() - start, time.process_time() - processor_start
    counting.remove()
    if len(outputs) < len(texts) or any(output.error for output in outputs.values()):
        raise RuntimeError("a request was not answered")
    first = np.array([output.timestamps[0] - output.created_time for output in outputs.values()])
    gaps = np.concatenate([np.diff(output.timestamps) for output in outputs.values()])
    config_of = model.config
    head = config_of.head_dim or config_of.hidden_size // config_of.num_attention_heads
    page = 2 * config_of.num_hidden_layers * config_of.num_key_value_heads * head * model.dtype.itemsize * load.page
    return {
        "seconds": round(seconds, 1), "processor seconds": round(processor, 1), "forwards": len(forwards),
        "first token p50, p99": np.quantile(first, [0.5, 0.99]).round(2).tolist(),
        "between tokens p50, p99": np.quantile(gaps, [0.5, 0.99]).round(3).tolist(),
        "pages": pages, "bytes of a page": page, "preallocated bytes": pages * page,
        "resident MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
