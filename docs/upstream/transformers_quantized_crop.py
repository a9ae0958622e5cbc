"""Prompt lookup with a quantized cache crashes: QuantizedCache.is_croppable is True

Package: transformers 5.23.0
Prints: IndexError: too many indices for tensor of dimension 1
Expected: the tokens. `is_croppable` is True, inherited from `DynamicLayer`, whose `crop` cuts the residual alone,
and fails where that is empty; `cumulative_length` stays. `batch_repeat_interleave` and `batch_select_indices` are
alike.
Change: Override the three in `BaseQuantizedLayer`, or set `is_croppable = False` there.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model, ids = LlamaForCausalLM(config).eval(), torch.arange(3, 13).repeat(2)[None]
cache = QuantizedCache("fp8", config)
model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=20, do_sample=False)
