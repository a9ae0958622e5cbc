"""Choice of `backend="auto"`: the backend that a committed measurement found fastest for a policy and a device type."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any
from warnings import warn

import numpy as np
import torch

from reference.backend import BACKEND as REFERENCE
from reference.crystalcache import prefill
from reference.policies.names import DIVERSE, NAMES, families_of, home_of
from spec.backend import Backend, resolve
from spec.errors import BackendUnavailable
from spec.parameters import NESTEDKV, PAPER, TINY

__all__ = ["MEASURED", "default_device_type", "fastest", "stage_that_differs"]

MEASURED = "fastest.json"
"""File of this package: processor time that each policy adds to a prompt, by device type, policy and backend."""
COMPILED, TENSORS, KERNELS = "numba", "torch", "triton"
CLOSE = 1e-3


def default_device_type() -> str:
    """Return the type of the device that PyTorch uses by default: "cpu" if there is no accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def fastest(name: str, device: str, *families: str) -> Backend:
    """Return the fastest backend for a policy on a device type, such as "cpu" or "cuda".

    Of the backends that can run here, the backend with the least measured time is used. If the measurement has no row
    for the policy, Numba is used on a CPU if it has code for the scores of the policy. Otherwise torch is used. NumPy
    is used if neither Numba nor torch has the stages, and for your own policies on a CPU.

    The backend triton is used only if its stages agree with the reference on small inputs. On a GPU, the same is true
    of torch for CrystalCache. kvspec compares the stages once per process. If a stage differs from the reference, a
    warning names the stage.

    Args:
        name: name of the policy. A variant `diverse-NAME` has the row of NAME.
        device: device type of the model. A model on "meta" has no values, and its policies run on the CPU.
        families: stage families that the backend must have, in addition to the families of the policy.

    Raises:
        BackendUnavailable: if no backend has the stage families and can run on this machine.
    """
    needed = {*families_of(name), *families}
    for backend in _order(name, "cpu" if device == "meta" else device):
        try:
            engine = resolve(backend)
        except BackendUnavailable:
            continue
        # On a GPU, triton shares CrystalCache's stages after S1 with torch.
        checked = backend == KERNELS or (backend == TENSORS and device not in ("cpu", "meta") and "crystal" in needed)
        if all(getattr(engine, family) is not None for family in needed) and (not checked or _trusted(engine)):
            return engine
    raise BackendUnavailable(f"no backend with the stages of {name} can run on this machine")


def _order(name: str, device: str) -> list[str]:
    """Return the names of all backends that may run a policy on a device type, fastest first."""
    compiled, name = bool(set(families_of(name)) - {"diversity"}), home_of(name)
    if device != "cpu":
        usual = [TENSORS, COMPILED, REFERENCE.name]
    elif name not in NAMES:
        usual = [REFERENCE.name]
    else:
        usual = [COMPILED, TENSORS, REFERENCE.name] if compiled else [TENSORS, REFERENCE.name]
    row = _measured()[device].get(name.removeprefix(DIVERSE), {}) if device in _measured() else {}
    return sorted({*usual, *row}, key=lambda one: (row.get(one, float("inf")), [*usual, one].index(one)))


@cache
def _measured() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Return the added time of policies, by device type, policy and backend."""
    table: dict[str, Any] = json.loads(files(__package__).joinpath(MEASURED).read_text())
    return {device: part["added"] for device, part in table.items()}


@cache
def _trusted(engine: Backend) -> bool:
    stage = stage_that_differs(engine)
    if stage is not None:
        reason = f"the stage {stage!r} differs from the reference on this device, so backend='auto' skips the backend"
        warn(f"backend {engine.name!r}: {reason}", stacklevel=4)
    return stage is None


def stage_that_differs(engine: Backend) -> str | None:
    """Return the first stage that fails or differs from the reference on a small input. If all agree, return None."""
    for stage, run in _RUNS.items():
        if getattr(engine, stage.partition(".")[0]) is None:
            continue
        try:
            values = run(engine)
        except Exception:
            return stage
        if not np.allclose(values, run(REFERENCE), rtol=CLOSE, atol=CLOSE, equal_nan=True):
            return stage
    return None


def _inputs() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((heads, 96, 16)).astype(np.float32) for heads in (4, 2))


def _coattention(engine: Backend) -> Any:
    q, k = _inputs()
    seen = engine.require_crystal().coattention(q, k, np.arange(96), PAPER, 0.25, None)
    return np.concatenate([seen.salience, seen.intra_weight.ravel(), seen.cross_weight.ravel()])


def _prefill(engine: Backend) -> Any:
    q, k = _inputs()
    ids = np.random.default_rng(1).integers(0, 40, 96)
    decided = prefill(q, k, ids, frozenset(range(8)), 0.5, TINY, engine)
    D = np.repeat(decided.D, decided.trunks.sizes)
    return np.concatenate([np.isin(np.arange(96), decided.kept), decided.impact, D])


_RUNS: Mapping[str, Callable[[Backend], Any]] = {
    "crystal.coattention": _coattention,
    "prefill": _prefill,
    "nestedkv.anomaly_score": lambda engine: engine.require_nestedkv().anomaly_score(_inputs()[1], NESTEDKV),
    "breath.inverse_key_norms": lambda engine: engine.require_breath().inverse_key_norms(_inputs()[1]),
}
