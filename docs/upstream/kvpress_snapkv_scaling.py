"""SnapKVPress scores by a scaling different from the model's

Package: kvpress 0.5.5
Prints: AssertionError: the weights are not those of the model
Expected: the model's own attention weights. `compute_window_attention`, which TOVA, Finch and SimLayerKV call too,
divides by sqrt(head_dim); the model uses `module.scaling`, which Gemma 3 sets by `query_pre_attn_scalar`. Tokens are
ranked by a softmax of another temperature.
Change: Multiply by `module.scaling`.
"""

import torch
from kvpress import SnapKVPress
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8, "initializer_range": 0.3}
config = Gemma3TextConfig(vocab_size=99, num_hidden_layers=1, query_pre_attn_scalar=64, **sizes)
model, cache = Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval(), DynamicCache(config=config)


def compare(module, _, given, output):
    q, tables = given["hidden_states"], given["position_embeddings"]
    found = SnapKVPress.compute_window_attention(module, q, cache.layers[0].keys, 4, tables)
    assert torch.allclose(found, output[1][..., -4:, :-4], atol=1e-3), "the weights are not those of the model"


model.model.layers[0].self_attn.register_forward_hook(compare, with_kwargs=True)
model(torch.randint(3, 99, (1, 20)), past_key_values=cache)
