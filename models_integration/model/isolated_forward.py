"""A few tokens that kvspec itself reads with a model: the model is as before afterwards."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from models_integration.model.architecture import Architecture, device_of, restored_rotation
from models_integration.model.cache_argument import cache_name

__all__ = ["FORWARD_ERRORS", "isolated_forward", "read_tokens", "states_agree"]

# A wrong state or position is off by 0.1 and more; rounding by less than 1e-5 in float32, 1e-2 in bfloat16.
_BOUND, _BOUND_HALF = 1e-3, 6e-2

# What a modelling file raises that was not written for what it is given.
FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


@contextmanager
def isolated_forward(architecture: Architecture) -> Iterator[None]:
    """Call no hooks and drop nothing out, and restore torch's random numbers and the rotary embeddings afterwards."""
    modules = list(architecture.decoder.modules())
    states = [(module, module._forward_pre_hooks, module._forward_hooks, module.training) for module in modules]
    used = {device_of(architecture.decoder), *(one.device for one in architecture.decoder.parameters())}
    devices = {device for device in used if device.type == "cuda"}
    for module in modules:
        module._forward_pre_hooks, module._forward_hooks, module.training = OrderedDict(), OrderedDict(), False
    try:
        with (
            torch.no_grad(), torch.random.fork_rng(sorted(device.index for device in devices)),
            restored_rotation(architecture.decoder),
        ):
            yield
    finally:
        for module, before, after, training in states:
            module._forward_pre_hooks, module._forward_hooks, module.training = before, after, training


def read_tokens(
    architecture: Architecture, cache: Cache, tokens: int, mask: Tensor | None = None, rows: int = 1,
    start: int | None = None,
) -> Tensor:
    """Let the decoder read some ids into a cache, and return its last hidden states (rows, tokens, width).

    If `start` is given, the tokens have the position ids start, start + 1, ...
    """
    device = device_of(architecture.decoder)
    # Not the first ids, which are often padding: some decoders do not count padding in their positions.
    ids = ((37 * torch.arange(tokens, device=device) + 5) % architecture.vocabulary).expand(rows, -1)
    given: dict[str, object] = {cache_name(architecture.decoder): cache}
    if start is not None:
        given["position_ids"] = torch.arange(start, start + tokens, device=device).expand(rows, -1)
    output = architecture.decoder.forward(input_ids=ids, attention_mask=mask, use_cache=True, **given)
    hidden: Tensor = output[0]
    return hidden


def states_agree(found: Tensor, expected: Tensor) -> bool:
    """Whether hidden states differ by no more than rounding; False if one is not finite."""
    bound = _BOUND if expected.dtype in (torch.float32, torch.float64) else _BOUND_HALF
    return float((found - expected).double().norm()) <= bound * float(expected.double().norm())
