"""Only the first piece of a prompt read in pieces is compressed

Package: kvpress 0.5.5
Prints: AssertionError: 112 of 128 tokens are kept at ratio 0.5
Expected: 64: the ratio is of the prefill (`BasePress`: "applied only during pre-filling"), and `prefill_chunk_size`
is a documented way to prefill. `is_prefilling` takes every later piece for decoding, without a word.
Change: Compress at the end of the last piece, or refuse later pieces of more than one token.
"""

import torch
from kvpress import KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
with torch.no_grad(), KnormPress(0.5)(model):
    ids = torch.randint(3, 99, (1, 128))
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False, prefill_chunk_size=32)
kept = cache.layers[0].keys.shape[2]
assert kept == 64, f"{kept} of 128 tokens are kept at ratio 0.5"
