"""ChunkPress(SnapKVPress) rotates each chunk's queries to the end of the sequence

Package: kvpress 0.5.5
Prints: AssertionError: what is kept of the first chunk depends on what stands behind it
Expected: the same tokens: "applying compression independently to fixed-size chunks". Hidden states and keys are cut
into chunks, `position_embeddings` are not.
Change: Cut `kwargs["position_embeddings"]` as well.
"""

import torch
from kvpress import ChunkPress, SnapKVPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.3)
model, whole, first = LlamaForCausalLM(config).eval(), DynamicCache(), DynamicCache()
ids = torch.randint(3, 99, (1, 128))
with torch.no_grad(), ChunkPress(SnapKVPress(0.5, window_size=8), chunk_length=64)(model):
    model(ids, past_key_values=whole)
    model(ids[:, :64], past_key_values=first)
a, b = (cache.layers[0].keys[0, 0, :32].sort(dim=0).values for cache in (whole, first))
assert torch.equal(a, b), "what is kept of the first chunk depends on what stands behind it"
