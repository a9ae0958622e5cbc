"""Eager attention adds a boolean 4D mask as 0 and 1: nothing is masked

Package: transformers 5.23.0
Prints: AssertionError: eager attention does not mask what a boolean mask says
Expected: the same logits by both. A 4D mask is "returned as-is" (`create_causal_mask`); SDPA masks by it, eager adds
True as 1.0 to the scores, so that future tokens are seen, without a word.
Change: In `create_causal_mask` turn a boolean 4D mask into an additive one for eager, or refuse it.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.3)
model, ids, mask = LlamaForCausalLM(config).eval(), torch.randint(3, 99, (1, 9)), torch.ones(9, 9, dtype=torch.bool)
with torch.no_grad():
    model.set_attn_implementation("sdpa")
    sdpa = model(ids, attention_mask=mask.tril()[None, None]).logits
    model.set_attn_implementation("eager")
    eager = model(ids, attention_mask=mask.tril()[None, None]).logits
assert torch.allclose(sdpa, eager, atol=1e-3), "eager attention does not mask what a boolean mask says"
