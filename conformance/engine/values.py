"""Conversion of values to and from the JSON of an engine: spec/protocol.md, section "Values"."""

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from conformance.engine.ops import PARAMETERS, RECORDS, Array, KeptSets, Op, array_of
from spec.decode import LiveTrunks, TrunkWeights
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters, NestedKVParameters
from spec.policy import Selection
from spec.records import CoAttention, Dissolution, TrunkGraph, Trunks

Json: TypeAlias = Any
Check: TypeAlias = Callable[[Array, Any], Any]
"""Function that returns a value that was read, or raises ValueError if the value has the wrong type."""

LARGE = 65536  # Bytes: larger arrays are not written as lists.
EXACT = 2**53  # Larger integers are written as text.
LONGEST_NAME = 100
MOST_VALUES = 2**24
"""Maximum number of values of an answer. Python needs up to 80 bytes for a value whose text has 3 bytes."""
DTYPES = {"float": np.float64, "int": np.int64, "bool": np.bool_}
WRITTEN = ("float64", "float32", "int64", "bool")
FLOAT = re.compile(r"-?(0x[0-9a-f]+(\.[0-9a-f]*)?p[+-]?\d+|inf)|nan")
INTEGER = re.compile(r"-?\d+")
CLASSES: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (CoAttention, Trunks, TrunkGraph, Dissolution, LiveTrunks, TrunkWeights, Selection, KeptSets)
}
PARAMETER_CLASSES: Mapping[str, Any] = dict(
    zip(PARAMETERS, (CrystalCacheParameters, NestedKVParameters), strict=True)
)


def parsed(answer: bytes) -> Json:
    """Return the JSON of a line. The parser is strict, because other readers reject the extensions of Python's reader.

    Raises:
        ValueError: if the line is not JSON, contains NaN or infinity as a number, repeats a member, or has a byte order
            mark. Also if the line has too many values.
    """
    if (values := sum(map(answer.count, b",[{"))) > MOST_VALUES:
        raise ValueError(f"has about {values} values, more than {MOST_VALUES}; write large arrays as base64")
    try:
        return json.loads(
            answer.decode("utf-8"), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_each_once,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error})") from error


def _finite(text: str) -> float:
    if not math.isfinite(result := float(text)):
        raise ValueError(f"{text:.80} is no number of JSON")
    return result


def _each_once(members: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(members)
    if len(result) < len(members):
        raise ValueError("an object has a member twice")
    return result


def encode(name: str, kind: str, value: Any) -> Json:
    """Return a value of this type as JSON. `name` is for messages. An array keeps its dtype and shape.

    Raises:
        SpecError: if the value of an array type is not an array of numbers, because it cannot be written.
    """
    if value is None:
        return None
    if kind == "text":
        return "{}/{}".format(*value.as_integer_ratio()) if isinstance(value, Fraction) else value
    if kind in PARAMETERS:
        return {field.name: _parameter(field, getattr(value, field.name)) for field in fields(value)}
    if kind in RECORDS:
        return {inner: encode(inner, of, getattr(value, inner)) for inner, of in RECORDS[kind].items()}
    wanted = array_of(kind)
    assert wanted is not None, kind
    if not wanted.axes:
        return _written(DTYPES[wanted.kind](value).item())
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise SpecError(name, getattr(value, "dtype", type(value)), "must be an array of floats, integers or bools")
    return _array(value)


def _parameter(field: "Field[Any]", value: Any) -> Json:
    if field.type is Fraction:
        return "{}/{}".format(*value.as_integer_ratio())
    if field.type is float:
        return float(value).hex()
    return [float(x).hex() for x in value] if isinstance(value, tuple) else value


def _array(value: np.ndarray[Any, Any]) -> Json:
    dtype = {"f": f"float{32 if value.itemsize < 8 else 64}", "b": "bool"}.get(value.dtype.kind, "int64")
    array = np.ascontiguousarray(value, dtype=np.dtype(dtype).newbyteorder("<"))
    if array.nbytes > LARGE or (array.size == 0 and value.ndim > 1):
        return {"dtype": dtype, "shape": list(value.shape), "base64": base64.b64encode(array.tobytes()).decode("ascii")}
    leaves = np.empty(value.size, dtype=object)
    leaves[:] = [_written(x) for x in array.ravel().tolist()]
    return leaves.reshape(value.shape).tolist()


def _written(x: Any) -> Json:
    if isinstance(x, float):
        return x.hex()
    return x if isinstance(x, bool) or abs(x) <= EXACT else str(x)


def number(value: Json) -> float | int | bool:
    """Return a number from its JSON.

    Raises:
        ValueError: if the value is not a number.
    """
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str) and FLOAT.fullmatch(value):
        return float.fromhex(value)
    if isinstance(value, str) and INTEGER.fullmatch(value):
        return int(value)
    raise ValueError(f"holds {value!r:.80}, which is no number")


def decode_error_value(value: Json) -> Any:
    """Return the value of a refusal: numbers as numbers, other text unchanged."""
    if isinstance(value, list):
        return [decode_error_value(inner) for inner in value]
    try:
        return number(value)
    except ValueError:
        return value


