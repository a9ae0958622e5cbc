"""Functions that run a backend's stages on the inputs of the vectors."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from conformance.engine.ops import OPS, PARAMETERS, array_of
from conformance.engine.values import DTYPES
from conformance.strategies.prompts import AttentionInputs, Prompt
from conformance.strategies.trunks import record as lists_of
from conformance.vectors.codec import RECORDS, call, floats, integers, results
from conformance.vectors.files import Json, nestedkv_parameters
from reference.crystalcache import breath, segments
from reference.crystalcache import prefill as run_prefill
from spec.backend import Backend
from spec.budget import parse_budget
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

Stage = Callable[[Backend, Any, CrystalCacheParameters], Mapping[str, object]]
BY_NAME = {kind.__name__: of for kind, of in RECORDS.items()}
ON_DEVICE = ("q", "k")
"""Inputs in float32, which represents the values of all vectors exactly."""


def attention_inputs(i: Json, p: CrystalCacheParameters) -> AttentionInputs:
    q, k = (floats(i[name]).astype(np.float32) for name in ON_DEVICE)
    sinks = floats(i["sinks"]) if "sinks" in i else None
    return AttentionInputs(q, k, integers(i["positions"]), p, i["scaling"], i["softcap"], sinks)


def prompt(i: Json, p: CrystalCacheParameters) -> Prompt:
    """Return the input of a valid prefill. Its budget is the exact share of n tokens."""
    n = len(i["token_ids"])
    share = f"{parse_budget(i['budget']).tokens(n)}/{n}"
    return Prompt(attention_inputs(i, p), integers(i["token_ids"]), frozenset(i["sentence_ends"]), share)


def argument(name: str, kind: str, i: Json, p: CrystalCacheParameters) -> Any:
    """Return an argument of `OPS` from inputs, or None if the inputs do not contain the argument."""
    if kind in PARAMETERS:
        return p if kind == "crystalcache" else nestedkv_parameters(i)
    if kind in BY_NAME:
        return BY_NAME[kind](i)
    value = i["B"] if name == "budget" else i.get(name)
    wanted = array_of(kind)
    if value is None or wanted is None or not wanted.axes:
        return value
    return np.array(value, dtype=np.float32 if name in ON_DEVICE else DTYPES[wanted.kind])


def ask(op: str, result: str, backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    """Return the result of a stage for the inputs `i` of a vector: by the name `result`, or by the fields."""
    family, _, stage = op.partition(".")
    arguments = [argument(name, kind, i, p) for name, kind in OPS[op].arguments.items()]
    output = getattr(getattr(backend, f"require_{family}")(), stage)(*arguments)
    return results(output, [result] if result else [])


def prefill(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    """Return every record of a run of `prefill`. `record` is the complete result."""
    q, k = (floats(i[name]).astype(np.float32) for name in ON_DEVICE)
    result = run_prefill(
        q, k, integers(i["token_ids"]), frozenset(i["sentence_ends"]), i["budget"], p, backend,
        scaling=i["scaling"], softcap=i["softcap"], sinks=floats(i["sinks"]) if "sinks" in i else None,
    )
    names = ("kept", "budget", "over_budget", "protected", "ratio", "scores", "D")
    return {**{name: getattr(result, name) for name in names}, "offsets": result.trunks.offsets, "record": result}


def as_record(triples: Json, start: int, n: int) -> CoAttention:
    """Return edges as neighbour lists.

    An edge is in the cross lists if its first endpoint is before the segment, and in the intra lists otherwise.
    """
    intra: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    cross: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    for first, second, weight in triples:
        if first < start:
            cross[second - start].append((first, weight))
        else:
            intra[first - start].append((second, weight))
    return lists_of([1.0] * n, intra, cross, max(map(len, intra)), max(map(len, cross)), start)


def segment_graph(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    bounds, old = i["bounds"], len(i["indptr"]) - 1
    result = as_record(i["edges"], bounds[old], bounds[-1] - bounds[old])
    given = {"start": result.start, **{name: getattr(result, name) for name in OF_RECORD}}
    return ask("breath.segment_graph", "", backend, {**i, **given}, p)


def extend(backend: Backend, i: Json, p: CrystalCacheParameters) -> Mapping[str, object]:
    q, k = (floats(i[name]).astype(np.float32) for name in ON_DEVICE)
    return results(call(segments.extend, i, p, q=q, k=k, backend=backend))


OF_RECORD = ("intra", "intra_weight", "cross", "cross_weight")
WITH_VECTORS = {op: row.vector for op, row in OPS.items() if row.vector is not None}
"""Operations of engines that the vectors call, with the name of the result."""
STAGES: dict[str, Stage] = {
    **{op.partition(".")[2]: partial(ask, op, name) for op, name in WITH_VECTORS.items()},
    "prefill": prefill, "segment_graph": segment_graph, "extend": extend,
    "decode_step": lambda backend, i, p: results(call(breath.decode_step, i, p, backend=backend)),
}
FAMILIES: Mapping[str, tuple[str, ...]] = {
    **{op.partition(".")[2]: (op.partition(".")[0],) for op in WITH_VECTORS},
    "prefill": ("crystal",), "segment_graph": ("breath",),
    **dict.fromkeys(("extend", "decode_step"), ("crystal", "breath")),
}
"""Stage families that an operation uses."""
