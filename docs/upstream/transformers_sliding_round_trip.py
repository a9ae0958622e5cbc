"""DynamicCache(list(cache)) resets the number of tokens that a sliding cache has read

Package: transformers 5.23.0
Prints: AssertionError: 7 of 30 tokens are counted after the round trip
Expected: 30. The iterator gives a third element, the window, so that such a layer can be made again (data
parallelism), but not what was seen; the next token then stands at position 7, and its logits are others.
Change: Give the count in the iterator too.
"""

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

config = MistralConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, sliding_window=8,
)
model, cache = MistralForCausalLM(config).eval(), DynamicCache(config=config)
with torch.no_grad():
    model(torch.randint(3, 99, (1, 30)), past_key_values=cache)
again = DynamicCache(list(cache))
assert again.get_seq_length() == 30, f"{again.get_seq_length()} of 30 tokens are counted after the round trip"
