"""Output projections, which some policies need in addition to attention inputs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from models_integration.model.architecture import Architecture
from models_integration.model.layer_kinds import of_layer
from spec.errors import SpecError
from spec.policy import DeviceArray

__all__ = ["output_projections"]

_PROJECTIONS = ("o_proj", "dense", "out_proj", "wo", "c_proj")
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def output_projections(architecture: Architecture, on_device: bool = False) -> Mapping[int, DeviceArray]:
    """Return W_o (H, d, hidden) of each full-attention layer: the rows of the output projection for each query head.

    Args:
        on_device: if True, return views of the model's weights instead of float64 arrays.

    Raises:
        SpecError: if the output projection is not a linear layer with a known name, or if the weights have no values.
    """
    found = {}
    for layer in architecture.full_layers:
        module = architecture.attention[layer]
        linear = next((part for name, part in module.named_children() if name in _PROJECTIONS), None)
        if not isinstance(linear, (nn.Linear, Conv1D)):
            raise SpecError("model", type(module).__name__, f"has no output projection {' or '.join(_PROJECTIONS)}")
        H, weight = of_layer(architecture.config, "num_attention_heads", layer), linear.weight.detach()
        if type(weight) is not Tensor or weight.dtype not in _PLAIN or weight.is_meta:
            reason = "the output projection is quantised or offloaded: load the model in bfloat16, float16 or float32"
            raise SpecError("model", type(module).__name__, reason)
        rows = weight if isinstance(linear, Conv1D) else weight.T  # the rows of a Conv1D weight (GPT-2) are the inputs
        cut = (rows if on_device else rows.to("cpu", torch.float64)).reshape(H, -1, rows.shape[1])
        found[layer] = cut if on_device else cut.numpy()
    return found
