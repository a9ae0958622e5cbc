"""Padding on the left is scored and kept

Package: kvpress 0.5.5
Prints: AssertionError: of 32 padded places, 4 are kept
Expected: real tokens only. The four "sinks" are padding, which no query may see, and the first real tokens are
evicted.
Change: Read the attention mask: give padding the lowest score, and count budgets without it; or refuse it.
"""

import torch
from kvpress import StreamingLLMPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model, cache, full = LlamaForCausalLM(config).eval(), DynamicCache(), DynamicCache()
ids, mask = torch.randint(3, 99, (1, 80)), (torch.arange(80) >= 32).long()[None]
with torch.no_grad():
    model(ids, attention_mask=mask, past_key_values=full)
    with StreamingLLMPress(0.5)(model):
        model(ids, attention_mask=mask, past_key_values=cache)
same = (cache.layers[0].keys[0, 0, :, None] == full.layers[0].keys[0, 0]).all(-1)
kept = set(same.nonzero()[:, 1].tolist())
assert min(kept) >= 32, f"of 32 padded places, {len(kept & set(range(32)))} are kept"
