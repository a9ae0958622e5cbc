"""Gemma3ForCausalLM, which the README lists as supported, crashes at the first step

Package: kvpress 0.5.5
Prints: RuntimeError: The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 3
Expected: logits. Sliding layers are left alone for `Gemma3ForConditionalGeneration` only; here their window is
compressed, and the mask no longer fits.
Change: Skip layers by `self_attn.is_sliding` for every model.
"""

import torch
from kvpress import KnormPress
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
config = Gemma3TextConfig(vocab_size=99, num_hidden_layers=6, sliding_window=16, **sizes)
model, ids, cache = Gemma3ForCausalLM(config).eval(), torch.randint(3, 99, (1, 41)), DynamicCache(config=config)
with torch.no_grad(), KnormPress(0.5)(model):
    model(ids[:, :40], past_key_values=cache)
    model(ids[:, 40:], past_key_values=cache, position_ids=torch.tensor([[40]]))
