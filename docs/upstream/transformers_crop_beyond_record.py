"""A sliding cache can be cropped by more than it has recorded

Package: transformers 5.23.0
Prints: AssertionError: 4 tokens are stored after a crop, of a window of 7 behind 17
Expected: an error at `crop`. Recording began after 20 tokens and holds two; removing five leaves 4 tokens where the
window needs 7, while the count says 17, and the next forward fails inside attention.
Change: Raise where fewer than `sliding_window - 1 + tokens_to_remove` tokens are stored.
"""

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

config = MistralConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, sliding_window=8,
)
model, cache, ids = MistralForCausalLM(config).eval(), DynamicCache(config=config), torch.randint(3, 99, (1, 22))
with torch.no_grad():
    model(ids[:, :20], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 20:], past_key_values=cache)
cache.crop(-5)
stored, seen = cache.layers[0].keys.shape[2], cache.get_seq_length()
assert stored >= 7, f"{stored} tokens are stored after a crop, of a window of 7 behind {seen}"
