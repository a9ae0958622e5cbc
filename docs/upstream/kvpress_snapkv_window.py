"""SnapKVPress evicts the newest tokens if the budget is below its window

Package: kvpress 0.5.5
Prints: AssertionError: the last token of the prompt is evicted
Expected: token 199 is kept, or the ratio refused: "make sure the window is not pruned" (a comment in `score`). All
of the window have one score, and `topk` is free to take any 20 of 64. SnapKV's paper has a budget above the window.
Change: Give the window ascending scores, so that the newest win, or refuse a budget below it.
"""

import torch
from kvpress import SnapKVPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model, cache, full = LlamaForCausalLM(config).eval(), DynamicCache(), DynamicCache()
ids = torch.randint(3, 99, (1, 200), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    model(ids, past_key_values=full)
    with SnapKVPress(0.9, window_size=64)(model):
        model(ids, past_key_values=cache)
same = (cache.layers[0].keys[0, 0, :, None] == full.layers[0].keys[0, 0]).all(-1)
kept = set(same.nonzero()[:, 1].tolist())
assert 199 in kept, "the last token of the prompt is evicted"
