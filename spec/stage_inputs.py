"""Checks of the arguments of stages: shapes, types and ranges that must fit each other.

`checked_stages` puts the checks in front of the stages of a class. The checks read no values of tensors on a device.
The stages `coattention`, `inverse_key_norms`, `diverse` and `anomaly_score` check their arguments themselves.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from spec.arrays import BoolMatrix, BoolVector, IntVector, Matrix, Vector
from spec.decode import LiveTrunks, TrunkWeights
from spec.errors import SpecError
from spec.policy import DeviceArray
from spec.records import CoAttention, Trunks
from spec.validate import check_shapes, check_whole

__all__ = ["checked_stages"]

Stages = TypeVar("Stages")
_KINDS = {"iu": "integers", "b": "True or False", "f": "floating point"}


def checked_stages(family: str) -> Callable[[type[Stages]], type[Stages]]:
    """Return a class decorator that puts the checks of a family's arguments in front of the stages of a class."""
    def decorate(stages: type[Stages]) -> type[Stages]:
        for name, check in _CHECKS[family].items():
            method = vars(stages)[name]
            static = isinstance(method, staticmethod)
            setattr(stages, name, _checked(check, method.__func__ if static else method, static))
        return stages

    return decorate


def _checked(check: Callable[..., None], method: Callable[..., Any], static: bool) -> Any:
    @wraps(method)
    def call(*arguments: Any) -> Any:
        check(*arguments[not static :])
        return method(*arguments)

    return staticmethod(call) if static else call


def _array(name: str, array: Any, axes: tuple[str, ...], kind: str = "") -> tuple[int, ...]:
    """Check the number of axes and the kind of an array, and return its shape."""
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != len(axes):
        given = type(array).__name__ if shape is None else tuple(shape)
        raise SpecError(name, given, f"must be an array ({', '.join(axes)}{',' * (len(axes) == 1)})")
    if kind and isinstance(array, np.ndarray) and array.dtype.kind not in kind:
        raise SpecError(name, array.dtype, f"must be {_KINDS[kind]}")
    return tuple(shape)


def _values(of: str, number: int, **arrays: Any) -> None:
    """Check that each array has one value for each of `number` things."""
    for name, array in arrays.items():
        if _array(name, array, (f"{of}s",)) != (number,):
            raise SpecError(name, tuple(array.shape), f"must have the shape ({number},), with a value for each {of}")


def _masks(of: str, number: int, **arrays: Any) -> None:
    _values(of, number, **arrays)
    for name, array in arrays.items():
        _array(name, array, (f"{of}s",), "b")


def _inside(name: str, array: Any, low: int, high: int, more: str = "") -> None:
    """Check that the integers of an array lie in [low, high)."""
    outside = (array < low) | (array >= high)
    if outside.any():
        at = tuple(int(i) for i in np.argwhere(outside)[0])
        raise SpecError(name, int(array[at]), f"must lie in [{low}, {high}){more}; this value is at {at}")


def _bounds(name: str, offsets: IntVector, of: str, least: int = 1) -> int:
    """Check that bounds increase strictly, and return the number of intervals, at least `least`."""
    if _array(name, offsets, (f"{of}s + 1",), "iu")[0] <= least:
        raise SpecError(name, offsets.tolist(), f"must have the first position of each {of}, then the end of the last")
    if (np.diff(offsets) < 1).any():
        raise SpecError(name, offsets.tolist(), f"must increase strictly, because no {of} is empty")
    return len(offsets) - 1


def _neighbours(coattention: CoAttention) -> int:
    """Check the shapes of a result of S1, and return the number of tokens. Results on a device are valid."""
    check_whole("start", coattention.start)
    n = _array("salience", coattention.salience, ("tokens",))[0]
    if n == 0:
        raise SpecError("salience", (0,), "must have a value for each token of the segment, at least one")
    for name in ("intra", "cross"):
        shape = _array(name, getattr(coattention, name), ("tokens", "neighbours"), "iu")
        if shape[0] != n:
            raise SpecError(name, shape, f"must have a row for each of {n} tokens")
        if (weights := _array(f"{name}_weight", getattr(coattention, f"{name}_weight"), ("tokens", name))) != shape:
            raise SpecError(f"{name}_weight", weights, f"must have the shape of {name}, {shape}")
    return n


