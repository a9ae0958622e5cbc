"""AdaKVPress overwrites keys of another conversation's cache, after its context too

Package: kvpress 0.5.5
Prints: AssertionError: a cache that no press has seen is overwritten
Expected: the same logits: that cache was never compressed. `masked_key_indices` stand on the module until its next
prefill, and `attention_patch` writes fake keys into whatever cache is read next, for good.
Change: Keep the indices with the cache, or clear them at the end of the context.
"""

import torch
from kvpress import AdaKVPress, KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)
model, mine, fresh = LlamaForCausalLM(config).eval(), DynamicCache(), DynamicCache()
others, ids, token = (torch.randint(3, 99, (1, n)) for n in (40, 40, 1))
with torch.no_grad():
    for cache in (mine, fresh):
        model(ids, past_key_values=cache)
    expected = model(token, past_key_values=fresh).logits
    with AdaKVPress(KnormPress(0.5))(model):
        model(others, past_key_values=DynamicCache())
    found = model(token, past_key_values=mine).logits
assert torch.allclose(found, expected, atol=1e-3), "a cache that no press has seen is overwritten"
