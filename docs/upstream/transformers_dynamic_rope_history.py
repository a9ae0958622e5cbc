"""With dynamic RoPE a prompt's logits depend on the prompts before it

Package: transformers 5.23.0
Prints: AssertionError: another prompt in between changes a prompt's logits
Expected: the same logits twice. Frequencies of the longest sequence so far stay until a sequence shorter than the
original length comes; one of 40 tokens is then read with those of 64 (32 are the original length).
Change: Take the frequencies of the sequence at hand: recompute where `seq_len` differs from `max_seq_len_cached`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
sizes = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "initializer_range": 0.3}
config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=32, rope_parameters=rope, **sizes)
model, ids = LlamaForCausalLM(config).eval(), torch.randint(3, 99, (1, 64))
with torch.no_grad():
    before, _, after = (model(ids[:, :n]).logits for n in (40, 64, 40))
assert torch.allclose(before, after, atol=1e-3), "another prompt in between changes a prompt's logits"
