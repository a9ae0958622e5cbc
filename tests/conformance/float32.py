"""Replacement for a fast backend: S1 in float32, S2 to S6 of the reference, and wrong versions of it.

The whole suite runs on it: `--backend tests.conformance.float32:BACKEND`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from conformance.oracles import s1
from conformance.strategies.trunks import record
from reference.backend import BACKEND as REFERENCE
from spec.arrays import IntVector
from spec.backend import Backend
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention
from spec.validate import check_attention_inputs, check_lse, check_sinks

Array: TypeAlias = np.ndarray[Any, Any]
Distortion: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]


def _block(
    q: Array, k: Array, first: int, rows: slice, scaling: float, softcap: float | None, sinks: Array | None,
) -> Array:
    """Return the attention of the queries `rows` in float32. The sums over channels run in reverse order."""
    shared = np.repeat(k, len(q) // len(k), axis=0)[:, : first + rows.stop]
    x = np.einsum("hqd,hkd->hqk", q[:, rows, ::-1], shared[:, :, ::-1]) * np.float32(scaling)
    if softcap is not None:
        x = np.float32(softcap) * np.tanh(x / np.float32(softcap))
    later = np.arange(first + rows.stop) > first + np.arange(rows.start, rows.stop)[:, None]
    top = np.where(later, -np.inf, x).max(2, keepdims=True)
    powers = np.exp(np.where(later, np.float32(-np.inf), x - top))
    beside = 0.0 if sinks is None else np.exp(sinks[:, None, None] - top).astype(np.float32)
    A: Array = powers.astype(np.float32) / (powers.sum(2, keepdims=True, dtype=np.float32) + beside)
    return A


@dataclass(frozen=True)
class _Float32Stages(type(REFERENCE.require_crystal())):  # type: ignore[misc]  # whose later stages it has
    distort: Distortion

    def coattention(
        self, q: Array, k: Array, positions: IntVector, p: CrystalCacheParameters, scaling: float,
        softcap: float | None, lse: Array | None = None, sinks: Array | None = None, /,
    ) -> CoAttention:
        check_attention_inputs(q, k)
        check_lse(lse, q)
        check_sinks(sinks, q)
        q, k = self.distort(q.astype(np.float32), k.astype(np.float32))
        n, before = q.shape[1], k.shape[1] - q.shape[1]
        S: list[float] = []
        intra, cross = [], []
        for c in range(0, n, p.C):
            rows = slice(c, min(c + p.C, n))
            A = _block(q, k, before, rows, scaling, softcap, sinks)
            segment = A[:, :, before + c :]
            top = np.sort(segment[:, ::-1].sum(1, dtype=np.float32), axis=0)[::-1][: p.k_heads]
            S += np.clip(top.sum(0, dtype=np.float32), p.M_min, p.M_max).tolist()
            mean = A.mean(0, dtype=np.float32)
            unit = mean[:, before + c :]
            unit = unit / (np.sqrt((unit * unit).sum(1, keepdims=True)) + np.float32(p.epsilon))
            cosine = (unit @ unit.T).tolist()
            near, far = positions[before + c :].tolist(), positions[: before + c].tolist()
            for i, row in enumerate(cosine):
                alike = {near[j]: w for j, w in enumerate(row) if j != i}
                intra.append(s1.strongest(alike, p.k_intra, p.tau_intra))
                cross.append(s1.strongest(dict(zip(far, mean[i].tolist(), strict=False)), p.k_cross, p.tau_cross))
        return record(S, intra, cross, p.k_intra, p.k_cross, int(positions[before]))


def float32_backend(distort: Distortion = lambda q, k: (q, k)) -> Backend:
    """Return the float32 backend. `distort` changes its inputs."""
    return Backend("float32", crystal=_Float32Stages(distort))


BACKEND = float32_backend()


def _bfloat16(x: Array) -> Array:
    cut: Array = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut


WRONG: dict[str, Distortion] = {
    "a dropped channel": lambda q, k: (q[:, :, :-1], k[:, :, :-1]),
    "keys cut to bfloat16": lambda q, k: (q, _bfloat16(k)),
    "a stray absolute value": lambda q, k: (q, np.abs(k)),
}
