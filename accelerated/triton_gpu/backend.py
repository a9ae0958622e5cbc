"""The backend `triton`."""

from accelerated.numba_cpu.backend import BACKEND as NUMBA
from accelerated.torch_device.backend import BACKEND as TORCH
from accelerated.torch_device.backend import with_host
from accelerated.triton_gpu.activation import inverse_key_norms
from accelerated.triton_gpu.coattention import coattention
from accelerated.triton_gpu.device import require_device, takes
from accelerated.triton_gpu.nestedkv import anomaly_score
from spec.backend import Backend

__all__ = ["BACKEND"]

require_device()


class _NestedKVOnDevice:
    """NestedKV's score, computed fully on the device."""

    anomaly_score = staticmethod(anomaly_score)


# S2 to S6 and decode are on the host: their data is small and their scans are sequential. Kernels of S2 to S6 were not
# faster than the host on an H100 and an H200 (docs/results/gpu.md), so there are none.
# Set-conditioned selection is on the host: each pick depends on all before it, so that a device would wait for a launch
# and a reduction over all tokens k times, where lazy greedy looks at a few tokens a pick. What it reads is the
# signatures, one vector a token for the whole cache, and scorers give their scores on the host anyway.
BACKEND = Backend(
    "triton", crystal=with_host(NUMBA.require_crystal(), coattention=coattention),
    breath=with_host(NUMBA.require_breath(), inverse_key_norms=inverse_key_norms), diversity=NUMBA.diversity,
    nestedkv=_NestedKVOnDevice(), policies=TORCH.policies, takes=takes, scores=TORCH.scores,
)
