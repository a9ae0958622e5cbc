"""Stages S2 to S6 of CrystalCache on the device: each stage for NumPy arrays, and all of them after S1 for tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accelerated.torch_device import impact as s3
from accelerated.torch_device import score as s5
from accelerated.torch_device import trunks as s2
from accelerated.torch_device.device import download_together, on_arrays, upload
from accelerated.torch_device.dissolution import dissolve, ranked_members
from accelerated.torch_device.graph import crystallization, trunk_graph
from accelerated.torch_device.records import DeferredCoAttention, Neighbours
from accelerated.torch_device.sums import token_trunks
from spec.arrays import BoolVector, IntVector, Vector
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, CrystalRetention, Dissolution, TrunkGraph, Trunks
from spec.stage_inputs import checked_stages

__all__ = ["CrystalStages", "Decided", "decide", "retentions_of"]


class Decided(NamedTuple):
    """Results of S2 to S6 as tensors. An array of trunks has one place for each token; unused places are at the end."""

    M: Tensor
    offsets: Tensor
    M_bar: Tensor
    indptr: Tensor
    weights: Tensor
    degree: Tensor
    D: Tensor
    score: Tensor
    ratio: Tensor
    indices: Tensor
    """Columns of the trunk graph, int32."""
    protected: Tensor
    keep: Tensor
    """Mask (n,) of the kept tokens."""


@torch.no_grad()
def decide(
    S1: Neighbours, ids: IntVector, ends: BoolVector, protected: BoolVector, B: int,
    parameters: CrystalCacheParameters,
) -> Decided:
    """Run S3, S2, S4, S5 and S6 on a prompt, and keep B tokens. The host waits for no result.

    A token ends a sentence if it is True in `ends` (n,). The trunk of a token of `protected` (n,) is protected.
    """
    p, n, where = parameters, len(ids), S1.salience.device
    M = s3.impact(S1.salience, s3.token_counts(upload(ids, np.int64, where)), p)
    offsets = s2.trunk_offsets(S1, upload(ends, np.bool_, where), p)
    trunk, sizes = token_trunks(offsets, n), offsets.diff()
    order = ranked_members(M, trunk)
    M_bar = mean_impact(M[order], offsets, p)
    graph = trunk_graph(S1, offsets, p.tau_edge)
    D = crystallization(graph.degree, trunk[-1:] + 1, p)
    pinned = torch.zeros_like(sizes).scatter_add(0, trunk, upload(protected, np.int64, where)) > 0
    scores = s5.score(D, M_bar, pinned | (sizes == 0), p)
    keep, ratio = dissolve(scores, offsets, trunk, order, pinned, B, p)
    return Decided(
        M, offsets, M_bar, graph.indptr, graph.weights, graph.degree, D, scores, ratio, graph.indices.int(), pinned,
        keep,
    )


def mean_impact(descending: Tensor, offsets: Tensor, parameters: CrystalCacheParameters) -> Tensor:
    """Return the impact of each trunk. `parameters.trunk_impact` selects the formula."""
    M_bar = s3.trunk_impact(descending, offsets)
    unit = parameters.trunk_impact == "unit"
    return s3.unit_trunk_impact(M_bar, offsets.diff(), parameters.epsilon) if unit else M_bar


def retentions_of(
    prompts: Sequence[tuple[Neighbours, Decided, Tensor, Tensor, int]],
) -> list[CrystalRetention | None]:
    """Copy the results of all prompts to the host with a single wait. None replaces a result that is not finite.

    A prompt has the result of S1, the result of `decide`, the inverse norms of the keys, a mask (1,) and the budget.
    The mask is True if all values are finite. The result of S1 remains on the device until it is read.
    """
    arrays = iter(download_together(*(x for _, decided, *rest, _ in prompts for x in (*decided, *rest))))
    return [_retention(S1, B, *(next(arrays) for _ in (*decided, 0, 0))) for S1, decided, *_, B in prompts]


def _retention(S1: Neighbours, B: int, *arrays: Any) -> CrystalRetention | None:
    """Return the retention of a prompt from the arrays of the host."""
    *values, inverse_norms, finite = arrays
    if not finite[0]:
        return None
    host: Any = Decided(*values)
    n, m = len(host.M), int((host.offsets < len(host.M)).sum())
    graph = _graph(host.indptr, host.indices.astype(np.int64), host.weights, host.degree, host.D, m)
    kept, ratio = np.flatnonzero(host.keep), host.ratio[:m].copy()
    return CrystalRetention(
        kept, np.array([0, len(kept)]), n, ratio=ratio, scores=host.score[:m].copy(), D=ratio * graph.D,
        protected=host.protected[:m].copy(), budget=B, coattention=DeferredCoAttention(S1), impact=host.M,
        trunks=_trunks(host.offsets, host.M_bar, m), graph=graph, inverse_norms=inverse_norms,
    )


def _trunks(offsets: IntVector, M_bar: Vector, m: int, start: int = 0) -> Trunks:
    return Trunks(offsets[: m + 1] + start, M_bar[:m].copy())


def _graph(
    indptr: IntVector, indices: IntVector, weights: Vector, degree: Vector, D: Vector, m: int,
) -> TrunkGraph:
    """Return the used parts of arrays of the host as a record."""
    edges = int(indptr[m])
    return TrunkGraph(
        indptr[: m + 1].copy(), indices[:edges].copy(), weights[:edges].copy(), degree[:m].copy(), D[:m].copy()
    )


@checked_stages("crystal")
class CrystalStages:
    """Stages S2 to S6 for NumPy arrays. A stage copies its arguments to the device, and its result to the host."""

    def impact(self, salience: Vector, token_ids: IntVector, parameters: CrystalCacheParameters, /) -> Vector:
        return on_arrays(lambda S, ids: s3.impact(S, s3.token_counts(ids), parameters), salience, token_ids)[0]

    def trunks(
        self, coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        S1, M = Neighbours.of_host(coattention, coattention.start), upload(impact, np.float64)
        offsets = s2.trunk_offsets(S1, upload(ends, np.bool_), parameters)
        M_bar = mean_impact(M[ranked_members(M, token_trunks(offsets, len(M)))], offsets, parameters)
        bounds, means = download_together(offsets, M_bar)
        return _trunks(bounds, means, int((bounds < len(M)).sum()), coattention.start)

    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        offsets = upload(trunks.offsets - coattention.start, np.int64)
        S1 = Neighbours.of_host(coattention, coattention.start)
        graph = trunk_graph(S1, offsets, parameters.tau_edge)
        D = crystallization(graph.degree, torch.full_like(offsets[:1], len(trunks.impact)), parameters)
        indptr, indices, weights, degree, crystallized = download_together(*graph, D)
        return _graph(indptr, indices, weights, degree, crystallized, len(trunks.impact))

    def score(
        self, D: Vector, impact: Vector, protected: BoolVector, parameters: CrystalCacheParameters, /,
    ) -> Vector:
        return on_arrays(s5.score, D, impact, protected, parameters)[0]

    def dissolve(
        self, score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int,
        parameters: CrystalCacheParameters, /,
    ) -> Dissolution:
        M, start = upload(impact, np.float64), int(trunks.offsets[0])
        offsets = upload(trunks.offsets - start, np.int64)
        trunk = token_trunks(offsets, len(M))
        pinned = upload(protected, np.bool_)
        keep, ratio = download_together(*dissolve(
            upload(score, np.float64), offsets, trunk, ranked_members(M, trunk), pinned, budget, parameters
        ))
        return Dissolution(start + np.flatnonzero(keep), ratio, ratio * D)
