"""The backend `triton`."""

from accelerated.numba_cpu.backend import BACKEND as NUMBA
from accelerated.torch_device.backend import BACKEND as TORCH
from accelerated.torch_device.backend import with_stages
from accelerated.triton_gpu.activation import inverse_key_norms, inverse_norms
from accelerated.triton_gpu.coattention import coattention
from accelerated.triton_gpu.device import accepts_tensor, require_device
from accelerated.triton_gpu.nestedkv import anomaly_score, nestedkv_score
from accelerated.triton_gpu.prefill import prefill
from spec.backend import Backend

__all__ = ["BACKEND"]

require_device()


class _NestedKVOnDevice:
    """NestedKV's score, computed on the device."""

    anomaly_score = staticmethod(anomaly_score)


# S2 to S6 are the stages of the backend torch: sorts, scans and sums of segments, for which PyTorch has kernels.
# So are the stages of decoding and set-conditioned selection. Sessions use those of `DECODING`, on the host: a lazy
# greedy search on the host updates only a few tokens for each selected token, and reads only data of the host.
DECODING = Backend(
    "triton", crystal=with_stages(NUMBA.require_crystal(), coattention=coattention),
    breath=with_stages(NUMBA.require_breath(), inverse_key_norms=inverse_key_norms), diversity=NUMBA.diversity,
    accepts_tensor=accepts_tensor,
)
BACKEND = Backend(
    "triton", crystal=with_stages(TORCH.require_crystal(), coattention=coattention), prefill=prefill,
    breath=with_stages(TORCH.require_breath(), inverse_key_norms=inverse_key_norms), decoding=DECODING,
    diversity=TORCH.diversity, nestedkv=_NestedKVOnDevice(),
    policies=TORCH.policies, accepts_tensor=accepts_tensor, scores=TORCH.scores,
    tensors={**TORCH.tensors, "inverse_key_norms": inverse_norms, "nestedkv_score": nestedkv_score},
)
