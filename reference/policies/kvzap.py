"""KVzap: a small network per layer computes the scores of tokens from hidden states, instead of KVzip's repetition."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.calibration import Calibration, Gates, Identity, Networks
from reference.policies.attention import wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import stacked
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Float64, Matrix, Vector
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["LearnedScorer", "kvzap", "kvzap_score"]

_erf = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has no error function


def gelu(x: Float64[Matrix, "n m"]) -> Float64[Matrix, "n m"]:
    """Return x Phi(x), with the distribution function Phi of the normal distribution.

    Implements: PO-KVZAP
    """
    Phi: Matrix = 0.5 * (1 + _erf(x / math.sqrt(2)))
    return x * Phi


def kvzap_score(
    hidden: DeviceArray, W_2: Float64[Matrix, "H_kv m"], b_2: Float64[Vector, " H_kv"],
    W_1: Float64[Matrix, "m width"] | None = None, b_1: Float64[Vector, " m"] | None = None,
) -> Float64[Matrix, "H_kv n"]:
    """Return the score of each token of a layer for each KV head, from the hidden states (n, width) of the layer.

    Implements: PO-KVZAP

    Source: KVzapModel in kvpress. The paper KVzap describes the network.
    """
    x = wide(hidden[None])[0]
    if W_1 is not None and b_1 is not None:
        x = gelu(x @ W_1.T + b_1)
    scores: Matrix = W_2 @ x.T + b_2[:, None]
    return scores


@dataclass(frozen=True)
class LearnedScorer:
    """Scorer that computes the scores of a layer from hidden states. `layers` has the layer of each network."""

    networks: Networks | Gates
    layers: tuple[int, ...]
    needs: Needs = Needs("all", query_rows=0, hidden=True)
    score: Callable[..., DeviceArray] = kvzap_score
    separable: ClassVar[bool] = False
    layerwise: ClassVar[bool] = True
    provided: ClassVar[Provided] = Provided(
        no_steps="uses hidden states, which the cache does not store: leave the cadence out"
    )

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        return stacked(observation, [self.score_layer(at, view.hidden) for at, view in observation.layers.items()])

    def score_layer(self, layer: int, hidden: DeviceArray | None) -> DeviceArray:
        """Return the scores (H_kv, n) of the tokens of a layer.

        Implements: PO-KVZAP, PO-FAST-KVZIP

        Raises:
            SpecError: if the hidden states are missing, or if they or the layer do not belong to the calibrated model.
        """
        if hidden is None:
            raise SpecError("hidden", None, "is needed, because the scores use hidden states: observe a first prompt")
        if layer not in self.layers or hidden.shape[1] != self.networks.width:
            known = f"{self.networks.width} channels, layers {self.layers}"
            reason = f"does not fit layer {layer} of a model with {hidden.shape[1]} channels: use a file for this model"
            raise SpecError("calibration", known, reason)
        at = self.layers.index(layer)
        return self.score(hidden, **{name: x[at] for name, x in self.networks.arrays.items()})


@named(
    "kvzap", "Jegou and Jeblick, KVzap (arXiv 2601.07891)",
    "tokens with the best scores of a small network, which reads hidden states and predicts KVzip+ scores",
    model_constants=frozenset({"served"}),
)
def kvzap(calibration: Calibration, served: Identity) -> Policy:
    """Return KVzap as in kvpress's KVzapPress: each KV head keeps the tokens with the best scores.

    The paper keeps the last 128 tokens and the tokens with scores above a threshold: `kvzap/threshold=-4.0/recent=128`.
    The network of a published file is a linear map, or two linear maps with GELU in between. kvpress computes it in the
    dtype of the model. kvspec uses float64, or float32 on a device. KVzap in kvpress also evicts from generated tokens.
    In kvspec the policy evicts from the first prompt.

    Implements: PO-KVZAP

    Raises:
        SpecError: if the calibration is for a different model, or has no networks.
    """
    calibration.check(served)
    if calibration.networks is None:
        reason = "has no networks: pass the path of KVzap's model.safetensors as calibration"
        raise SpecError("calibration", calibration.digest, reason)
    scorer = LearnedScorer(calibration.networks, calibration.layers)
    return Policy("kvzap", scorer, even, top_units, SinkAndRecent(0, 0), granularity=Granularity.HEAD)
