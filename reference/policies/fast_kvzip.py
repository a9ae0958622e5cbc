"""Fast KVzip: a gate per layer predicts KVzip's scores from hidden states, instead of the repetition of the prompt."""

import math

import numpy as np

from reference.calibration import Calibration, Identity
from reference.policies.attention import wide
from reference.policies.budgets import across_layers
from reference.policies.kvzap import LearnedScorer
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import top_units
from spec.arrays import Cube, Float64, Matrix, Vector
from spec.errors import SpecError
from spec.policy import DeviceArray, Policy
from spec.retention import Granularity

__all__ = ["fast_kvzip", "gate_score", "root_mean_square_norm"]

EPSILON = 1e-6


def root_mean_square_norm(x: Float64[Cube, "H n r"], weight: Float64[Vector, " r"]) -> Float64[Cube, "H n r"]:
    """Return each vector divided by the root of its mean square, times the weight.

    Implements: PO-FAST-KVZIP
    """
    normed: Cube = x / np.sqrt((x**2).mean(axis=2, keepdims=True) + EPSILON) * weight
    return normed


def gate_score(
    hidden: DeviceArray, W_q: Float64[Cube, "H r width"], b_q: Float64[Matrix, "H r"],
    W_k: Float64[Cube, "H_kv r width"], norm_q: Float64[Vector, " r"], norm_k: Float64[Vector, " r"],
    base: Float64[Cube, "H_kv s r"], bias: Float64[Vector, " H"],
) -> Float64[Matrix, "H_kv n"]:
    """Return the score in [0, 1] of each token of a layer for each KV head, from the hidden states (n, width).

    Implements: PO-FAST-KVZIP

    Source: kvpress, FastKVzipGate.
    """
    x, (H_kv, r) = wide(hidden[None])[0], W_k.shape[:2]
    q = root_mean_square_norm(x @ W_q.swapaxes(1, 2) + b_q[:, None], norm_q)
    k = root_mean_square_norm(x @ W_k.swapaxes(1, 2), norm_k)
    of_head = q.reshape(H_kv, len(q) // H_kv, *q.shape[1:])
    logits = (of_head * k[:, None]).sum(axis=3) / math.sqrt(r) + bias.reshape(H_kv, -1, 1)
    others = of_head @ base.swapaxes(1, 2)[:, None] / math.sqrt(r)
    with np.errstate(over="ignore"):
        scores: Matrix = (1 / (1 + np.exp(others - logits[..., None]).sum(axis=3))).mean(axis=1)
    return scores


@named(
    "fast-kvzip", "Kim et al., Fast KVzip (arXiv 2601.17668)",
    "tokens with the best scores of a gate, which reads hidden states and predicts KVzip's scores; all heads share one"
    " budget",
    model_constants=frozenset({"served"}),
)
def fast_kvzip(calibration: Calibration, served: Identity, N_sink: int = 4, N_recent: int = 32) -> Policy:
    """Return Fast KVzip as in kvpress's FastKVzipPress: the best scores of all layers and KV heads together.

    kvpress keeps the last 2 % of a prompt below 32 000 tokens, and the last 4 096 tokens of a longer prompt. Pass the
    number as `N_recent`. kvpress computes the gates in the dtype of the model. kvspec uses float64, or float32 on a
    device. The published files are pickles, which kvspec does not read; docs/guide/kvpress.md converts a file.

    Implements: PO-FAST-KVZIP

    Raises:
        SpecError: if the calibration is for a different model, or has no gates.
    """
    calibration.check(served)
    if calibration.gates is None:
        reason = "has no gates: pass the path of Fast KVzip's gates.safetensors as calibration"
        raise SpecError("calibration", calibration.digest, reason)
    scorer = LearnedScorer(calibration.gates, calibration.layers, score=gate_score)
    protection = SinkAndRecent(N_sink, N_recent)
    return Policy("fast-kvzip", scorer, across_layers, top_units, protection, granularity=Granularity.HEAD)
