"""A sliding window of one token is never applied by DynamicCache

Package: transformers 5.23.0
Prints: AssertionError: 11 tokens are stored, and the logits are others
Expected: what the same model says without a cache, and an empty cache. `keys[:, :, -sliding_window + 1:]` is all of
them where the window is 1, while `get_mask_sizes` says none; the token is then compared with the oldest key.
Change: Slice from `full_key_states.shape[-2] - (sliding_window - 1)`.
"""

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
config = MistralConfig(num_hidden_layers=1, sliding_window=1, initializer_range=0.3, **sizes)
model, cache, ids = MistralForCausalLM(config).eval(), DynamicCache(config=config), torch.randint(3, 99, (1, 11))
with torch.no_grad():
    expected = model(ids, use_cache=False).logits[:, -1:]
    model(ids[:, :10], past_key_values=cache)
    found = model(ids[:, 10:], past_key_values=cache).logits
stored = cache.layers[0].keys.shape[2]
assert torch.allclose(found, expected, atol=1e-3), f"{stored} tokens are stored, and the logits are others"
