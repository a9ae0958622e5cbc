"""Tiny random models, and the oracle of a splice: one forward in which masks keep apart what was apart."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from conformance.own.models_integration.session.families import prepare

VOCABULARY = 131
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
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
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
}
"""What differs from the common sizes."""
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
    """A family's tiny model, with weights so large that its attention is not uniform."""
    own = REFUSED[family] if family in REFUSED else FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **own, **changes})
    make: Callable[[Any], PreTrainedModel] = getattr(transformers, _MODELS.get(family, f"{family}ForCausalLM"))
    torch.manual_seed(0)
    return prepare(make(config), dtype=dtype)



Chunks = Sequence[tuple[list[int], int]]
"""Ids of each chunk, and how many of them are hidden."""

SESSION, QUERY = 0, -1


@dataclass(frozen=True)
class Oracle:
    """Logits (1, queries, vocabulary) of the query; keys and values of every layer; and what each slot is."""

    logits: Tensor
    cache: DynamicCache
    visible: Tensor
    """Slots that a splice has: all but hidden preambles, and what was evicted."""
    own: Tensor
    """Slots of the session and the query."""
    positions: Tensor


def ids(n: int, seed: int) -> list[int]:
    """Token ids drawn once for all."""
    drawn: list[int] = torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def block_masked(
    model: PreTrainedModel, session: list[int], chunks: Chunks, query: list[int], *, evicted: Set[int] = frozenset(),
    lower: Set[int] = frozenset(), window: int | None = None,
    evicted_in: Mapping[int, Sequence[Set[int]]] | None = None,
) -> Oracle:
    """One forward. Chunks see themselves alone, the query sees what is visible and not `evicted` (positions).

    Args:
        lower: layers that see no chunk.
        window: of the model's sliding layers, which see no chunk either, and evict nothing.
        evicted_in: positions that some layers have evicted beside those, from all heads or from each KV head.
    """
    slots = _slots(session, chunks, query)
    asks = torch.tensor([own == QUERY for own in slots.owner])
    gone = [hide or (own != QUERY and place in evicted)
            for hide, own, place in zip(slots.hidden, slots.owner, slots.positions, strict=True)]
    full, apart = _masks(slots.owner, gone)
    positions = torch.tensor(slots.positions)
    shaped: Any = full[None, None]
    if window is not None:
        near = positions[:, None] - positions < window
        shaped = {"full_attention": shaped, "sliding_attention": (apart & near)[None, None]}
    removals = _masks_of(model, lower, apart)
    for layer, gaps in (evicted_in or {}).items():
        own_masks = []
        for lost in gaps:
            stays = torch.tensor([at not in lost for at in slots.positions]) | asks
            own_masks.append(full & (stays | ~asks[:, None]))
        queries = model.config.num_attention_heads // len(gaps) if len(gaps) > 1 else 1
        removals += _masks_of(model, {layer}, torch.stack(own_masks).repeat_interleave(queries, 0))
    cache = DynamicCache()
    try:
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([slots.tokens]), position_ids=positions[None], attention_mask=shaped,
                past_key_values=cache, use_cache=True,
            ).logits
    finally:
        for removal in removals:
            removal.remove()
    mine = torch.tensor([own in (SESSION, QUERY) for own in slots.owner])
    return Oracle(logits[:, -len(query) :], cache, ~torch.tensor(gone), mine, positions)


@dataclass
class _Slots:
    """Every token of the one forward: its id, its position, the chunk that owns it, and whether a splice hides it."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)

    def add(self, tokens: list[int], start: int, owner: int, preamble: int = 0) -> None:
        self.tokens += tokens
        self.positions += range(start, start + len(tokens))
        self.owner += [owner] * len(tokens)
        self.hidden += [place < preamble for place in range(len(tokens))]


def _slots(session: list[int], chunks: Chunks, query: list[int]) -> _Slots:
    slots = _Slots()
    slots.add(session, 0, SESSION)
    at = len(session)
    for number, (chunk, preamble) in enumerate(chunks, 1):
        slots.add(chunk, at - preamble, number, preamble)
        at += len(chunk) - preamble
    slots.add(query, at, QUERY)
    return slots


def _masks(owner: list[int], gone: list[bool]) -> tuple[Tensor, Tensor]:
    """Who sees whom, (tokens, tokens), where the query sees the chunks, and where it does not."""
    n = len(owner)
    full, apart = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    for row in range(n):
        for column in range(row + 1):
            same = owner[row] == owner[column]
            full[row, column] = same or (owner[row] == QUERY and not gone[column])
            apart[row, column] = same or (owner[row] == QUERY and owner[column] == SESSION)
    return full, apart


def _masks_of(model: PreTrainedModel, layers: Set[int], mask: Tensor) -> list[Any]:
    def swap(module: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "attention_mask": mask[None] if mask.dim() == 3 else mask[None, None]}

    return [
        module.register_forward_pre_hook(swap, with_kwargs=True) for name, module in model.named_modules()
        if name.endswith("self_attn") and module.layer_idx in layers
    ]
