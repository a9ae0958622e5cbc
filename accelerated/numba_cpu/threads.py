"""Thread pool for matrix products. Inside a thread of the pool, BLAS does not start more threads."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from spec.errors import BackendUnavailable

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:  # S2 to S6, which the Triton backend imports from this package, do not need threadpoolctl
    ThreadpoolController = None

__all__ = ["plain", "threads"]

BLAS = ThreadpoolController and ThreadpoolController()


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Context manager that returns a thread pool with one thread per core.

    Raises:
        BackendUnavailable: if threadpoolctl, which limits BLAS to one thread, is not installed.
    """
    if BLAS is None:
        raise BackendUnavailable("this stage of backend 'numba' needs threadpoolctl: pip install 'kvspec[numba]'")
    with BLAS.limit(limits=1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        yield pool


def plain(x: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return rows (keys, d) for BLAS: a view if x is float32 with contiguous channels, otherwise a copy."""
    fits = x.dtype == np.float32 and x.strides[1] == x.itemsize and x.strides[0] >= x.shape[1] * x.itemsize
    return x if fits else np.ascontiguousarray(x, dtype=np.float32)
