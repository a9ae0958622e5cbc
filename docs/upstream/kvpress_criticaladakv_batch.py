"""CriticalAdaKVPress crashes on a batch of two

Package: kvpress 0.5.5
Prints: RuntimeError: selected index k out of range
Expected: the kept sets of each sequence, as for a batch of one. Budgets of heads are summed over the batch, and
exceed the length.
Change: Count the budgets of each sequence.
"""

import torch
from kvpress import CriticalAdaKVPress, KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
with torch.no_grad(), CriticalAdaKVPress(KnormPress(0.2))(model):
    for batch in (1, 2):
        model(torch.randint(3, 99, (batch, 40)), past_key_values=DynamicCache())