def decode(kind: str, value: Json, check: Check) -> Any:
    """Convert JSON to a value of this type. Each number and array passes through `check`.

    Raises:
        ValueError: if the JSON has a different form. The message names the member of a record.
    """
    if kind == "text":
        return str(value)
    if kind in PARAMETERS:
        result = PARAMETER_CLASSES[kind]
        return result(**{field.name: _parameter_of(field, value[field.name]) for field in fields(result)})
    if kind in RECORDS:
        return CLASSES[kind](**_members(RECORDS[kind], value, check))
    wanted = array_of(kind)
    assert wanted is not None, kind
    if value is None:
        return check(wanted, None)
    return check(wanted, _array_of(value, wanted) if isinstance(value, list | dict) else number(value))


def _members(kinds: Mapping[str, str], value: Json, check: Check) -> dict[str, Any]:
    optional = {name for name, kind in kinds.items() if kind.endswith("or null")}
    if not isinstance(value, dict) or value.keys() | optional != kinds.keys():
        raise ValueError(f"must be an object of {', '.join(kinds)}")
    result = {}
    for name, kind in kinds.items():
        try:
            result[name] = decode(kind, value.get(name), check)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
    return result


def _parameter_of(field: "Field[Any]", value: Json) -> Any:
    if field.type is Fraction:
        return Fraction(value)
    if isinstance(value, list):
        return tuple(number(x) for x in value)
    return number(value) if field.type in (int, float) else value


def _array_of(value: Json, wanted: Array) -> np.ndarray[Any, Any]:
    """Return the array as it was written. An empty array has the expected dtype."""
    if isinstance(value, dict):
        if value.keys() != {"dtype", "shape", "base64"} or value["dtype"] not in WRITTEN:
            raise ValueError(f"must have dtype (one of {', '.join(WRITTEN)}), shape and base64")
        shape = value["shape"]
        if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"has shape {shape!r:.80}, which is no list of sizes")
        dtype = np.dtype(value["dtype"])
        raw = np.frombuffer(base64.b64decode(value["base64"], validate=True), dtype.newbyteorder("<"))
        result: np.ndarray[Any, Any] = raw.reshape(shape).astype(dtype)
        return result
    leaves = np.array(value, dtype=object)
    numbers = [number(x) for x in leaves.ravel().tolist()]
    if len({type(x) for x in numbers} - {int, float}) > 0 and {type(x) for x in numbers} != {bool}:
        raise ValueError("holds bools and other numbers")
    if not numbers:
        return np.zeros(leaves.shape, DTYPES[wanted.kind])
    kind = float if any(isinstance(x, float) for x in numbers) else type(numbers[0])
    return np.array(numbers, dtype=DTYPES[kind.__name__]).reshape(leaves.shape)


def as_it_is(wanted: Array, result: Any) -> Any:
    """Accept any value, because an engine must receive the values that it has to refuse."""
    return result


def sizes(op: Op, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the result's axes that the arguments determine, by name."""
    result: dict[str, int] = {}
    for name, kind in op.arguments.items():
        value, wanted = arguments[name], array_of(kind)
        if kind == "crystalcache":
            result |= {"k_intra": value.k_intra, "k_cross": value.k_cross}
        elif wanted is not None and isinstance(value, np.ndarray):
            for axis, size in zip(wanted.axes, value.shape, strict=False):
                result.setdefault(axis.removesuffix(" + 1"), size - axis.endswith(" + 1"))
        elif kind == "int":
            result[name] = int(value)
    return result


def checked(known: dict[str, int]) -> Check:
    """Return a check that converts values to float64, int64 or bool, and compares their axes with `known`.

    The check adds unknown axes to `known`. The check raises ValueError for a wrong dtype or shape, and for NaN or an
    infinity that the type does not allow.
    """
    def check(wanted: Array, result: Any) -> Any:
        if result is None and "null" in wanted.beside:
            return None
        x = np.asarray(result)
        if wanted.kind == "float" and x.dtype.kind in "if":
            x = x.astype(np.float64)
        if x.dtype.kind != wanted.kind[0]:
            raise ValueError(f"must be of type {wanted.kind}")
        _check_shape(x.shape, wanted, known)
        if wanted.kind == "float":
            odd = ~np.isfinite(x) & ~(np.isnan(x) & ("nan" in wanted.beside)) & ~((x > 0) & ("inf" in wanted.beside))
            if odd.any():
                raise ValueError(f"holds {x[odd][0]}, which its type does not admit")
        return x if wanted.axes else x.item()

    return check


def _check_shape(shape: tuple[int, ...], wanted: Array, known: dict[str, int]) -> None:
    fits = len(shape) == len(wanted.axes)
    for axis, size in zip(wanted.axes, shape, strict=False):
        more = axis.endswith(" + 1")
        fits = fits and known.setdefault(axis.removesuffix(" + 1"), size - more) == size - more
    if not fits:
        sizes_ = ", ".join(f"{axis} = {size}" for axis, size in known.items())
        raise ValueError(f"is of shape {list(shape)}, not [{', '.join(wanted.axes)}] with {sizes_}")
