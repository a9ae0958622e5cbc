"""JSON values as what a function takes, by its annotations, and what it gives as a mapping of results by name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin

import numpy as np

from conformance.vectors.files import Json, nestedkv_parameters
from conformance.vectors.models import STATE
from spec.budget import Budget, parse_budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters, NestedKVParameters
from spec.records import CoAttention, Edges, Trunks

Item = Callable[[Any, CrystalCacheParameters], Mapping[str, object]]


def floats(values: Json) -> Any:
    """A float64 array in which null is NaN."""
    return np.array(values, dtype=np.float64)


def integers(values: Json) -> Any:
    return np.array(values, dtype=np.int64)


def flags(values: Json) -> Any:
    return np.array(values, dtype=np.bool_)


def named(names: Sequence[str], values: Sequence[object]) -> Mapping[str, object]:
    return dict(zip(names, values, strict=True))


def plain(value: Any) -> Any:
    """Arrays and NumPy numbers as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(x) for x in value] if isinstance(value, list | tuple) else value


def record(i: Json) -> CoAttention:
    """Neighbours as a CoAttention; salience is not read by what follows."""
    return CoAttention(
        i["start"], np.ones(len(i["intra"])), integers(i["intra"]), floats(i["intra_weight"]), integers(i["cross"]),
        floats(i["cross_weight"]),
    )


def trunks_of(i: Json) -> Trunks:
    """Offsets as Trunks, whose impact is not read by what follows."""
    offsets = integers(i["offsets"])
    return Trunks(offsets, np.ones(len(offsets) - 1))


def weights_of(i: Json) -> TrunkWeights:
    return TrunkWeights(integers(i["indptr"]), integers(i["indices"]), floats(i["weights"]))


def edges_of(i: Json) -> Edges:
    first, second, weight = zip(*i["edges"], strict=True) if i["edges"] else ((), (), ())
    return Edges(integers(first), integers(second), floats(weight))


def table_of(i: Json) -> LiveTrunks:
    """The live trunks of a state, or such of which only members and norms are read."""
    n, m = i["offsets"][-1], len(i["offsets"]) - 1
    columns = {"impact": n, "inverse_norms": n, "trunk_impact": m}
    given = {name: floats(i.get(name, [1.0] * size)) for name, size in columns.items()}
    return LiveTrunks(integers(i.get("positions", range(n))), integers(i["offsets"]), **given)


def state_of(i: Json) -> DecodeState:
    """The record of a flat state."""
    return DecodeState(
        parse_budget(i["budget"]), i["seen"], i["step"], table_of(i), floats(i["D"]), weights_of(i),
        integers(i["ids"]), integers(i["counts"]), i["mu"], i["sigma"], tuple(i["tail_ids"]),
        tuple(i["tail_inverse_norms"]),
    )


def fields_of(state: DecodeState) -> Mapping[str, Any]:
    """A state, flat; the budget is what it was."""
    everything = {**vars(state), **vars(state.live), **state.W._asdict()}
    return {name: everything[name] for name in STATE}


RECORDS: Mapping[Any, Callable[[Json], object]] = {
    CoAttention: record, Trunks: trunks_of, TrunkWeights: weights_of, Edges: edges_of, LiveTrunks: table_of,
    DecodeState: state_of, NestedKVParameters: nestedkv_parameters,
}
"""Records whose members are inputs of their own."""


def read(kind: Any, name: str, i: Json, p: CrystalCacheParameters) -> Any:
    """The argument of this name and annotation: from the inputs, or from the parameters where these have it."""
    if kind is CrystalCacheParameters:
        return p
    if kind in RECORDS:
        return RECORDS[kind](i)
    value = i[name] if name in i else getattr(p, name)
    if kind is Budget:
        return parse_budget(value)
    if get_origin(kind) in (frozenset, tuple):
        return get_origin(kind)(value)
    kinds: Any = next((one.dtypes for one in (kind, *get_args(kind)) if hasattr(one, "dtypes")), ())
    return np.array(value, dtype="float64" if "float64" in kinds else kinds[0]) if kinds else value


def call(function: Callable[..., Any], i: Json, p: CrystalCacheParameters, **given: object) -> Any:
    """A function's result on a vector's inputs; an argument without a value there keeps its default."""
    ordered: list[Any] = []
    by_name: dict[str, Any] = {}
    for name, one in inspect.signature(function).parameters.items():
        if one.default is one.empty or name in {*i, *given} or one.annotation is CrystalCacheParameters:
            value = given[name] if name in given else read(one.annotation, name, i, p)
            if one.kind is one.KEYWORD_ONLY:
                by_name[name] = value
            else:
                ordered.append(value)
    return function(*ordered, **by_name)


def results(found: Any, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """What a function gives, by the names of a vector's results; a record's are its own."""
    if isinstance(found, DecodeState):
        return fields_of(found)
    if not names:
        return vars(found) if is_dataclass(found) else dict(found._asdict())
    return {names[0]: found} if len(names) == 1 else named(names, found)
