"""An endless stream on a tiny model: memory, time per token and positions.

`python -m conformance.measure.benchmarks.stream 100000` reads that many random tokens in pieces of 200, at a budget of
512, and prints a row for every tenth: peak RSS so far, milliseconds of processor time per token, slots in use. It ends
by comparing the first layer's stored keys with those of the stored positions.
"""

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from models_integration import CrystalCache, RetainedCache
from models_integration.model.cache_argument import CACHE
from spec.parameters import PAPER

PIECE, BUDGET = 200, 512
PARAMETERS = replace(PAPER, C=256)
VOCABULARY = 131
ENDS = frozenset(range(3, VOCABULARY, 9))
LAYERS, HEADS, KV_HEADS, CHANNELS, INNER = 3, 4, 2, 12, 64


def tiny_llama() -> LlamaForCausalLM:
    """Three layers of two KV heads, in float32; generation never ends early."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HEADS * CHANNELS, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    ))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise * (1.2 / parameter.shape[1] ** 0.5))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    model.train(False)
    return model


@dataclass(frozen=True)
class Row:
    """One tenth of a stream."""

    tokens: int
    peak_rss: int
    """KiB, of the process, so far."""
    milliseconds: float
    """Of processor time per token, in this tenth."""
    stored: int
    """Slots of a full-attention layer, at the end of this tenth."""


def first_layer_keys(model: LlamaForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Keys (H_kv, n, d) of tokens at positions, from the weights alone: the first layer sees nothing else."""
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))[None]
        k = layer.self_attn.k_proj(hidden).view(1, len(ids), -1, layer.self_attn.head_dim).transpose(1, 2)
        cos, sin = model.model.rotary_emb(hidden, positions[None])
        turned: Tensor = apply_rotary_pos_emb(k, k, cos, sin)[1][0]
        return turned


def streamed(n: int, piece: int, backend: str) -> Iterator[Row]:
    """Reads n tokens.

    Raises:
        AssertionError: when a stored key is not that of its position.
    """
    model = tiny_llama()
    ids = torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(5))
    cache = RetainedCache(model.config)
    method = CrystalCache(BUDGET, ENDS, PARAMETERS, backend, stream=True)
    with torch.no_grad(), method(model):
        for start in range(0, n, n // 10):
            tenth, began = ids[start : start + n // 10], time.process_time()
            for tokens in torch.split(tenth, piece):
                model.base_model(input_ids=tokens[None], **{CACHE: cache})
            spent = time.process_time() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            yield Row(start + len(tenth), peak, 1e3 * spent / len(tenth), cache.stored_length)
    stored = cache.stored_positions()
    found = cache.keys_of(0)[0]
    expected = first_layer_keys(model, ids[stored], stored)
    assert cache.get_seq_length() == n
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


if __name__ == "__main__":
    print("| tokens | peak RSS, MiB | ms a token | slots |\n|---|---|---|---|")
    for row in streamed(int(sys.argv[1]), PIECE, "numba"):
        print(f"| {row.tokens} | {row.peak_rss / 1024:.1f} | {row.milliseconds:.4f} | {row.stored} |", flush=True)
