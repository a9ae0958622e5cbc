"""A backend's stages on what the vectors of stages give."""

from collections.abc import Mapping

import numpy as np

from conformance.strategies.attention import AttentionInputs
from conformance.strategies.prompts import Prompt
from conformance.vectors.arrays import Stage, flags, floats, integers
from conformance.vectors.json_values import Json, nestedkv_parameters
from conformance.vectors.subject_decode import DECODE_STAGES
from reference.crystalcache import prefill as run_prefill
from spec.backend import Backend
from spec.budget import parse_budget
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention, TrunkGraph, Trunks

__all__ = ["STAGES", "attention_inputs", "prompt", "record"]


def record(i: Json) -> CoAttention:
    """Neighbours as a CoAttention; salience is not read by what follows."""
    return CoAttention(
        i["start"], np.ones(len(i["intra"])), integers(i["intra"]), floats(i["intra_weight"]), integers(i["cross"]),
        floats(i["cross_weight"]),
    )


def attention_inputs(i: Json, p: CrystalCacheParameters) -> AttentionInputs:
    """q and k in float32, which holds every vector's values."""
    q, k = (floats(i[name]).astype(np.float32) for name in ("q", "k"))
    return AttentionInputs(q, k, integers(i["positions"]), p, i["scaling"], i["softcap"])


def prompt(i: Json, p: CrystalCacheParameters) -> Prompt:
    """A valid prefill's input, with its budget as the exact share of n that it asks for."""
    n = len(i["token_ids"])
    share = f"{parse_budget(i['budget']).tokens(n)}/{n}"
    return Prompt(attention_inputs(i, p), integers(i["token_ids"]), frozenset(i["sentence_ends"]), share)


def coattention(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    return vars(attention_inputs(i, p).run(backend.require_crystal()))


def trunk_stage(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    return vars(backend.require_crystal().trunks(record(i), floats(i["impact"]), flags(i["ends"]), p))


def graph_stage(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    offsets = integers(i["offsets"])
    found: TrunkGraph = backend.require_crystal().graph(record(i), Trunks(offsets, np.ones(len(offsets) - 1)), p)
    return vars(found)


def dissolve_stage(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    offsets = integers(i["offsets"])
    return vars(backend.require_crystal().dissolve(
        floats(i["score"]), Trunks(offsets, np.ones(len(offsets) - 1)), floats(i["impact"]), floats(i["D"]),
        flags(i["protected"]), i["B"], p,
    ))


def prefill(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    """Every record of the run; `record` is the run itself."""
    q, k = (floats(i[name]).astype(np.float32) for name in ("q", "k"))
    found = run_prefill(
        q, k, integers(i["token_ids"]), frozenset(i["sentence_ends"]), i["budget"], p, backend,
        scaling=i["scaling"], softcap=i["softcap"],
    )
    names = ("kept", "budget", "over_budget", "protected", "ratio", "scores", "D")
    return {**{name: getattr(found, name) for name in names}, "offsets": found.trunks.offsets, "record": found}


def anomaly_score(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    k = floats(i["k"]).astype(np.float32)
    return {"score": backend.require_nestedkv().anomaly_score(k, nestedkv_parameters(i))}


STAGES: dict[str, Stage] = {
    "coattention": coattention,
    "impact": lambda backend, i, p: {
        "M": backend.require_crystal().impact(floats(i["salience"]), integers(i["token_ids"]), p)
    },
    "trunks": trunk_stage,
    "graph": graph_stage,
    "score": lambda backend, i, p: {
        "score": backend.require_crystal().score(floats(i["D"]), floats(i["impact"]), flags(i["protected"]), p)
    },
    "dissolve": dissolve_stage,
    "prefill": prefill,
    **DECODE_STAGES,
    "anomaly_score": anomaly_score,
}
