"""Tiny random models, and the oracle of a splice: one forward pass with masks that separate the chunks."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from lab.item_vectors import vocabulary
from tests.models_integration.session.families import SMALL, VOCABULARY, prepare, tiny

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}
_GLOBAL_AND_LOCAL = {"sliding_window": 64, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Phi3": {},
    "Mistral": {"sliding_window": None},
    "Gemma3Text": _GLOBAL_AND_LOCAL,
    "Glm": {"head_dim": 8},
    "GPTNeoX": {},
    "Cohere": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
}
"""Fields that differ from the common sizes."""
_LINEAR_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
REFUSED: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Qwen3Next": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **_LINEAR_HEADS,
    },
}
_SCALED = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **_SCALED},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 8.0], **_SCALED,
    },
}
_MODELS: dict[str, str] = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a family's tiny model. The weights are so large that attention is not uniform."""
    fields = REFUSED[family] if family in REFUSED else FAMILIES[family]
    return prepare(tiny(_MODELS.get(family, family), **{**SMALL, **fields, **changes}), dtype=dtype)


CHAT = vocabulary({
    "<|im_start|>": [127], "<|im_end|>": [128], "<|end|>": [129], "<｜User｜>": [3, 4, 5], "\n": [4],
    "user\n": [5, 4], "system\nYou are a helpful assistant.": [6, 7, 8],
})

Chunks = Sequence[tuple[list[int], int]]
"""Ids of each chunk, and the number of hidden ids at its beginning."""


@dataclass(frozen=True)
class Oracle:
    """Logits (1, queries, vocabulary) of the query, keys and values of every layer, and the kind of each slot."""

    logits: Tensor
    cache: DynamicCache
    visible: Tensor
    """Slots that a splice has: all except hidden preambles and evicted tokens."""
    session_slots: Tensor
    """Slots of the session and the query."""


def ids(n: int, seed: int) -> list[int]:
    """Return n random token ids, which depend only on the seed."""
    drawn: list[int] = torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def block_masked(
    model: PreTrainedModel, session: list[int], chunks: Chunks, query: list[int], *, evicted: Set[int] = frozenset(),
    lower: Set[int] = frozenset(), evicted_in: Mapping[int, Sequence[Set[int]]] | None = None,
) -> Oracle:
    """Run one forward pass. Chunks attend only to themselves. The query attends to visible positions not in `evicted`.

    Sliding layers attend to no chunk, and evict nothing.

    Args:
        lower: layers that attend to no chunk.
        evicted_in: further positions that some layers have evicted, from all heads or from each KV head.
    """
    parts, starts = [(session, 0), *chunks, (query, 0)], [0]
    for part, hidden in parts:
        starts.append(starts[-1] + len(part) - hidden)
    owner = torch.tensor([number for number, (part, _) in enumerate(parts) for _ in part])
    positions = torch.tensor([
        starts[number] - hidden + at for number, (part, hidden) in enumerate(parts) for at in range(len(part))
    ])
    asks, mine = owner == len(parts) - 1, (owner == 0) | (owner == len(parts) - 1)
    gone = positions < torch.tensor(starts)[owner]  # Hidden tokens have positions before the start of their part.
    gone |= torch.tensor([place in evicted for place in positions.tolist()]) & ~asks
    alone, causal = owner[:, None] == owner, torch.ones(2 * [len(owner)], dtype=torch.bool).tril()
    full, apart = causal & (alone | asks[:, None] & ~gone), causal & (alone | asks[:, None] & mine)
    shaped: Any = full[None, None]
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        near = positions[:, None] - positions < model.config.sliding_window
        shaped = {"full_attention": shaped, "sliding_attention": (apart & near)[None, None]}
    masks = dict.fromkeys(lower, apart[None])
    for layer, gaps in (evicted_in or {}).items():
        stays = torch.tensor([[place not in lost for place in positions.tolist()] for lost in gaps]) | asks
        queries = model.config.num_attention_heads // len(gaps) if len(gaps) > 1 else 1
        masks[layer] = (full & (stays[:, None] | ~asks[:, None])).repeat_interleave(queries, 0)
    cache = DynamicCache()
    with torch.no_grad(), given(model, masks):
        logits = model(
            input_ids=torch.tensor([[token for part, _ in parts for token in part]]), position_ids=positions[None],
            attention_mask=shaped, past_key_values=cache, use_cache=True,
        ).logits
    return Oracle(logits[:, -len(query) :], cache, ~gone, mine)


@contextmanager
def given(model: PreTrainedModel, masks: Mapping[int, Tensor]) -> Iterator[None]:
    """Pass a mask (heads or 1, tokens, tokens) to the attention of each of these layers."""
    def swap(module: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "attention_mask": masks[module.layer_idx][None]}

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith("self_attn") and module.layer_idx in masks:
                stack.callback(module.register_forward_pre_hook(swap, with_kwargs=True).remove)
        yield
