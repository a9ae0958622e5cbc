"""Continuous batching with eviction and without it, in the same pool: `python -m conformance.measure.paged`.

Prints a line of JSON for each policy. Requests arrive all at once; texts are the pages of the specification.
"""

import argparse
import json
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from conformance.paths import ROOT
from models_integration.engines.paged import PagedSession
from models_integration.model.published_weights import located
from models_integration.policies.methods import policy_from_name, sentence_ends


def main() -> None:
    options = _options()
    folder = Path(located(options.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).train(False)
    texts = _texts(tokenizer, options.requests, options.tokens)
    ends = sentence_ends(tokenizer)
    for name in options.policies.split(","):
        constants = {"sentence_ends": ends} if name == "crystalcache" else {}
        run = None if name == "none" else PagedSession(policy_from_name(name, options.budget, **constants), model)
        with run or nullcontext():
            found = _serve(model, texts, options)
        if run is not None:
            found |= {
                "freed pages": run.freed_pages, "most pages": run.peak_pages, "most in flight": run.peak_requests,
            }
        print(json.dumps({"policy": name, **vars(options), **found}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policies", default="none,crystalcache", help="none: without a session")
    parser.add_argument("--budget", default="0.3")
    for name, default in (("requests", 64), ("tokens", 512), ("new", 32), ("pool", 8), ("page", 16), ("chunk", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def _texts(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    pages = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "spec").glob("*.md")))
    ids = tokenizer(pages).input_ids
    starts = np.linspace(0, len(ids) - tokens, count).astype(int)
    return [ids[start : start + tokens] for start in starts]


def _serve(model: Any, texts: Sequence[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    pages = options.pool * -(-(options.tokens + options.new) // options.page)
    config = ContinuousBatchingConfig(
        page_size=options.page, num_blocks=pages, max_batch_tokens=options.chunk, allow_block_sharing=False
    )
    generation: Any = GenerationConfig
    forwards: list[int] = []
    counting = model.register_forward_hook(lambda *_: forwards.append(1))
    start, processor_start = time.perf_counter(), time.process_time()
    outputs = model.generate_batch(
        list(texts), continuous_batching_config=config, record_timestamps=True,
        generation_config=generation(max_new_tokens=options.new, do_sample=False, eos_token_id=-1, pad_token_id=0),
    )
    seconds, processor = time.perf_counter() - start, time.process_time() - processor_start
    counting.remove()
    if len(outputs) < len(texts) or any(output.error for output in outputs.values()):
        raise RuntimeError("a request was not answered")
    first = np.array([output.timestamps[0] - output.created_time for output in outputs.values()])
    gaps = np.concatenate([np.diff(output.timestamps) for output in outputs.values()])
    config_of = model.config
    head = config_of.head_dim or config_of.hidden_size // config_of.num_attention_heads
    page = 2 * config_of.num_hidden_layers * config_of.num_key_value_heads * head * model.dtype.itemsize * options.page
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