def _edges_inside(coattention: CoAttention, low: int, high: int, more: str) -> None:
    """Check that both ends of each edge lie in [low, high). Negative neighbours are unused entries."""
    for name in ("intra", "cross"):
        neighbours = getattr(coattention, name)
        # In a prompt, the largest entry decides. It takes a tenth of the time of a mask over all entries.
        if neighbours.max(initial=-1) >= high or (low > 0 and ((neighbours >= 0) & (neighbours < low)).any()):
            _inside(name, np.where(neighbours < 0, low, neighbours), low, high, more)


def _weights(W: TrunkWeights) -> int:
    """Check a graph in CSR form, and return the number of trunks."""
    m = _array("indptr", W.indptr, ("trunks + 1",), "iu")[0] - 1
    edges = _array("indices", W.indices, ("edges",), "iu")[0]
    _values("edge", edges, weights=W.weights)
    if m < 0 or W.indptr[0] != 0 or W.indptr[-1] != edges or (np.diff(W.indptr) < 0).any():
        raise SpecError("indptr", W.indptr.tolist(), f"must increase from 0 to {edges}, the number of edges")
    _inside("indices", W.indices, 0, m)
    return m


def _impact(salience: Vector, token_ids: IntVector, parameters: object) -> None:
    _values("token", _array("salience", salience, ("tokens",))[0], token_ids=token_ids)
    _array("token_ids", token_ids, ("tokens",), "iu")


def _impact_of_counts(salience: Vector, counts: IntVector, parameters: object) -> None:
    _values("token", _array("salience", salience, ("tokens",))[0], counts=counts)
    _array("counts", counts, ("tokens",), "iu")
    if (counts < 1).any():
        raise SpecError("counts", int(counts.min()), "must be at least 1, because the token itself counts")


def _trunks(coattention: CoAttention, impact: Vector, ends: BoolVector, parameters: object) -> None:
    if type(coattention) is CoAttention:
        n = _neighbours(coattention)
        _values("token", n, impact=impact)
        _masks("token", n, ends=ends)


def _graph(coattention: CoAttention, trunks: Trunks, parameters: object) -> None:
    m = _bounds("offsets", trunks.offsets, "trunk")
    _values("trunk", m, impact=trunks.impact)
    if type(coattention) is CoAttention:  # a result on a device is valid
        n, low = _neighbours(coattention), int(coattention.start)
        high = low + n
        if (trunks.offsets[0], trunks.offsets[-1]) != (low, high):
            raise SpecError("offsets", trunks.offsets.tolist(), f"must begin with {low} and end with {high}")
        more = ", the positions of the segment: for edges to earlier tokens, call breath.segment_graph"
        _edges_inside(coattention, low, high, more)


def _score(D: Vector, impact: Vector, protected: BoolVector, parameters: object) -> None:
    m = _array("D", D, ("trunks",))[0]
    _values("trunk", m, impact=impact)
    _masks("trunk", m, protected=protected)


def _dissolve(
    score: Vector, trunks: Trunks, impact: Vector, D: Vector, protected: BoolVector, budget: int, parameters: object,
) -> None:
    m = _bounds("offsets", trunks.offsets, "trunk", 0)
    _values("trunk", m, score=score, D=D)
    _masks("trunk", m, protected=protected)
    _values("token", int(trunks.offsets[-1] - trunks.offsets[0]), impact=impact)
    check_whole("budget", budget)


def _decay(D: Vector, trunk_impact: Vector, parameters: object) -> None:
    _values("trunk", _array("D", D, ("trunks",))[0], trunk_impact=trunk_impact)


def _activation(live: LiveTrunks, parameters: object) -> None:
    tokens = _array("inverse_norms", live.inverse_norms, ("tokens",))[0]
    m = _array("offsets", live.offsets, ("trunks + 1",), "iu")[0] - 1
    if m < 0 or live.offsets[0] != 0 or live.offsets[-1] != tokens or (np.diff(live.offsets) < 1).any():
        raise SpecError("offsets", live.offsets.tolist(), f"must increase strictly from 0 to {tokens}")
    _values("trunk", m, trunk_impact=live.trunk_impact)


