"""Engines: a frozen record of optional stage families, found by name, by `module:ATTRIBUTE`, or given as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from spec.arrays import BoolVector, IntVector, Vector
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks

__all__ = ["BUILT_IN", "ENTRY_POINTS", "Backend", "CrystalStages", "resolve"]

BUILT_IN = {
    "numpy": "reference.backend:BACKEND",
    "numba": "accelerated.numba_cpu.backend:BACKEND",
    "triton": "accelerated.triton_gpu.backend:BACKEND",
}
ENTRY_POINTS = "kvspec.backends"
FAMILIES = ("crystal",)


@runtime_checkable
class CrystalStages(Protocol):
    """S1 to S6 of CrystalCache. Arrays in, records out; nothing is changed in place."""

    def coattention(
        self, q: DeviceArray, k: DeviceArray, positions: IntVector, parameters: CrystalCacheParameters,
        scaling: float, softcap: float | None, lse: DeviceArray | None = None, /,
    ) -> CoAttention:
        """S1. q (H, n, d) are the last n of the tokens whose keys are k (H_kv, live, d) at `positions` (live,).

        lse (H, n): the natural logarithm of the sum of exp(logit) over the keys that a query sees, the query's own
        included and no other; logits scaled and soft-capped. It saves work and changes nothing: a backend may compute
        it again instead. The caller answers for it. An lse that belongs to other q, k, scaling, softcap or
        visibility scales every weight of a row by one wrong factor, which no check can tell from a right one.

        Raises:
            SpecError: for q, k or lse of a wrong shape, type or value.
        """
        ...

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        """S3: M_i (n,)."""
        ...

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        """S2; `ends` (n,) marks the tokens that end a sentence."""
        ...

    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        """S4."""
        ...

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        """S5 per trunk (m,); NaN where protected."""
        ...

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        """S6; `impact` is per token, `protected` per trunk, `budget` is B of Eq. 30."""
        ...


@dataclass(frozen=True)
class Backend:
    """An engine and the stage families that it has."""

    name: str
    crystal: CrystalStages | None = None
    takes: Callable[[DeviceArray], bool] | None = None
    """Whether its device stages read this tensor where it is; None means that they read NumPy arrays only."""

    def require_crystal(self) -> CrystalStages:
        """The CrystalCache stages.

        Raises:
            BackendUnavailable: when this backend has none; the message names the families that it has.
        """
        if self.crystal is None:
            has = [family for family in FAMILIES if getattr(self, family) is not None]
            raise BackendUnavailable(f"backend {self.name!r} has no stage family 'crystal'; it has: {has or 'none'}")
        return self.crystal


def resolve(backend: str | Backend) -> Backend:
    """Find a backend: an instance, a built-in name, `module:ATTRIBUTE`, or a name under `kvspec.backends`.

    Raises:
        SpecError: when `backend` is neither text nor a Backend, or no such name is known.
        BackendUnavailable: when the module cannot be imported here; the message says why.
    """
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise SpecError("backend", backend, "must be a name, 'module:ATTRIBUTE' or a spec.backend.Backend")
    if backend in BUILT_IN:
        return _load(backend, BUILT_IN[backend])
    if ":" in backend:
        return _load(backend, backend)
    plugins = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    if backend in plugins:
        return _load(backend, plugins[backend])
    known = ", ".join([*BUILT_IN, *sorted(plugins)])
    raise SpecError("backend", backend, f"unknown; known here: {known}, or any 'module:ATTRIBUTE'")


def _load(name: str, target: str) -> Backend:
    module, _, attribute = target.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(f"backend {name!r} ({target}) cannot be loaded here: {error}") from error
    if not isinstance(found, Backend):
        raise SpecError("backend", name, f"{target} is a {type(found).__name__}, not a spec.backend.Backend")
    return found
