"""SimLayerKVPress keeps n_recent - n_last recent tokens

Package: kvpress 0.5.5
Prints: AssertionError: 16 of 100 tokens are kept, and a ratio of 0.81 is reported
Expected: 20, of which 16 recent: "n_recent: number of recent tokens to preserve in lazy layers". The reported ratio
is right only where n_last is 1.
Change: Slice by `-n_recent`, and report what was kept.
"""

import torch
from kvpress import SimLayerKVPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
press = SimLayerKVPress(lazy_threshold=0.0, n_last=4, n_recent=16, n_initial=4)
with torch.no_grad(), press(model):
    model(torch.randint(3, 99, (1, 100)), past_key_values=cache)
kept = cache.layers[0].keys.shape[2]
assert kept == 20, f"{kept} of 100 tokens are kept, and a ratio of {press.compression_ratio:.2f} is reported"