def _resonance(D: Vector, W: TrunkWeights, active: BoolVector, parameters: object) -> None:
    m = _weights(W)
    _values("trunk", m, D=D)
    _masks("trunk", m, active=active)


def _hebbian(W: TrunkWeights, active: BoolVector, parameters: object) -> None:
    _masks("trunk", _weights(W), active=active)


def _segment_graph(
    coattention: CoAttention, bounds: IntVector, sizes: IntVector, W: TrunkWeights, parameters: object,
) -> None:
    m = _bounds("bounds", bounds, "trunk")
    _values("trunk", m, sizes=sizes)
    _array("sizes", sizes, ("trunks",), "iu")
    if (sizes < 1).any():
        raise SpecError("sizes", int(sizes.min()), "must be at least 1, because no trunk is empty")
    old = _weights(W)
    if type(coattention) is CoAttention:
        n, low, high = _neighbours(coattention), int(bounds[0]), int(bounds[-1])
        if coattention.start + n != high:
            raise SpecError("start", coattention.start, f"must be {high - n}: bounds end with {high}, after {n} tokens")
        if (before := int(np.searchsorted(bounds[:-1], coattention.start))) != old or bounds[before] != high - n:
            reason = f"must have a row for each trunk before {high - n}, the first position of a trunk"
            raise SpecError("indptr", (old + 1,), reason)
        _edges_inside(coattention, low, high, ", the positions of the trunks")


def _segment_crystallization(degree: Vector, old: int, parameters: object) -> None:
    m = _array("degree", degree, ("trunks",))[0]
    if m == 0:
        raise SpecError("degree", (0,), "must have a value for each trunk, at least one")
    if check_whole("old", old) > m:
        raise SpecError("old", old, f"must be at most {m}, the number of trunks")


def _heads(q: DeviceArray, k: DeviceArray) -> None:
    for name, array in (("q", q), ("k", k)):
        if 0 in _array(name, array, ("heads", "tokens", "d")):
            raise SpecError(name, tuple(array.shape), "no axis may be empty")


def _attention(q: DeviceArray, k: DeviceArray, *rest: object) -> None:
    _heads(q, k)
    check_shapes(q, k)


def _largest_attention(q: DeviceArray, k: DeviceArray, norms: Vector, *rest: object) -> None:
    _attention(q, k)
    _values("query", q.shape[1], norms=norms)


def _expected_attention(
    q: DeviceArray, k: DeviceArray, v: DeviceArray, at: IntVector, ahead: IntVector, inv_freq: Vector, *rest: object,
) -> None:
    _heads(q, k)
    check_shapes(q[:, :1], k)  # the number of queries is free, because the keys of sinks are left out
    if _array("v", v, ("heads", "tokens", "d"))[:2] != tuple(k.shape[:2]):
        raise SpecError("v", tuple(v.shape), f"must have the heads and tokens of k, {tuple(k.shape[:2])}")
    _values("query", q.shape[1], at=at)
    _array("at", at, ("queries",), "iu")
    if _array("ahead", ahead, ("steps",), "iu")[0] == 0:
        raise SpecError("ahead", (0,), "must have at least one position")
    _values("pair of channel", q.shape[2] // 2, inv_freq=inv_freq)


def _best_tokens(values: Matrix, shares: IntVector, pinned: BoolMatrix) -> None:
    rows, n = _array("values", values, ("rows", "tokens"))
    _values("row", rows, shares=shares)
    _array("shares", shares, ("rows",), "iu")
    if (shares < 0).any():
        raise SpecError("shares", int(shares.min()), "must be at least 0")
    if _array("pinned", pinned, ("rows", "tokens"), "b") != (rows, n):
        raise SpecError("pinned", tuple(pinned.shape), f"must have the shape of values, {(rows, n)}")


_CHECKS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "crystal": {"impact": _impact, "trunks": _trunks, "graph": _graph, "score": _score, "dissolve": _dissolve},
    "breath": {
        "impact": _impact_of_counts, "decay": _decay, "activation": _activation, "resonance": _resonance,
        "hebbian": _hebbian, "segment_graph": _segment_graph, "segment_crystallization": _segment_crystallization,
    },
    "policies": {
        "received_attention": _attention, "largest_attention": _largest_attention,
        "expected_attention": _expected_attention, "best_tokens": _best_tokens,
    },
}
