"""Compact values of large vectors, as spec/vectors/README.md has them: inputs from a seed, results as digests."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conformance.strategies.numbers import Numbers, mixed
from conformance.vectors.files import Json

BLOCKS, SMALLEST = 16, 32  # a summary has at most so many blocks, of at least so many values
NAN_BITS, NAN_STEP = np.uint64(0x7FF8_0000_0000_0000), np.uint64(2**63)  # what a digest reads where there is NaN

Inputs = Mapping[str, Any]


def is_compact(value: Json) -> bool:
    """Whether a value, or one inside its lists, is an object."""
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(is_compact, value)))


def expanded(inputs: Mapping[str, Json]) -> dict[str, Json]:
    """Inputs without compact values: plain numbers in nested lists."""
    found: dict[str, Json] = {}
    for name, value in inputs.items():
        found[name] = _array(value, found).tolist() if is_compact(value) else value
    return found


def _array(value: Json, others: Inputs) -> Any:
    """An array; a list of compact values is a stack of them."""
    if isinstance(value, Mapping):
        return FORMS[value["form"]]({name: _whole(x) for name, x in value.items()}, others)
    if is_compact(value):
        return np.stack([_array(x, others) for x in value])
    return np.array(_whole(value))


def _whole(value: Json) -> Json:
    """Digits in quotes as an integer, in every depth: one beyond 2^53."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return [_whole(x) for x in value] if isinstance(value, list | tuple) else value


def _integers(form: Any, others: Inputs) -> Any:
    size = int(np.prod(form["shape"]))
    return Numbers(form["seed"]).integers(form["low"], form["high"], size).reshape(form["shape"])


def _fractions(form: Any, others: Inputs) -> Any:
    return Numbers(form["seed"]).fractions(int(np.prod(form["shape"])), form["bits"]).reshape(form["shape"])


def _permutation(form: Any, others: Inputs) -> Any:
    return Numbers(form["seed"]).permutation(form["n"])


def _choice(form: Any, others: Inputs) -> Any:
    at = Numbers(form["seed"]).integers(0, len(form["of"]), int(np.prod(form["shape"])))
    return np.array(form["of"])[at].reshape(form["shape"])


def _runs(form: Any, others: Inputs) -> Any:
    values, lengths = zip(*form["of"], strict=True)
    return np.repeat(np.array(values), lengths, axis=0)


def _sums(form: Any, others: Inputs) -> Any:
    return np.cumsum(np.concatenate([[form["start"]], _array(form["of"], others)]))


def _joined(form: Any, others: Inputs) -> Any:
    return np.concatenate([_array(part, others) for part in form["of"]], axis=form["axis"])


def _neighbours(form: Any, others: Inputs) -> Any:
    """Of each token the first k admitted places, in the order of the steps from a drawn one on."""
    (n, k), steps, C = form["shape"], np.array(form["steps"]), form["C"]
    at = np.arange(n)[:, None]
    first = Numbers(form["seed"]).integers(0, len(steps), n)[:, None]
    place = at + steps[(first + np.arange(len(steps))) % len(steps)]
    admitted = place // C < at // C if form["earlier"] else place // C == at // C
    admitted &= (place >= 0) & (place < n)
    order = np.argsort(~admitted, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(np.where(admitted, place + form["start"], -1), order, axis=1)
    return np.pad(chosen, ((0, 0), (0, k - chosen.shape[1])), constant_values=-1)


def _falling(form: Any, others: Inputs) -> Any:
    lists = np.array(others[form["along"]])
    drawn = Numbers(form["seed"]).fractions(lists.size, form["bits"]).reshape(lists.shape)
    return np.where(lists >= 0, -np.sort(-drawn, axis=1), 0.0)


def _signs(form: Any, others: Inputs) -> Any:
    bits = _array(form["of"], others)[..., None] >> np.arange(form["bits"]) & 1
    return (2 * bits - 1) * float(form["scale"])


FORMS: Mapping[str, Callable[[Any, Inputs], Any]] = {
    "integers": _integers, "fractions": _fractions, "permutation": _permutation, "choice": _choice, "runs": _runs,
    "sums": _sums, "joined": _joined, "neighbours": _neighbours, "falling": _falling, "signs": _signs,
}


def words(flat: Any, bits: int | None) -> Any:
    """What a digest reads of each value, as uint64."""
    if flat.dtype.kind != "f":
        return flat.astype(np.int64).view(np.uint64)
    missing = np.isnan(flat)
    if bits is None:
        return np.where(missing, NAN_BITS, np.ascontiguousarray(flat, dtype=np.float64).view(np.uint64))
    steps = np.floor(np.where(missing, 0.0, flat) * 2.0**bits + 0.5).astype(np.int64).view(np.uint64)
    return np.where(missing, NAN_STEP, steps)


def _block(length: int) -> int:
    """Values of one digest: a power of two, at least 32, so that there are at most 16 digests."""
    return max(SMALLEST, 1 << (-(-length // BLOCKS) - 1).bit_length())


def summary(values: Any, bits: int | None = None, block: int | None = None) -> dict[str, Json]:
    """The shape, the first value of each block, and a digest of each: to the bit, or on the grid 2^-bits."""
    array = np.array(values)
    flat = array.ravel()
    block = block or _block(len(flat))
    read = words(flat, bits)
    return {
        "shape": list(array.shape), "block": block, "first": flat[::block].tolist(),
        "digests": [digest(read[at : at + block]) for at in range(0, len(read), block)],
        **({} if bits is None else {"bits": bits}),
    }


def digest(read: Any) -> str:
    return f"{int(mixed(read, np.arange(1, len(read) + 1)).sum()):016x}"


def mismatches(name: str, found: Any, want: Mapping[str, Json]) -> Iterator[str]:
    """How a result differs from its summary: in kind, in shape, and in its first wrong block."""
    got = np.array(found)
    if got.dtype.kind != np.array(want["first"]).dtype.kind:
        yield f"{name} is of {got.dtype}, not of {np.array(want['first']).dtype}"
        return
    here = summary(got, want.get("bits"), want["block"])
    if here["shape"] != want["shape"]:
        yield f"{name} is of shape {here['shape']}, not {want['shape']}"
    pairs = zip(here["digests"], want["digests"], strict=False)
    wrong = [at for at, (ours, theirs) in enumerate(pairs) if ours != theirs]
    if wrong:
        at = wrong[0] * want["block"]
        yield (
            f"{name} differs between its values {at} and {at + want['block']}, the first of which is "
            f"{here['first'][wrong[0]]} where {want['first'][wrong[0]]} is expected ({len(wrong)} blocks are wrong)"
        )
