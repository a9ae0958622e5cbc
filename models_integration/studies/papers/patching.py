"""Activation patching of the paper on cross-session injection: residuals of markers, layer by layer (Table 13)."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.model.architecture import restored_rotation
from models_integration.model.rotation import prefilled
from reference.injection.diagnostics import bands
from reference.injection.wrappers import Wrapped
from spec.errors import SpecError

__all__ = ["PATCHES", "patched_layers", "patched_residuals"]

PATCHES = ("early", "mid", "upper", "all", "random", "noise")
"""The bands of `reference.injection.diagnostics.bands`; as many random layers as `upper` has; `upper` with noise."""
_SEED = 0


def patched_layers(patch: str, depth: int) -> tuple[Collection[int], float]:
    """The layers of a patch, and the standard deviation of its noise over that of the residuals."""
    name = patch if patch in bands(depth) else "upper"
    layers = range(*bands(depth)[name])
    if patch == "random":
        drawn = torch.randperm(depth, generator=torch.Generator().manual_seed(_SEED))
        return set(drawn[: len(layers)].tolist()), 0.0
    return layers, float(patch == "noise")


@contextmanager
def patched_residuals(
    model: PreTrainedModel, wrapped: Wrapped, layers: Collection[int], noise: float,
) -> Iterator[None]:
    """Inside, what each decoder layer reads of the markers is what an unpatched run over the chunk gives it, or zeros.

    Args:
        layers: those that read the residuals of the unpatched run. All others read zeros.
        noise: normal noise on these residuals, in their standard deviations.

    Raises:
        SpecError: for a model whose decoder has no list of layers.
    """
    own, at = _decoder_layers(model), list(wrapped.markers)
    found = dict[int, Tensor]()
    with _hooked(own, lambda index, x: found.__setitem__(index, x[:, at].clone())), restored_rotation(model):
        prefilled(model, wrapped.ids)
    random = torch.Generator().manual_seed(_SEED)

    def write(index: int, x: Tensor) -> None:
        given = found[index] if index in layers else torch.zeros_like(found[index])
        if index in layers and noise:
            given = given + noise * given.std() * torch.randn(given.shape, generator=random).to(given)
        x[:, at] = given

    with _hooked(own, write):
        yield


def _decoder_layers(model: Any) -> nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise SpecError("model", type(model).__name__, "has no list of decoder layers whose residuals can be patched")
    return layers


@contextmanager
def _hooked(layers: nn.ModuleList, act: Any) -> Iterator[None]:
    """Inside, `act` gets the index of each layer and a copy of the hidden states, which the layer then reads."""
    def hook(index: int) -> Any:
        def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = given[0].clone()
            act(index, hidden)
            return (hidden, *given[1:])
        return before

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(hook(index)).remove)
        yield
