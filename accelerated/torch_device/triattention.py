"""Score of TriAttention on the device of the keys. The function has the arguments of the function in the reference."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from accelerated.torch_device.device import on_device, upload
from spec.arrays import Matrix, Vector
from spec.policy import DeviceArray

__all__ = ["largest_z_scores"]

OFFSETS = 2 ** np.arange(17)
LEAST_DEVIATION = 1e-6


def largest_z_scores(
    k: DeviceArray, t: int, mean: Matrix, magnitude: Matrix, inv_freq: Vector, factor: float, pinned: int,
) -> Tensor:
    """Return each key's largest z-score over the query heads. Float64 is necessary, because a deviation can be small.

    Implements: TA-SCORE, TA-RANKING
    """
    half, keys = len(inv_freq), on_device(k).double()
    turn = np.exp(1j * inv_freq * t) * np.exp(1j * inv_freq * OFFSETS[:, None]).mean(axis=0)
    centre = mean[:, :half] + 1j * mean[:, half:]
    turned, rest = factor * turn * centre, factor * (magnitude - np.abs(centre))
    vectors = upload(np.concatenate([turned.real, turned.imag, rest], axis=1), np.float64, keys.device)
    parts = torch.cat([keys, torch.hypot(keys[:, :, :half], keys[:, :, half:])], dim=2)[:, pinned:]
    score = torch.matmul(vectors.view(len(keys), -1, vectors.shape[1]), parts.mT)
    score = score - score.mean(dim=2, keepdim=True)
    deviation = (score * score).mean(dim=2, keepdim=True).sqrt().clamp(min=LEAST_DEVIATION)
    return pad((score / deviation).amax(dim=1), (keys.shape[1] - parts.shape[1], 0), value=torch.nan)
