"""Forward passes over a few test tokens that leave the model unchanged."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from models_integration.model.architecture import Architecture, device_of, restored_rotation
from models_integration.model.cache_argument import cache_name
from spec.errors import SpecError

__all__ = ["FORWARD_ERRORS", "isolated_forward", "read_tokens", "states_agree", "trial_forward"]

# A wrong state or position causes errors of at least 0.1. Rounding causes less than 1e-5 (float32), 1e-2 (bfloat16).
_BOUND, _BOUND_HALF = 1e-3, 6e-2

# Exceptions of a modelling file that does not support the inputs.
FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


@contextmanager
def isolated_forward(architecture: Architecture) -> Iterator[None]:
    """Context manager without hooks and dropout. Afterwards torch's random state and RoPE are restored."""
    modules = list(architecture.decoder.modules())
    states = [(module, module._forward_pre_hooks, module._forward_hooks, module.training) for module in modules]
    used = {device_of(architecture.decoder), *(one.device for one in architecture.decoder.parameters())}
    devices = {device for device in used if device.type == "cuda"}
    for module in modules:
        # Only the caller of `register_forward_hook` has the handle that removes the hook (torch 2.13). `eval()` would
        # also change submodules, so that each module's mode could not be restored.
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


@contextmanager
def trial_forward(architecture: Architecture, reads: str) -> Iterator[None]:
    """Context manager `isolated_forward` that turns errors of the model, except out-of-memory errors, into `SpecError`.

    Raises:
        SpecError: if the model cannot process the inputs that `reads` names.
    """
    try:
        with isolated_forward(architecture):
            yield
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        raise SpecError("model", architecture.name, f"cannot process {reads}: {error}") from error


def read_tokens(
    architecture: Architecture, cache: Cache, tokens: int, mask: Tensor | None = None, rows: int = 1,
    start: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Process some ids with the decoder and a cache, and return the last hidden states (rows, tokens, width).

    If `start` is given, the tokens have the position ids start, start + 1, ... A model without weights needs a device.
    """
    device = device or device_of(architecture.decoder)
    # The first ids of a vocabulary are often padding, which some decoders exclude from positions.
    ids = ((37 * torch.arange(tokens, device=device) + 5) % architecture.vocabulary).expand(rows, -1)
    given: dict[str, object] = {cache_name(architecture.decoder): cache}
    if start is not None:
        given["position_ids"] = torch.arange(start, start + tokens, device=device).expand(rows, -1)
    output = architecture.decoder.forward(input_ids=ids, attention_mask=mask, use_cache=True, **given)
    hidden: Tensor = output[0]
    return hidden


def states_agree(hidden: Tensor, expected: Tensor) -> bool:
    """Return True if hidden states differ only by rounding. The result is False if a value is not finite."""
    bound = _BOUND if expected.dtype in (torch.float32, torch.float64) else _BOUND_HALF
    return float((hidden - expected).double().norm()) <= bound * float(expected.double().norm())
