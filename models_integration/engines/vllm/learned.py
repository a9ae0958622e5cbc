"""Policies with constants of vLLM's model: output projections, rotary frequencies, and calibrations."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from models_integration.engines.vllm.arguments import RequestPolicy, make
from models_integration.engines.vllm.seams import output_projection, rotary_frequencies
from reference.calibration import Identity
from reference.policies import names
from spec.errors import SpecError
from spec.policy import Policy

__all__ = ["ModelPolicies"]

_FACTOR = 1.0  # attention factor of rotary frequencies that are not scaled: `rotary_frequencies` refuses all others


class ModelPolicies:
    """Policies with the constants of a model, and with scores on the device of the pages.

    Attributes:
        policy: function that returns the policy of a request, and raises `SpecError` if the model does not have a
            constant in a known form.
    """

    def __init__(self, model: Any, layers: Sequence[Any]) -> None:
        self._model, self._layers = model, layers
        self.policy = lru_cache(maxsize=64)(self._make)  # requests often repeat their arguments

    def _make(self, asked: RequestPolicy) -> Policy:
        wanted, learned = names.constants_of_model(asked.name), dict[str, Any]()
        if "W_o" in wanted:
            learned["W_o"] = self._projections
        if "inv_freq" in wanted:
            learned |= {"inv_freq": rotary_frequencies(self._model, self._layers[0]), "factor": _FACTOR}
        if "served" in wanted:
            learned["served"] = self._served(asked)
        if names.BACKEND in names.constants_of(asked.name):
            learned[names.BACKEND] = "torch"
        return make(asked.name, {**learned, **asked.of_server, **asked.constants})

    @cached_property
    def _projections(self) -> Mapping[int, Any]:
        """Output projection of each layer. All policies share the projections, which are large."""
        return {index: output_projection(self._model, layer) for index, layer in enumerate(self._layers)}

    def _served(self, asked: RequestPolicy) -> Identity:
        """Return the identity of the model, for the comparison with a calibration.

        Only rotary frequencies are compared, because vLLM stores the weights in a different order. Therefore kvspec
        cannot detect a calibration for different weights with the same frequencies.
        """
        calibration, layers = asked.constants["calibration"], self._layers
        if tuple(calibration.layers) != tuple(range(len(layers))):
            reason = f"has statistics of the layers {calibration.layers}, and the model has {len(layers)} layers"
            raise SpecError("calibration", calibration.identity.model, reason)
        return Identity(calibration.identity.model, rotary_frequencies(self._model, layers[0]), _FACTOR)
