"""Tiny random models of the families and rotations that injection serves."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import prepare

__all__ = ["FAMILIES", "REFUSED", "ROTATIONS", "build"]

VOCABULARY = 131
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}
_GLOBAL_AND_LOCAL = {"sliding_window": 64, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}

# Family: (slots, styles) of its layers, and what differs from the common sizes.
FAMILIES: dict[str, tuple[list[tuple[str | None, str | None]], dict[str, Any]]] = {
    "Llama": ([("keys", "half_split")] * 2, {}),
    "Qwen2": ([("keys", "half_split")] * 2, {}),
    "Qwen3": ([("keys", "half_split")] * 2, {"head_dim": 8}),
    "Phi3": ([("keys", "half_split")] * 2, {}),
    "Mistral": ([("keys", "half_split")] * 2, {"sliding_window": None}),
    "Gemma3Text": ([("keys", "half_split")] * 2, _GLOBAL_AND_LOCAL),
    "Glm": ([("keys", "interleaved")] * 2, {"head_dim": 8}),
    "GPTNeoX": ([("keys", "half_split")] * 2, {}),
    "Cohere": ([("keys", "interleaved")] * 2, {}),
    "SmolLM3": ([("keys", "half_split"), (None, None)], {"no_rope_layers": [1, 0]}),
    "DeepseekV2": ([("values", "interleaved")] * 2, _LATENT),
    "DeepseekV3": ([("values", "half_split")] * 2, _LATENT),
}
_LINEAR_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
REFUSED: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Qwen3Next": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **_LINEAR_HEADS,
    },
}
_SCALED = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **_SCALED},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 8.0], **_SCALED,
    },
}
_MODELS: dict[str, str] = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A family's tiny model, with weights so large that its attention is not uniform."""
    own = REFUSED[family] if family in REFUSED else FAMILIES[family][1]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **own, **changes})
    make: Callable[[Any], PreTrainedModel] = getattr(transformers, _MODELS.get(family, f"{family}ForCausalLM"))
    torch.manual_seed(0)
    return prepare(make(config), dtype=dtype)
