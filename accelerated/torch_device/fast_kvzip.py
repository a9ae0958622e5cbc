"""Score of Fast KVzip on the device of the hidden states, with the names and arguments of the reference."""

import math

from torch import Tensor
from torch.nn.functional import rms_norm

from accelerated.torch_device.device import on_device, upload
from accelerated.torch_device.kvzap import width_of
from spec.arrays import Cube, Matrix, Vector
from spec.policy import DeviceArray

__all__ = ["gate_score"]

EPSILON = 1e-6


def gate_score(
    hidden: DeviceArray, W_q: Cube, b_q: Matrix, W_k: Cube, norm_q: Vector, norm_k: Vector, base: Cube, bias: Vector,
) -> Tensor:
    """Implements: PO-FAST-KVZIP"""
    x, (H_kv, r) = on_device(hidden), W_k.shape[:2]
    to_q, shift, to_k, of_q, of_k, keys, biases = (
        upload(one, width_of(x), x.device) for one in (W_q, b_q, W_k, norm_q, norm_k, base, bias)
    )
    q = rms_norm(x @ to_q.mT + shift[:, None], (r,), of_q, EPSILON).reshape(H_kv, -1, len(x), r)
    k = rms_norm(x @ to_k.mT, (r,), of_k, EPSILON)
    logits = (q * k[:, None]).sum(dim=3) / math.sqrt(r) + biases.reshape(H_kv, -1, 1)
    others = q @ keys.mT[:, None] / math.sqrt(r)
    scores: Tensor = (1 / (1 + (others - logits[..., None]).exp().sum(dim=3))).mean(dim=1)
    return scores
