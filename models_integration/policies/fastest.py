"""Choice of `backend="auto"`: the first backend that can run on this machine and has the needed stages."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from warnings import warn

import numpy as np
import torch

from reference.backend import BACKEND as REFERENCE
from spec.backend import Backend, resolve
from spec.errors import BackendUnavailable
from spec.parameters import NESTEDKV, PAPER

__all__ = ["fastest", "stage_that_differs"]

ON_DEVICE = ("torch", "triton")
"""Order of the backends on a device. For CrystalCache triton is first: of the triton kernels, only S1 beat torch."""
ON_HOST = ("numba", "numpy")
CLOSE = 1e-3


def fastest(*families: str) -> Backend:
    """Return the first backend with the given stage families. With an accelerator, try torch and triton first.

    triton is used only if the kernels of triton agree with the reference on small inputs. kvspec compares the kernels
    once per process. If a kernel differs from the reference, a warning names the kernel.

    Raises:
        BackendUnavailable: if no backend has the stage families and can run on this machine.
    """
    on_device = sorted(ON_DEVICE, reverse="crystal" in families) if torch.accelerator.is_available() else ()
    order = (*on_device, *ON_HOST)
    for name in order:
        try:
            found = resolve(name)
        except BackendUnavailable:
            continue
        if all(getattr(found, family) is not None for family in families) and (name != "triton" or _trusted(found)):
            return found
    raise BackendUnavailable(f"none of the backends {', '.join(order)} can run on this machine")


@cache
def _trusted(found: Backend) -> bool:
    stage = stage_that_differs(found)
    if stage is not None:
        reason = f"the kernel {stage!r} differs from the reference on this device, so backend='auto' skips the backend"
        warn(f"backend {found.name!r}: {reason}", stacklevel=4)
    return stage is None


def stage_that_differs(found: Backend) -> str | None:
    """Return the first stage that fails or differs from the reference on a small input. If all agree, return None."""
    for stage, run in _RUNS.items():
        if getattr(found, stage.partition(".")[0]) is None:
            continue
        try:
            own = run(found)
        except Exception:
            return stage
        if not np.allclose(own, run(REFERENCE), rtol=CLOSE, atol=CLOSE, equal_nan=True):
            return stage
    return None


def _inputs() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((heads, 96, 16)).astype(np.float32) for heads in (4, 2))


def _coattention(found: Backend) -> Any:
    q, k = _inputs()
    seen = found.require_crystal().coattention(q, k, np.arange(96), PAPER, 0.25, None)
    return np.concatenate([seen.salience, seen.intra_weight.ravel(), seen.cross_weight.ravel()])


_RUNS: Mapping[str, Callable[[Backend], Any]] = {
    "crystal.coattention": _coattention,
    "nestedkv.anomaly_score": lambda found: found.require_nestedkv().anomaly_score(_inputs()[1], NESTEDKV),
    "breath.inverse_key_norms": lambda found: found.require_breath().inverse_key_norms(_inputs()[1]),
}
