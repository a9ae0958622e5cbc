"""The stages of decode on what their vectors give."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.vectors.arrays import Stage, flags, floats, integers
from conformance.vectors.json_values import Json
from conformance.vectors.models import STATE
from reference.crystalcache import breath, segments
from spec.backend import Backend
from spec.budget import parse_budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

__all__ = ["DECODE_STAGES", "ends_of", "fields_of", "state_of", "table_of", "weights_of"]


def weights_of(i: Json) -> TrunkWeights:
    return TrunkWeights(integers(i["indptr"]), integers(i["indices"]), floats(i["weights"]))


def state_of(i: Json) -> DecodeState:
    """The record of a flat state."""
    table = LiveTrunks(
        integers(i["positions"]), integers(i["offsets"]), floats(i["impact"]), floats(i["inverse_norms"]),
        floats(i["trunk_impact"]),
    )
    return DecodeState(
        parse_budget(i["budget"]), i["seen"], i["step"], table, floats(i["D"]), weights_of(i), integers(i["ids"]),
        integers(i["counts"]), i["mu"], i["sigma"], tuple(i["tail_ids"]), tuple(i["tail_inverse_norms"]),
    )


def fields_of(state: DecodeState) -> Mapping[str, Any]:
    """A state, flat; the budget is what it was."""
    everything = {**vars(state), **vars(state.live), **state.W._asdict()}
    return {name: everything[name] for name in STATE}


def table_of(i: Json) -> LiveTrunks:
    n, m = i["offsets"][-1], len(i["offsets"]) - 1
    norms = floats(i.get("inverse_norms", [1.0] * n))
    return LiveTrunks(integers(i.get("positions", range(n))), integers(i["offsets"]), np.ones(n), norms, np.ones(m))


def ends_of(i: Json) -> frozenset[int]:
    return frozenset(i["sentence_ends"])


def as_record(triples: Json, start: int, n: int) -> CoAttention:
    """Edges as neighbour lists: (source, owner) across if the first endpoint lies before the segment."""
    intra: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    cross: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    for first, second, weight in triples:
        if first < start:
            cross[second - start].append((first, weight))
        else:
            intra[first - start].append((second, weight))

    def padded(rows: list[list[tuple[int, float]]]) -> tuple[Any, Any]:
        k = max(map(len, rows))
        index, weight = np.full((n, k), -1, dtype=np.int64), np.zeros((n, k))
        for at, row in enumerate(rows):
            for rank, (j, w) in enumerate(row):
                index[at, rank], weight[at, rank] = j, w
        return index, weight

    return CoAttention(start, np.ones(n), *padded(intra), *padded(cross))


def segment_graph(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    bounds, old = i["bounds"], len(i["indptr"]) - 1
    found = as_record(i["edges"], bounds[old], bounds[-1] - bounds[old])
    return backend.require_breath().segment_graph(
        found, integers(bounds), integers(i["sizes"]), weights_of(i), p
    )._asdict()


def decode_step(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    return fields_of(breath.decode_step(state_of(i), i["token_id"], i["inverse_norm"], ends_of(i), p, backend))


def extend(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    q, k = (floats(i[name]).astype(np.float32) for name in ("q", "k"))
    return fields_of(segments.extend(
        state_of(i), q, k, integers(i["token_ids"]), ends_of(i), p, backend, scaling=i["scaling"]
    ))


DECODE_STAGES: dict[str, Stage] = {
    "inverse_key_norms": lambda backend, i, p: {
        "inverse_norms": backend.require_breath().inverse_key_norms(floats(i["k"]).astype(np.float32))
    },
    "decay": lambda backend, i, p: {
        "D": backend.require_breath().decay(floats(i["D"]), floats(i["trunk_impact"]), p)
    },
    "activation": lambda backend, i, p: {"active": backend.require_breath().activation(table_of(i), p)},
    "resonance": lambda backend, i, p: {
        "D": backend.require_breath().resonance(floats(i["D"]), weights_of(i), flags(i["active"]), p)
    },
    "hebbian": lambda backend, i, p: backend.require_breath().hebbian(
        weights_of(i), flags(i["active"]), p
    )._asdict(),
    "segment_graph": segment_graph,
    "segment_crystallization": lambda backend, i, p: {
        "D": backend.require_breath().segment_crystallization(floats(i["degree"]), i["old"], p)
    },
    "decode_step": decode_step,
    "extend": extend,
}
