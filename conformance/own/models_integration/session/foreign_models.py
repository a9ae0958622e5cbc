"""Models that the integration must refuse, each with words that its error must hold."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["REFUSED"]

_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}


def _flex() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**_SIZES))
    model.config._attn_implementation_internal = "flex_attention"
    return model


REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "ALiBi: BLOOM": (lambda: BloomForCausalLM(BloomConfig(**_SMALL, n_layer=2, n_head=4)), "ALiBi"),
    "ALiBi: Falcon": (
        lambda: FalconForCausalLM(FalconConfig(**_SMALL, num_hidden_layers=2, num_attention_heads=4, alibi=True)),
        "ALiBi",
    ),
    "recurrent: Mamba": (
        lambda: MambaForCausalLM(MambaConfig(**_SMALL, num_hidden_layers=2, state_size=4)), "nothing to evict",
    ),
    "recurrent: RWKV": (lambda: RwkvForCausalLM(RwkvConfig(**_SMALL, num_hidden_layers=2)), "recurrent"),
    "sinks in the softmax: GPT-OSS": (
        lambda: GptOssForCausalLM(
            GptOssConfig(**{**_SIZES, "head_dim": 8, "num_local_experts": 2, "rope_parameters": None})
        ), "sinks inside the softmax",
    ),
    "all layers slide: Mistral": (
        lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=16)), "no full-attention layer",
    ),
    "all layers slide: Phi-3": (
        lambda: Phi3ForCausalLM(Phi3Config(**_SIZES, sliding_window=16)), "no full-attention layer",
    ),
    "encoder-decoder: T5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ), "encoder-decoder",
    ),
    "attention that sees the future": (
        lambda: LlamaForCausalLM(LlamaConfig(**{**_SIZES, "is_causal": False})), "not causal",
    ),
    "another attention implementation": (_flex, "attn_implementation is 'flex_attention'"),
    "no transformers model": (lambda: torch.nn.Linear(2, 2), "must be a transformers PreTrainedModel"),
}
