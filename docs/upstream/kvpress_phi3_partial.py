"""SnapKVPress crashes on Phi-3 models that rotate a part of each head

Package: kvpress 0.5.5
Prints: RuntimeError: The size of tensor a (16) must match the size of tensor b (12) at non-singleton dimension 3
Expected: kept sets: `Phi3ForCausalLM` is listed as tested, and has `partial_rotary_factor`. Queries are rotated
whole.
Change: Rotate the first `cos.shape[-1]` dimensions, as the model does.
"""

import torch
from kvpress import SnapKVPress
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
model = Phi3ForCausalLM(Phi3Config(num_hidden_layers=1, rope_parameters=rope, **sizes)).eval()
ids = torch.randint(3, 99, (1, 40))
with torch.no_grad():
    model(ids)
    with SnapKVPress(0.5, window_size=8)(model):
        model(ids, past_key_values=DynamicCache())
