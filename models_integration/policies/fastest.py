"""`backend="auto"`: the first backend that can run here and has the stages, on a device after a check."""

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
"""torch first, but for CrystalCache: of our kernels, S1's is the one that was measured to be faster than torch."""
ON_HOST = ("numba", "numpy")
CLOSE = 1e-3


def fastest(*families: str) -> Backend:
    """The first backend with these stage families; with an accelerator, one that computes there.

    Kernels run only where a small input gave what the reference gives, once a process; a warning names one that did
    not.

    Raises:
        BackendUnavailable: if there is none.
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
    """The first stage of attention inputs that fails or differs from the reference on a small input, or None."""
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
