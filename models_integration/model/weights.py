"""What a few policies must know of a model beside its attention inputs: output projections and frequencies."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from models_integration.model.architecture import Architecture
from models_integration.model.layer_kinds import FULL, of_layer
from spec.errors import SpecError
from spec.policy import DeviceArray

__all__ = ["CHANGING", "check_fixed", "output_projections", "rotary"]

_PROJECTIONS = ("o_proj", "dense", "out_proj", "wo", "c_proj")
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CHANGING = ("dynamic", "longrope")
"""Rotations whose frequencies change with the length of what is read."""


def output_projections(architecture: Architecture, on_device: bool = False) -> Mapping[int, DeviceArray]:
    """W_o (H, d, hidden) of each full-attention layer: the rows of each query head.

    Args:
        on_device: return views of the model's weights, not float64 arrays.

    Raises:
        SpecError: for a model whose output projection is not a linear layer of a known name, with its weights there.
    """
    found = {}
    for layer in architecture.full_layers:
        module = architecture.attention[layer]
        linear = next((part for name, part in module.named_children() if name in _PROJECTIONS), None)
        if not isinstance(linear, (nn.Linear, Conv1D)):
            raise SpecError("model", type(module).__name__, f"has no output projection {' or '.join(_PROJECTIONS)}")
        H, weight = of_layer(architecture.config, "num_attention_heads", layer), linear.weight.detach()
        if type(weight) is not Tensor or weight.dtype not in _PLAIN or weight.is_meta:
            reason = "its output projection is quantised or offloaded: load the model in bfloat16, float16 or float32"
            raise SpecError("model", type(module).__name__, reason)
        rows = weight if isinstance(linear, Conv1D) else weight.T  # a Conv1D, as GPT-2 has it, is stored by its inputs
        cut = (rows if on_device else rows.to("cpu", torch.float64)).reshape(H, -1, rows.shape[1])
        found[layer] = cut if on_device else cut.numpy()
    return found


def check_fixed(architecture: Architecture) -> None:
    """The rotary frequencies are the same at every length: cached keys and queries to come are turned alike.

    Raises:
        SpecError: otherwise.
    """
    if architecture.latent:
        raise SpecError("model", architecture.name, "its rotation turns a part of each key beside a latent (MLA)")
    stated: Any = getattr(architecture.config, "rope_parameters", None) or {}
    kind = stated.get(FULL, stated).get("rope_type", "default")
    if kind in CHANGING:
        name = type(architecture.decoder).__name__
        raise SpecError("model", name, f"its rotary frequencies change with the length ({kind})")


def rotary(architecture: Architecture) -> dict[str, Any]:
    """The rotary frequencies `inv_freq` of the full-attention layers, and the `factor` inside the tables.

    Raises:
        SpecError: for an embedding that is partial, interleaved, changes with the length, or spares a layer.
    """
    name = type(architecture.decoder).__name__
    check_fixed(architecture)
    embedding: Any = getattr(architecture.decoder, "rotary_emb", None)
    prefix = f"{FULL}_" if hasattr(embedding, f"{FULL}_inv_freq") else ""
    inv_freq = getattr(embedding, f"{prefix}inv_freq", None)
    if not isinstance(inv_freq, Tensor):
        raise SpecError("model", name, "has no rotary_emb with frequencies")
    for layer in architecture.full_layers:
        _check_pairs(architecture, layer, len(inv_freq))
    factor = float(getattr(embedding, f"{prefix}attention_scaling"))
    return {"inv_freq": inv_freq.detach().to("cpu", torch.float64).numpy(), "factor": factor}


def _check_pairs(architecture: Architecture, layer: int, pairs: int) -> None:
    """The embedding turns all of a head, in pairs of its two halves."""
    module, config = architecture.attention[layer], architecture.config
    H, hidden = (of_layer(config, name, layer) for name in ("num_attention_heads", "hidden_size"))
    d = of_layer(config, "head_dim", layer) or hidden // H
    if 2 * pairs != d:
        raise SpecError("model", type(module).__name__, f"turns {2 * pairs} of a head's {d} channels")
    halves = getattr(sys.modules[type(module).__module__], "rotate_half", None)
    expected = np.concatenate([-np.arange(pairs, d), np.arange(pairs)])
    if halves is None or halves(torch.arange(d, device="cpu")[None])[0].tolist() != expected.tolist():
        raise SpecError("model", type(module).__name__, "does not turn the two halves of a head against each other")
    if not getattr(module, "use_rope", True):
        raise SpecError("model", type(module).__name__, "has a layer without positions")
