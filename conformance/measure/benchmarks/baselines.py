"""What S1 is compared with: good NumPy and eager PyTorch, both float32, both with an (n, n) array a chunk."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["numpy_s1", "torch_s1"]

Floats = NDArray[np.float32]
C, K_INTRA, K_CROSS = 1024, 8, 4
TAU_INTRA, TAU_CROSS = np.float32(0.3), np.float32(0.02)


def _best(weights: Floats, k: int, tau: np.float32) -> tuple[NDArray[np.int64], Floats]:
    """The k largest of each row by partition, sorted; without a rule for ties."""
    k = min(k, weights.shape[1])
    index = np.argpartition(weights, -k, axis=1)[:, -k:]
    value = np.take_along_axis(weights, index, axis=1)
    order = np.argsort(-value, axis=1, kind="stable")
    index, value = np.take_along_axis(index, order, axis=1), np.take_along_axis(value, order, axis=1)
    return np.where(value > tau, index, -1), value


def numpy_s1(q: Floats, k: Floats) -> list[Any]:
    """S1 by chunks of 1024 with BLAS products and partitions; buffers are reused in place."""
    H, n, d = q.shape
    group, found = H // len(k), []
    for c in range(0, n, C):
        stop = min(n, c + C)
        rows = q[:, c:stop].reshape(len(k), group * (stop - c), d) * np.float32(d**-0.5)
        S = np.matmul(rows, k[:, :stop].transpose(0, 2, 1)).reshape(H, stop - c, stop)
        S[:, :, c:][:, np.triu(np.ones((stop - c, stop - c), np.bool_), 1)] = -np.inf
        S -= S.max(axis=2, keepdims=True)
        np.exp(S, out=S)
        S /= S.sum(axis=2, keepdims=True)
        salience = np.sort(S[:, :, c:].sum(axis=1), axis=0)[-3:].sum(axis=0).clip(0.1, 20)
        A = S.mean(axis=0)
        own = A[:, c:] / (np.linalg.norm(A[:, c:], axis=1, keepdims=True) + np.float32(1e-8))
        cosine = own @ own.T
        np.fill_diagonal(cosine, -1)
        found.append((salience, _best(cosine, K_INTRA, TAU_INTRA), _best(A[:, :c], K_CROSS, TAU_CROSS) if c else None))
    return found


def torch_s1(q: Any, k: Any) -> list[Any]:
    """The same in eager PyTorch, with topk."""
    import torch

    H, n, d = q.shape
    found = []
    shared = k.repeat_interleave(H // len(k), dim=0)
    for c in range(0, n, C):
        stop = min(n, c + C)
        S = (q[:, c:stop] @ shared[:, :stop].transpose(1, 2)) * d**-0.5
        S[:, :, c:].masked_fill_(torch.ones(stop - c, stop - c, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        S = torch.softmax(S, dim=2)
        salience = S[:, :, c:].sum(dim=1).topk(min(3, H), dim=0).values.sum(dim=0).clamp(0.1, 20)
        A = S.mean(dim=0)
        own = A[:, c:] / (A[:, c:].norm(dim=1, keepdim=True) + 1e-8)
        cosine = (own @ own.T).fill_diagonal_(-1)
        intra = cosine.topk(min(K_INTRA, stop - c), dim=1)
        cross = A[:, :c].topk(min(K_CROSS, c), dim=1) if c else None
        found.append((salience, intra, cross))
    return found
