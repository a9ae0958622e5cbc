"""The rotary frequencies that a model starts from, before a prompt exchanges them, and those written over them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models_integration.model.rotation import rotary_buffers, rotary_module, scaling_of
from models_integration.model.weights import CHANGING

__all__ = ["keeps_frequencies", "starting_frequencies"]

# Attributes that a rotation whose frequencies change keeps of them; `starting_frequencies` compares their values.
ROTATING = ("long_inv_freq", "max_seq_len_cached", "original_inv_freq")


def keeps_frequencies(module: nn.Module, name: str) -> bool:
    """Whether a rotary module keeps something of its frequencies under a name."""
    return hasattr(module, "rope_type") and name.endswith(ROTATING)


def starting_frequencies(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, float]]:
    """Name, frequencies and factor of each rotary buffer; those of before, where a long prompt exchanges them."""
    for name, buffer in sorted(rotary_buffers(model)):
        for values in _starts(*rotary_module(model, name), buffer):
            yield name, values, scaling_of(model, name)


def _starts(module: Any, prefix: str, kind: str, buffer: Tensor) -> Iterator[Tensor]:
    """The frequencies that a module starts from; and those that it holds now, if its config does not make them."""
    if not any(word in kind for word in CHANGING):
        yield buffer
        return
    start: Tensor = getattr(module, f"{prefix}original_inv_freq", buffer)
    yield start
    if not start.is_meta:
        made = [start, *_longer(module, prefix, kind)]
        for held in (buffer, getattr(module, f"{prefix}long_inv_freq", None)):
            if held is not None and not any(_near(held, one) for one in made[-1 if "dynamic" in kind else 0:]):
                yield held


def _longer(module: Any, prefix: str, kind: str) -> list[Tensor]:
    """The frequencies that a module's config makes for the length that the module has read, if not the first ones."""
    try:
        if "dynamic" in kind:
            length = int(getattr(module, f"{prefix}max_seq_len_cached", module.max_seq_len_cached))
            if length == module.original_max_seq_len:
                return []
        else:
            stated = module.config.rope_parameters
            length = stated.get(prefix.removesuffix("_"), stated)["original_max_position_embeddings"] + 1
        return [ROPE_INIT_FUNCTIONS[kind](
            module.config, torch.device("cpu"), seq_len=length, layer_type=prefix.removesuffix("_") or None,
        )[0]]
    except Exception:  # of code that is not ours
        return []


def _near(held: Tensor, made: Tensor) -> bool:
    """Whether frequencies are those made in float32, on whichever device, and rounded to the dtype that is held."""
    rounding = 4 * torch.finfo(torch.float32).eps
    low, high = ((made.cpu().double() * (1 + off)).to(held.dtype) for off in (-rounding, rounding))
    return held.shape == made.shape and bool(((low <= held.cpu()) & (held.cpu() <= high)).all())
