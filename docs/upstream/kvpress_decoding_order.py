"""DecodingPress loses the sinks, since the cache is no longer in order after a compression

Package: kvpress 0.5.5
Prints: AssertionError: some of the sinks 0 to 3 are gone
Expected: tokens 0 to 3: "these tokens are never pruned" (`StreamingLLMPress`). `ScorerPress.compress` gathers by the
indices of `topk`, in no order; at the next compression "the first four" are others.
Change: Sort the indices before `gather`, as `CAMPress` does.
"""

import torch
from kvpress import DecodingPress, StreamingLLMPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model, cache, full = LlamaForCausalLM(config).eval(), DynamicCache(), DynamicCache()
ids, places = torch.randint(3, 99, (1, 104)), torch.arange(104)[None]
with torch.no_grad():
    model(ids, past_key_values=full)
    with DecodingPress(StreamingLLMPress(), compression_interval=20, target_size=32)(model):
        for part in (slice(64), *(slice(i, i + 1) for i in range(64, 104))):
            model(ids[:, part], position_ids=places[:, part], past_key_values=cache)
same = (cache.layers[0].keys[0, 0, :, None] - full.layers[0].keys[0, 0]).abs().amax(-1) < 1e-5
assert {0, 1, 2, 3} <= set(same.nonzero()[:, 1].tolist()), "some of the sinks 0 to 3 are gone"
