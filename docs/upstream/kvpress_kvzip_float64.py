"""KVzipPress crashes on a float64 model

Package: kvpress 0.5.5
Prints: RuntimeError: value cannot be converted to type float without overflow
Expected: kept sets, as in float32. `_make_mask` fills a tensor of PyTorch's default type with the least number of the
model's own.
Change: Give `torch.full` the `dtype` of the weights.
"""

from tempfile import mkdtemp

import torch
from kvpress import KVzipPress
from tokenizers import Tokenizer, models
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = Tokenizer(models.BPE(vocab={"s": 0, "?": 1}, merges=[], unk_token="?"))
PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder := mkdtemp())
config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
for dtype in (torch.float32, torch.float64):
    (model := LlamaForCausalLM(config).to(dtype)).config.name_or_path = folder
    with torch.no_grad(), KVzipPress(0.3)(model):
        model(torch.randint(3, 99, (1, 80)), past_key_values=DynamicCache())
