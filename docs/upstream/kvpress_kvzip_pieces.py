"""KVzipPress cuts the cache to the length of the model's last call

Package: kvpress 0.5.5
Prints: AssertionError: of 80 tokens, 20 are left in the cache
Expected: 80, some of them masked; or a refusal. The press takes the ids of the last call for the whole context, repeats
those, and cuts every layer to their number: `generate` within the press leaves one token of the cache, uncompressed.
Change: Gather the ids of all calls within the press up to the end of the prompt, or refuse a second one.
"""

from tempfile import mkdtemp

import torch
from kvpress import KVzipPress
from tokenizers import Tokenizer, models
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = Tokenizer(models.BPE(vocab={"s": 0, "?": 1}, merges=[], unk_token="?"))
PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder := mkdtemp())
config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
(model := LlamaForCausalLM(config)).config.name_or_path = folder
with torch.no_grad(), KVzipPress(0.3)(model):
    cache = DynamicCache()
    for piece in torch.randint(3, 99, (1, 80)).split([60, 20], dim=1):
        model(piece, past_key_values=cache)
assert (left := cache.get_seq_length()) == 80, f"of 80 tokens, {left} are left in the cache"
