"""After PyramidKVPress a question of several tokens crashes with SDPA

Package: kvpress 0.5.5
Prints: RuntimeError: The size of tensor a (137) must match the size of tensor b (200) at non-singleton dimension 3
Expected: logits. Layers hold different numbers of tokens, and the mask is made for the first one's.
`PerLayerCompressionPress` warns that it needs flash attention; `PyramidKVPress` and `SimLayerKVPress` do not. See
also huggingface/transformers#35168.
Change: Warn or refuse as `PerLayerCompressionPress` does, or give each layer its mask.
"""

import torch
from kvpress import PyramidKVPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
model, cache, ids = LlamaForCausalLM(config).eval(), DynamicCache(), torch.randint(3, 99, (1, 205))
with torch.no_grad(), PyramidKVPress(0.5, window_size=4)(model):
    model(ids[:, :200], past_key_values=cache)
    model(ids[:, 200:], past_key_values=cache, position_ids=torch.arange(200, 205)[None])
