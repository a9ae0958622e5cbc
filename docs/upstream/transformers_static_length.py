"""StaticCache.get_seq_length() returns its own counter, not a copy

Package: transformers 5.23.0
Prints: AssertionError: the length before the second forward, once 10, is now 12
Expected: 10: the signature says `int`. What comes is the tensor that the layer counts in, so a length that was read
before a forward changes with it, and `length += 1` moves the place where the next token is written.
Change: Return a copy, or an integer.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model, cache = LlamaForCausalLM(config).eval(), StaticCache(config, max_cache_len=32)
with torch.no_grad():
    model(torch.randint(3, 99, (1, 10)), past_key_values=cache)
    before = cache.get_seq_length()
    model(torch.randint(3, 99, (1, 2)), past_key_values=cache)
assert before == 10, f"the length before the second forward, once 10, is now {before}"
