"""After a press on Gemma 3, tokens of a question attend to later tokens

Package: kvpress 0.5.5
Prints: AssertionError: another last token of the question changes what is said at its first
Expected: the same logits at the first token, whatever stands behind it. Sliding layers are left whole, and layer 0 is
one, so that the mask of all layers is made for what it has seen. Where full layers have evicted, the diagonal lies
behind the stored tokens, and the question is read without causality. Nothing is said.
Change: Refuse questions of more than one token there, or give full layers a mask of their own length.
"""

import torch
from kvpress import KnormPress
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

text = {"num_hidden_layers": 6, "hidden_size": 32, "head_dim": 8, "sliding_window": 16, "initializer_range": 0.3}
vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
config = Gemma3Config(text_config={**text, "vocab_size": 262208}, vision_config=vision)
model = Gemma3ForConditionalGeneration(config).eval()
context, first = torch.randint(3, 99, (1, 40)), []
for last in (5, 6):
    with torch.no_grad(), KnormPress(0.5)(model):
        model(context, past_key_values=(cache := DynamicCache(config=config)))
        question = torch.tensor([[7, 8, 9, last]])
        said = model(question, past_key_values=cache, position_ids=torch.arange(40, 44)[None])
    first.append(said.logits[:, 0])
assert torch.allclose(*first, atol=1e-3), "another last token of the question changes what is said at its first"
