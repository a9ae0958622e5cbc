"""The backend `torch`: CrystalCache's stages of a prompt, attention stages and scores of policies, in PyTorch.

Sessions use the host's stages of `DECODING` for decoding and set-conditioned selection, because these read host data.
"""

from collections.abc import Callable, Mapping
from typing import Any

from accelerated.torch_device.attention import expected_attention, largest_attention, received_attention
from accelerated.torch_device.breath import BreathStages
from accelerated.torch_device.coattention import coattention, inverse_key_norms, inverse_norms
from accelerated.torch_device.crystal import CrystalStages
from accelerated.torch_device.device import accepts_tensor
from accelerated.torch_device.diversity import DiversityStages
from accelerated.torch_device.nestedkv import anomaly_score, nestedkv_score
from accelerated.torch_device.prefill import prefill
from accelerated.torch_device.scores import SCORES, SCORES_OF_LAYERS
from accelerated.torch_device.selection import (
    adaptive_shares,
    best_tokens,
    competition_shares,
    filled_chunks,
    kept_blocks,
    kept_representatives,
    kept_tokens,
)
from spec.backend import Backend, resolve
from spec.errors import BackendUnavailable
from spec.stage_inputs import checked_stages

__all__ = ["BACKEND", "with_stages"]


def _host() -> Backend:
    """Return the Numba backend, or the reference if Numba is not installed."""
    try:
        return resolve("numba")
    except BackendUnavailable:
        return resolve("numpy")


HOST = _host()


class _Stages:
    """Namespace that holds stages as attributes."""

    def __init__(self, stages: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update(stages)


def with_stages(family: object, **stages: Callable[..., Any]) -> Any:
    """Return a stage family with some stages replaced by stages of the device."""
    return _Stages({name: getattr(family, name) for name in dir(family) if not name.startswith("_")} | stages)


@checked_stages("policies")
class _PolicyStages:
    """Stages for published policies: attention on the device of the keys, and selection of tokens on the host."""

    received_attention = staticmethod(received_attention)
    largest_attention = staticmethod(largest_attention)
    expected_attention = staticmethod(expected_attention)
    best_tokens = staticmethod(best_tokens)


class _NestedKVStages:
    """NestedKV's score, computed on the device of the keys."""

    anomaly_score = staticmethod(anomaly_score)


TENSORS: Mapping[str, Callable[..., Any]] = {
    **SCORES_OF_LAYERS, "nestedkv_score": nestedkv_score, "inverse_key_norms": inverse_norms,
    "top_units": kept_tokens, "fill_units": filled_chunks, "best_blocks": kept_blocks,
    "representatives": kept_representatives, "Adaptive": adaptive_shares, "Competition": competition_shares,
}
DECODING = Backend(
    "torch", crystal=with_stages(HOST.require_crystal(), coattention=coattention),
    breath=with_stages(HOST.require_breath(), inverse_key_norms=inverse_key_norms), diversity=HOST.diversity,
    accepts_tensor=accepts_tensor,
)
BACKEND = Backend(
    "torch", crystal=with_stages(CrystalStages(), coattention=coattention), prefill=prefill, breath=BreathStages(),
    decoding=DECODING, diversity=DiversityStages(), policies=_PolicyStages(), nestedkv=_NestedKVStages(),
    accepts_tensor=accepts_tensor, scores=SCORES, tensors=TENSORS,
)
