"""Constants that policies read from vLLM's model: output projections, rotary frequencies, and what was calibrated."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from models_integration.engines.vllm.arguments import RequestPolicy
from models_integration.engines.vllm.seams import output_projection, rotary_frequencies
from reference.calibration import Identity
from reference.policies import names
from spec.errors import SpecError

__all__ = ["learned"]

_FACTOR = 1.0
"""Attention factor of rotary frequencies that are not scaled. `rotary_frequencies` refuses all others."""


def learned(model: Any, layers: Sequence[Any], asked: RequestPolicy) -> Mapping[str, Any]:
    """Return the constants of the model that the policy of a request needs.

    A calibration is compared with the rotary frequencies of the model alone, because vLLM stores the weights in an
    order of its own. So vLLM cannot tell a calibration of other weights with the same frequencies.

    Args:
        model: vLLM's model.
        layers: attention modules of the model, in the order of the layers.
        asked: policy of the request.

    Raises:
        SpecError: if the model does not have a constant in a known form.
    """
    make: Mapping[str, Callable[[], Any]] = {
        "W_o": lambda: {index: output_projection(model, layer) for index, layer in enumerate(layers)},
        "inv_freq": lambda: rotary_frequencies(model, layers[0]),
        "factor": lambda: _FACTOR,
        "served": lambda: _served(model, layers, asked),
    }
    return {name: make[name]() for name in names.constants_of_model(asked.name)}


def _served(model: Any, layers: Sequence[Any], asked: RequestPolicy) -> Identity:
    calibration = asked.constants["calibration"]
    if tuple(calibration.layers) != tuple(range(len(layers))):
        reason = f"has statistics of the layers {calibration.layers}, and the model has {len(layers)} layers"
        raise SpecError("calibration", calibration.identity.model, reason)
    return Identity(calibration.identity.model, rotary_frequencies(model, layers[0]), _FACTOR)
