"""AdaKVPress fails on a question of 40 tokens

Package: kvpress 0.5.5
Prints: ValueError: Could not find fake keys such that for every query q, exp(<q, k>) = 0
Expected: logits. One key must have a negative product with every query of the group; for enough queries in few
dimensions there is none. Here 80 queries in 16 dimensions; nothing rules it out for larger heads.
Change: Mask the tokens (an additive mask by head) in place of fake keys.
"""

import torch
from kvpress import AdaKVPress, KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
model, cache, ids = LlamaForCausalLM(config).eval(), DynamicCache(), torch.randint(3, 99, (1, 80))
with torch.no_grad(), AdaKVPress(KnormPress(0.5))(model):
    model(ids[:, :40], past_key_values=cache)
    model(ids[:, 40:], past_key_values=cache)
