"""Initial weights that already know where to look, so that retrieval is learnt in minutes on a CPU.

Choosing which fact to copy needs two layers that help each other: one that gathers the last few words at every
position, and one that matches gathered words with gathered words. Neither is of use without the other, so from
random weights both are found late and together. Here both exist from the start, roughly, and training does
the rest: layer 0 attends by position to the tokens just before, later layers compare by content.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

__all__ = ["look_back", "prepare"]

_COMMON_SHARE = 0.5
"""Size of the direction that all embeddings share, relative to the part that tells them apart."""

_SLOWEST_FOR_OFFSETS = 0.03
_FASTEST_FOR_CONTENT = 3e-3
"""Radians per position: channels above the first resolve single offsets, those below the second hardly turn."""

_OWN_SHARE = 0.4
"""How far the query heads of a group start apart; exactly equal ones would get equal gradients for ever."""

_FAINT = 0.02
"""What remains of the random weights where a head starts as a function of position alone."""


@dataclass(frozen=True)
class _Heads:
    """Sizes of a model's attention and the angles per position of its rotary channels, (size / 2,)."""

    width: int
    size: int
    queries: int
    keys: int
    angles: Tensor


def _heads_of(model: LlamaForCausalLM) -> _Heads:
    attention = model.model.layers[0].self_attn
    size = int(attention.head_dim)
    return _Heads(
        width=attention.q_proj.in_features,
        size=size,
        queries=attention.q_proj.out_features // size,
        keys=attention.k_proj.out_features // size,
        angles=model.model.rotary_emb.inv_freq.float(),
    )


def _rows(head: int, size: int) -> slice:
    return slice(head * size, (head + 1) * size)


def _share_a_direction(model: LlamaForCausalLM, generator: torch.Generator) -> Tensor:
    """One direction, added to every embedding: attention can read positions through it."""
    weight = model.model.embed_tokens.weight
    width = weight.shape[1]
    common = torch.randn(width, generator=generator)
    common /= common.norm()
    apart = torch.randn(weight.shape, generator=generator) / math.sqrt(width)
    apart -= torch.outer(apart @ common, common)
    weight.copy_(apart + _COMMON_SHARE * common)
    return common


def look_back(
    model: LlamaForCausalLM, common: Tensor, peak: float, layer: int = 0, first: int = 1, seen: float | None = None,
) -> None:
    """Let query head h of a layer attend to the token h + first before, whatever it is.

    `seen` is the length of what all normed inputs of the layer share, in the direction `common`; for layer 0 it follows
    from the embeddings.

    The shared direction gives every query and key one constant vector, which the rotary embedding turns
    into a function of distance alone: a sum of cosines that is largest, at `peak`, at the wanted offset.
    """
    heads = _heads_of(model)
    attention = model.model.layers[layer].self_attn
    used = (heads.angles > _SLOWEST_FOR_OFFSETS).float()
    # The size of the shared direction after the layer norm, which scales a token to sqrt(width).
    if seen is None:
        seen = _COMMON_SHARE * math.sqrt(heads.width) / math.sqrt(1 + _COMMON_SHARE**2)
    size = math.sqrt(peak * math.sqrt(heads.size) / float(used.sum())) / seen
    key = torch.cat([used * size, torch.zeros_like(used)])
    for head in range(heads.keys):
        rows = _rows(head, heads.size)
        attention.k_proj.weight[rows] = _FAINT * attention.k_proj.weight[rows] + torch.outer(key, common)
    for head in range(heads.queries):
        rows = _rows(head, heads.size)
        turn = (head + first) * heads.angles
        query = torch.cat([used * size * turn.cos(), -used * size * turn.sin()])
        attention.q_proj.weight[rows] = _FAINT * attention.q_proj.weight[rows] + torch.outer(query, common)


def _match_content(
    model: LlamaForCausalLM, common: Tensor, layer: int, gain: float, generator: torch.Generator
) -> None:
    """Let the heads of `layer` compare content: queries and keys are nearly one projection, and values are copied.

    Only slowly turning channels carry the projection, so that a match counts alike at every distance.
    """
    heads = _heads_of(model)
    attention = model.model.layers[layer].self_attn
    slow = (heads.angles < _FASTEST_FOR_CONTENT).float()
    channels = torch.cat([slow, slow])
    group = heads.queries // heads.keys
    for head in range(heads.keys):
        projection = torch.randn(heads.size, heads.width, generator=generator)
        projection -= torch.outer(projection @ common, common)
        projection *= gain * channels[:, None] / math.sqrt(heads.width)
        copied = torch.randn(heads.size, heads.width, generator=generator) / math.sqrt(heads.width)
        attention.k_proj.weight[_rows(head, heads.size)] = projection
        attention.v_proj.weight[_rows(head, heads.size)] = copied
        for query in range(head * group, (head + 1) * group):
            rows = _rows(query, heads.size)
            apart = torch.randn(heads.size, heads.width, generator=generator) * gain * channels[:, None]
            attention.q_proj.weight[rows] = projection + _OWN_SHARE * apart / math.sqrt(heads.width)
            attention.o_proj.weight[:, rows] = copied.T / math.sqrt(heads.queries)


@torch.no_grad()
def prepare(model: LlamaForCausalLM, seed: int, peak: float = 12.0, gain: float = 1.5) -> None:
    """Set the structured initial weights described above; the rest of the model keeps its random ones."""
    generator = torch.Generator().manual_seed(seed)
    common = _share_a_direction(model, generator)
    look_back(model, common, peak)
    for layer in range(1, len(model.model.layers)):
        _match_content(model, common, layer, gain, generator)
