"""Algorithm 2: the prefill with stages S1 to S6, on any backend."""

import numpy as np

from reference.crystalcache.protection import effective_budget, protected_trunks
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.backend import Backend, CrystalStages, resolve
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.policy import DeviceArray
from spec.records import CoAttention, CrystalRetention, TrunkGraph, Trunks
from spec.validate import (
    check_attention_inputs,
    check_attention_tensors,
    check_scaling,
    check_sentence_ends,
    check_token_ids,
)

__all__ = ["observe", "prefill"]


def observe(
    stages: CrystalStages, q: DeviceArray, k: DeviceArray, ids: Int64[IntVector, " n"], ends: frozenset[int],
    parameters: CrystalCacheParameters, scaling: float, softcap: float | None, lse: DeviceArray | None = None,
    sinks: DeviceArray | None = None,
) -> tuple[CoAttention, Float64[Vector, " n"], Trunks, TrunkGraph]:
    """Run S1, S3, S2 and S4 on a prompt, in the order of Algorithm 2.

    The stages S1 to S4 do not depend on the budget or on the protected trunks.

    The optional arguments `lse` (H, n) and `sinks` (H,) are described in `spec.backend.CrystalStages.coattention`.

    Source: Algorithm 2, lines 1-52.
    """
    coattention = stages.coattention(q, k, np.arange(len(ids)), parameters, scaling, softcap, lse, sinks)
    M = stages.impact(coattention.salience, ids, parameters)
    trunks = stages.trunks(coattention, M, np.isin(ids, sorted(ends)), parameters)
    return coattention, M, trunks, stages.graph(coattention, trunks, parameters)


def prefill(
    q: DeviceArray, k: DeviceArray, token_ids: Int64[IntVector, " n"], sentence_ends: frozenset[int],
    budget: float | int | str | Budget = 0.5, parameters: CrystalCacheParameters = PAPER,
    backend: str | Backend = "numpy", *, scaling: float | None = None, softcap: float | None = None,
    sinks: DeviceArray | None = None,
) -> CrystalRetention:
    """Return the positions of a prompt that CrystalCache keeps, and the records of all stages.

    Implements: CC-PREFILL

    Source: Algorithm 2.

    Args:
        q: queries of the observed layer after RoPE, (H, n, d), floating: a NumPy array, or a tensor on the backend's
            device.
        k: keys of the observed layer after RoPE, (H_kv, n, d). H must be a multiple of H_kv.
        token_ids: token ids of the prompt, (n,), n at least 2.
        sentence_ends: ids of the tokens that end a sentence.
        budget: fraction of tokens in (0, 1] (such as 0.3, "0.3" or "30%"), or number of tokens (such as 512 or "512").
        parameters: constants of CrystalCache. Some values of these constants give the ablations of Table 10.
        backend: a Backend, the name of a backend such as "numpy", or an import path "module:ATTRIBUTE".
        scaling: factor that multiplies q.k in the observed layer. Default: 1 / sqrt(d).
        softcap: soft cap on the attention logits of the observed layer, or None if the layer has no soft cap.
        sinks: logits of the observed layer's attention sinks, one per query head, (H,), or None if the layer has no
            sinks.

    Raises:
        SpecError: if an input is invalid. All inputs are checked before any computation.
        BackendUnavailable: if the backend cannot run on this machine.
    """
    share = parse_budget(budget)
    engine = resolve(backend)
    stages = engine.require_crystal()
    on_host = engine.accepts_tensor is None or isinstance(q, np.ndarray)
    (check_attention_inputs if on_host else check_attention_tensors)(q, k)
    n = q.shape[1]
    if k.shape[1] != n:
        raise SpecError("k", tuple(k.shape), f"must have as many tokens as q, {n}")
    ids = check_token_ids(token_ids, n)
    ends = check_sentence_ends(sentence_ends)
    factor = q.shape[2] ** -0.5 if scaling is None else scaling
    check_scaling(factor, softcap)

    B = effective_budget(share, n, parameters.N_sink, parameters.W_recent)
    if engine.prefill is not None:
        at = np.arange(n)
        held = (at < parameters.N_sink) | (at >= n - parameters.W_recent)
        return engine.prefill(
            q, k, ids, np.isin(ids, sorted(ends)), held, B, parameters, factor, softcap, None, sinks
        )
    coattention, M, trunks, graph = observe(
        stages, q, k, ids, ends, parameters, factor, softcap, sinks=sinks
    )
    protected = protected_trunks(trunks.offsets, n, parameters.N_sink, parameters.W_recent)
    score = stages.score(graph.D, trunks.impact, protected, parameters)
    result = stages.dissolve(score, trunks, M, graph.D, protected, B, parameters)
    return CrystalRetention(
        result.kept, np.array([0, len(result.kept)]), n, ratio=result.ratio, scores=score, D=result.D,
        protected=protected, budget=B, coattention=coattention, impact=M, trunks=trunks, graph=graph,
    )
