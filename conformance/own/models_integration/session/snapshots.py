"""Everything about a model that a context could have left behind."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["same_weights", "snapshot"]

_STOCK = ("sdpa", "eager", "flash_attention_2", "flex_attention")


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Config, hooks, attributes and methods of every module, and what the stock attention names stand for."""
    assert model.generation_config is not None
    return {
        "config": copy.deepcopy(vars(model.config)),
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "modules": {name: _attributes(module) for name, module in model.named_modules()},
        "attention": {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in _STOCK},
        "masks": {name: ALL_MASK_ATTENTION_FUNCTIONS.get(name) for name in _STOCK},
        "local": [dict(mapping._local_mapping) for mapping in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)],
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
    }


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Identities of what the module holds, and copies of its hook tables."""
    return {
        name: (dict(value) if name.endswith(("_hooks", "_kwargs", "_called")) else id(value))
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    } | {"forward": module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward}


def same_weights(before: dict[str, Any], model: PreTrainedModel) -> bool:
    """Bit for bit, NaN included."""
    return all(
        torch.equal(before["weights"][name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in model.state_dict().items()
    )
