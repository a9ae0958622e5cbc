"""KVzipPress evicts the system prompt first

Package: kvpress 0.5.5
Prints: AssertionError: of 16 tokens of a template, a head keeps 4
Expected: all 16. The system prompt is never evicted in the paper (KVzip, Section 4.1). Here what a chat template has
before the context is not repeated: behind the 4 sinks it scores 0, and goes before any token of the context.
Change: Give the whole prefix the sinks' score, and let it stand in the denominator as they do.
"""

from tempfile import mkdtemp

import torch
from kvpress import KVzipPress
from tokenizers import Tokenizer, models
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

template = {"chat_template": "{{ 's' * 16 + messages[0]['content'] }}"}
letters = Tokenizer(models.BPE(vocab={"s": 0, "?": 1}, merges=[], unk_token="?"))
PreTrainedTokenizerFast(tokenizer_object=letters, **template).save_pretrained(folder := mkdtemp())
config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
(model := LlamaForCausalLM(config)).config.name_or_path = folder
with torch.no_grad(), KVzipPress(0.3)(model):
    model(torch.randint(3, 99, (1, 80)), past_key_values=DynamicCache())
_, heads, positions = model.model.layers[0].self_attn.masked_key_indices
kept = 16 - int(((heads == 0) & (positions < 16)).sum())
assert kept == 16, f"of 16 tokens of a template, a head keeps {kept}"
