"""The backend `torch`: what policies ask of attention, and their scores, on any device that torch has."""

from collections.abc import Callable, Mapping
from typing import Any

from accelerated.torch_device.attention import expected_attention, largest_attention, received_attention
from accelerated.torch_device.device import takes
from accelerated.torch_device.nestedkv import anomaly_score, nestedkv_score
from accelerated.torch_device.scores import SCORES, SCORES_OF_LAYERS
from accelerated.torch_device.selection import adaptive_shares, best_tokens, competition_shares, kept_tokens
from spec.backend import Backend

__all__ = ["BACKEND"]


class _PolicyStages:
    """Attention where keys lie; the choice of tokens where the scores do, on the host."""

    received_attention = staticmethod(received_attention)
    largest_attention = staticmethod(largest_attention)
    expected_attention = staticmethod(expected_attention)
    best_tokens = staticmethod(best_tokens)


class _NestedKVStages:
    """NestedKV's score where the keys lie."""

    anomaly_score = staticmethod(anomaly_score)


TENSORS: Mapping[str, Callable[..., Any]] = {
    **SCORES_OF_LAYERS, "nestedkv_score": nestedkv_score, "top_units": kept_tokens, "Adaptive": adaptive_shares,
    "Competition": competition_shares,
}
BACKEND = Backend(
    "torch", policies=_PolicyStages(), nestedkv=_NestedKVStages(), takes=takes, scores=SCORES, tensors=TENSORS
)
