"""Wrong readings of what is no stage: memory, compaction, the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.crystalcache.compaction import compact
from reference.crystalcache.crystallization import crystallization
from reference.crystalcache.graph import degree
from reference.crystalcache.observed_layer import observed_layer
from reference.crystalcache.pipeline import prefill
from reference.crystalcache.protection import protected_trunks
from reference.memory import kv_bytes
from spec.backend import Backend, CrystalStages, resolve
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, CrystalRetention, TrunkGraph, Trunks
from spec.validate import check_scaling, check_token_ids

__all__: list[str] = []


@instead_of(kv_bytes, "CC-MEMORY")
def keys_alone(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """Keys are counted, values are not."""
    return L * H_kv * d * n * batch * b


@instead_of(kv_bytes, "CC-MEMORY")
def one_sequence(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """Eq. 1 whatever the batch."""
    return kv_bytes(L, H_kv, d, n, 1, b)


@instead_of(kv_bytes, "CC-MEMORY")
def in_32_bits(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """The product wraps at 32 bits."""
    return kv_bytes(L, H_kv, d, n, batch, b) % 2**32


@instead_of(observed_layer, "CC-OBSERVED-LAYER")
def a_layer_by_its_index(full_layers: Sequence[int], i: int) -> int:
    """The number is the layer's own index where there is one: windows are counted too."""
    return i if i in full_layers else observed_layer(full_layers, i)


@instead_of(observed_layer, "CC-OBSERVED-LAYER")
def the_nearest_that_is_there(full_layers: Sequence[int], i: int) -> int:
    """What lies outside is the first or the last layer."""
    L = len(full_layers)
    return observed_layer(full_layers, min(max(i, -L), L - 1))


@instead_of(compact, "CC-COMPACT")
def first_slots(K: Array, V: Array, R: Array) -> tuple[Array, Array]:
    """The cache is cut to the number of kept tokens."""
    return K[:, : len(R)].copy(), V[:, : len(R)].copy()


@instead_of(compact, "CC-COMPACT")
def in_single_precision(K: Array, V: Array, R: Array) -> tuple[Array, Array]:
    """Keys and values come back as float32."""
    return K[:, R].astype(np.float32), V[:, R].astype(np.float32)


@instead_of(compact, "CC-COMPACT")
def a_view_of_a_run(K: Array, V: Array, R: Array) -> tuple[Array, Array]:
    """A run of kept positions is a view, so that the full cache stays in memory."""
    if len(R) and R[-1] - R[0] == len(R) - 1:
        run = slice(int(R[0]), int(R[-1]) + 1)
        return K[:, run], V[:, run]
    return compact(K, V, R)


@instead_of(prefill, "CC-PREFILL")
def unscaled_by_default(*given: Any, scaling: float | None = None, **more: Any) -> CrystalRetention:
    """Without a scaling of the layer's own logits are not scaled."""
    return prefill(*given, scaling=1.0 if scaling is None else scaling, **more)


@instead_of(prefill, "CC-PREFILL")
def no_stages_below_the_budget(*given: Any, **more: Any) -> CrystalRetention:
    """Where nothing is evicted the stages are skipped: no trunk has a score or a D."""
    found = prefill(*given, **more)
    if len(found.impact) > found.budget:
        return found
    nothing = np.full_like(found.scores, np.nan)
    return replace(found, scores=nothing, graph=replace(found.graph, D=np.zeros_like(nothing)))


@instead_of(prefill, "CC-PREFILL")
def nothing_is_over_budget(*given: Any, **more: Any) -> CrystalRetention:
    """Where protected trunks exceed B, B is raised to what they hold."""
    found = prefill(*given, **more)
    return replace(found, budget=max(found.budget, len(found.kept)))


@dataclass(frozen=True)
class _Stages:
    stages: CrystalStages

    def __getattr__(self, stage: str) -> Any:
        return getattr(self.stages, stage)


def on(stages: type[_Stages], *given: Any, **more: Any) -> CrystalRetention:
    """A prefill on these stages, made of those asked for."""
    call = signature(prefill).bind(*given, **more)
    call.apply_defaults()
    real = resolve(call.arguments["backend"])
    wrong: Any = stages(real.require_crystal())
    call.arguments["backend"] = Backend(real.name, crystal=wrong)
    return prefill(*call.args, **call.kwargs)


class _TrunksBeforeImpact(_Stages):
    def trunks(
        self, coattention: CoAttention, impact: Array, ends: Array, parameters: CrystalCacheParameters, /,
    ) -> Trunks:
        return self.stages.trunks(coattention, coattention.salience, ends, parameters)


@instead_of(prefill, "CC-PREFILL")
def trunks_before_impact(*given: Any, **more: Any) -> CrystalRetention:
    """S2 runs before S3, as they are numbered: a trunk's impact is made of salience."""
    return on(_TrunksBeforeImpact, *given, **more)


class _ProtectedTrunksLeftOut(_Stages):
    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        found = self.stages.graph(coattention, trunks, parameters)
        sink, recent = parameters.N_sink, parameters.W_recent
        safe = protected_trunks(trunks.offsets, int(trunks.offsets[-1]), sink, recent)
        deg = degree(found.indptr, np.where(safe[found.indices], 0.0, found.weights))
        D = crystallization(deg, parameters.s, parameters.epsilon)
        return replace(found, degree=deg, D=D if parameters.graph == "degree" else found.D)


@instead_of(prefill, "CC-PREFILL")
def edges_to_protected_trunks_left_out(*given: Any, **more: Any) -> CrystalRetention:
    """A degree runs over unprotected neighbours only."""
    return on(_ProtectedTrunksLeftOut, *given, **more)


class _GraphWithoutEdges(_Stages):
    def graph(self, coattention: CoAttention, trunks: Trunks, parameters: CrystalCacheParameters, /) -> TrunkGraph:
        found = self.stages.graph(coattention, trunks, parameters)
        return found if parameters.graph == "degree" else replace(found, D=np.full_like(found.D, 0.5))


@instead_of(prefill, "CC-PREFILL")
def impact_alone_at_one_half(*given: Any, **more: Any) -> CrystalRetention:
    """M-only: D is 0.5, as in a graph without an edge, not 0."""
    return on(_GraphWithoutEdges, *given, **more)


@instead_of(check_token_ids, "CC-PREFILL")
def a_negative_id_is_an_id(token_ids: Any, tokens: int, vocabulary: int | None = None) -> Array:
    """Padding ids below 0 are counted as tokens."""
    ids = np.asarray(token_ids)
    return check_token_ids(np.abs(ids) if ids.dtype.kind == "i" else ids, tokens, vocabulary)


@instead_of(check_scaling, "CC-PREFILL")
def any_scaling(scaling: float, softcap: float | None) -> None:
    """Scaling and soft cap are not checked."""
