"""Thread pool for matrix products. Inside a thread of the pool, BLAS does not start more threads."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

__all__ = ["plain", "threads"]

BLAS = ThreadpoolController()


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Context manager that returns a thread pool with one thread per core."""
    with BLAS.limit(limits=1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        yield pool


def plain(x: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return rows (keys, d) for BLAS: a view if x is float32 with contiguous channels, otherwise a copy."""
    fits = x.dtype == np.float32 and x.strides[1] == x.itemsize and x.strides[0] >= x.shape[1] * x.itemsize
    return x if fits else np.ascontiguousarray(x, dtype=np.float32)
