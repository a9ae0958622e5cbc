"""llama.cpp's context shift, as the subject of `kvspec verify --cache FILE:NAME --positions renumbered`.

llama.cpp removes cells (`llama_memory_seq_rm`) and moves the positions of later cells (`llama_memory_seq_add`). The
next forward pass turns the keys of the moved cells. A cell contains all layers and heads of a token.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llama_cpp as cpp
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lab.measure.gguf_files import write_gguf

__all__ = ["shifted"]

_FILES = TemporaryDirectory()
_FLOAT32 = 0
"""Number of float32 in `ggml_type`."""


@cache
def _file(model: str) -> str:
    """Return the GGUF file of a model, in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not isinstance(loaded, LlamaForCausalLM):
        raise NotImplementedError(f"{type(loaded).__name__} is not written as GGUF here")
    path = Path(_FILES.name, f"{abs(hash(model))}.gguf")
    write_gguf(path, loaded, GGMLQuantizationType.F32)
    return str(path)


def shifted(prompt: list[int], kept: Mapping[int, Sequence[Sequence[int]]], following: list[int], model: str) -> Tensor:
    """Read the prompt, remove the cells of evicted tokens, move later cells, and read the following tokens."""
    sets = {tuple(positions) for layer in kept.values() for positions in layer}
    if len(sets) > 1:
        raise NotImplementedError("a cell contains all layers and heads of a token")
    (tokens,), n = sets, len(prompt)
    # llama-cpp-python stores logits with logits_all alone. Version 0.3.36 uses no flash attention unless asked.
    llama: Any = cpp.Llama(
        _file(model), n_ctx=n + len(following), logits_all=True, n_threads=1, n_threads_batch=1, verbose=False,
        type_k=_FLOAT32, type_v=_FLOAT32,
    )
    llama.eval(prompt)
    memory, removed = cpp.llama_get_memory(llama.ctx), 0
    for before, after in pairwise([-1, *tokens, n]):
        first, end = before + 1 - removed, after - removed
        if end > first:
            assert cpp.llama_memory_seq_rm(memory, 0, first, end)
            cpp.llama_memory_seq_add(memory, 0, end, -1, first - end)
            removed += end - first
    llama.n_tokens = n - removed  # Llama counts the cells itself, and its next position is this number.
    llama.eval(following)
    logits = torch.from_numpy(llama.scores[n - removed : llama.n_tokens].copy())
    llama.close()
    return logits
