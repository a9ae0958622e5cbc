"""A small random Llama for measurements whose model says nothing: its weights are seeded, its attention not uniform."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
