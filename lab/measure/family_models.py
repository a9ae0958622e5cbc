"""Tiny random models of all causal families in the installed transformers, each made from its config class."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 131

# A config class gets the values of the fields that it has.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": 16,
    "attention_chunk_size": 16, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 8,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": ["full_attention", "sliding_attention"] * 3,
}
_HALF: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_SEEN: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}

# Additional fields by the name of the family.
SIZES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"layer_types": ["mamba", "attention", "moe", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "cohere_compass_text": {
        "layer_types": _ALTERNATING, "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16},
    },
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "kimi_linear": {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "longcat_flash": {"num_key_value_heads": 4, "num_layers": 2},
    **{
        name: {"num_key_value_heads": 4} for name in (
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "glm4_moe_lite", "glm_moe_dsa",
            "hy_v4", "minicpm3", "sarvam_mla", "youtu",
        )
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "fuyu": {"text_config": {"model_type": "persimmon", **_TEXT}},
    "gemma3": {"text_config": {**_TEXT, **_HALF}, "vision_config": {**_SEEN, "image_size": 28, "patch_size": 14}},
    "gemma3n_text": _SHARED,
    "gemma4_text": {"layer_types": _ALTERNATING, "global_head_dim": 16, "num_global_key_value_heads": 1},
    "gemma4_unified_text": {"layer_types": _ALTERNATING, "global_head_dim": 16, "num_global_key_value_heads": 1},
    "gemma4": {
        "audio_config": None, "vision_config": None,
        "text_config": {
            **_TEXT, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _ALTERNATING,
            "sliding_window": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        },
    },
    "gemma4_unified": {"audio_config": None, "vision_config": None, "text_config": {**_TEXT, **_HALF}},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {**_SEEN, "mlp_dim": 48, "image_size": 64, "global_attn_indexes": [1]},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax": {"sliding_window": None},
    "mllama": {"cross_attention_layers": [1, 3]},
    "moss_transcribe_diarize": {
        "text_config": {"model_type": "qwen3", **_TEXT}, "audio_config": _SEEN,
    },
    "qwen4_exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16], "attn_layers": ["local", "lsh"]},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_d_state": 8},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


MOST_PARAMETERS = 100_000_000


class NotBuilt(Exception):
    """Error if no tiny model of a family can be made in this environment."""


@dataclass(frozen=True)
class Family:
    """Model class, and one of its names in AutoModelForCausalLM."""

    name: str
    model_class: str

    def build(self) -> PreTrainedModel:
        """Return a tiny model in float32 and eval mode, with weights so large that the attention is not uniform.

        Raises:
            NotBuilt: with the reason.
        """
        torch.manual_seed(0)
        try:
            model_class = getattr(transformers, self.model_class)
            config = _config(model_class.config_class, self.name)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size > MOST_PARAMETERS:
                raise NotBuilt(f"{size:,} parameters in its smallest configuration here")
            model: PreTrainedModel = model_class(_config(model_class.config_class, self.name))
        except NotBuilt:
            raise
        except Exception as error:
            raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:100]}") from error
        return _drawn(model)


def families() -> list[Family]:
    """Return a family for each model class, with the shortest name of the class."""
    names: dict[str, str] = {}
    for name, model_class in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), key=lambda item: (len(item[0]), item)):
        names.setdefault(model_class, name)
    return sorted((Family(name, model_class) for model_class, name in names.items()), key=lambda family: family.name)


def _config(config_class: Any, name: str) -> Any:
    """Return a config with tiny sizes in the fields of the class. If all layers slide, make every second one full."""
    given = {**_known(config_class), **SIZES.get(name, {})}
    config = config_class(**given)
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        return config_class(**{**given, "sliding_window": None})
    if kinds is not None and set(kinds) == {"sliding_attention"}:
        return config_class(**{**given, "layer_types": ["sliding_attention", "full_attention"] * (len(kinds) // 2)})
    return config


def _known(config_class: Any) -> dict[str, Any]:
    names, other = {field.name for field in fields(config_class)}, getattr(config_class, "attribute_map", {})
    known = {other.get(name, name): value for name, value in TINY.items() if other.get(name, name) in names}
    parts: Mapping[str, Any] = getattr(config_class, "sub_configs", {})
    inner = {name: _known(part) for name, part in parts.items() if name in names and is_dataclass(part)}
    return {**known, **inner}


def _drawn(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * (1.2 / parameter.shape[-1] ** 0.5)
        elif name.endswith(("bias", "temp")):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
    model.train(False)
    return model
