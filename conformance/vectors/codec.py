"""Conversion of JSON values to arguments of functions, by annotation, and of results to mappings by name.

A decode state is flat in JSON, with one name per field, and can also be converted to the oracle's model. A large test
vector stores a seed instead of the inputs, and a digest instead of the results. spec/vectors/README.md describes the
forms.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, get_args, get_origin

import numpy as np

from conformance.oracles.decode import Model, Pair, Trunk
from conformance.oracles.s6 import tokens
from conformance.strategies.numbers import Numbers, mixed
from conformance.vectors.files import Json, nestedkv_parameters
from spec.budget import Budget, parse_budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights
from spec.parameters import CrystalCacheParameters, NestedKVParameters
from spec.records import CoAttention, Edges, Trunks

WEIGHTS = ("indptr", "indices", "weights")
STATE = (
    "seen", "step", "positions", "offsets", "impact", "inverse_norms", "trunk_impact", "D", *WEIGHTS, "ids", "counts",
    "mu", "sigma", "tail_ids", "tail_inverse_norms",
)


def pairs_of(i: Json, names: Sequence[int]) -> dict[Pair, float]:
    """Return W by unordered pair of names, from the rows of its CSR form."""
    return {
        frozenset({names[g], names[i["indices"][e]]}): i["weights"][e]
        for g, (start, stop) in enumerate(pairwise(i["indptr"])) for e in range(start, stop)
    }


def csr_of(W: Mapping[Pair, float], names: Sequence[int]) -> dict[str, Any]:
    """Return the CSR form of W, with ascending columns."""
    rows = [[(b, W[frozenset({g, h})]) for b, h in enumerate(names) if frozenset({g, h}) in W] for g in names]
    entries = [entry for row in rows for entry in row]
    return {
        "indptr": [sum(len(row) for row in rows[:g]) for g in range(len(rows) + 1)],
        "indices": [b for b, _ in entries], "weights": [w for _, w in entries],
    }


def budget_of(budget: Json) -> Fraction | int:
    """Return a written budget as the oracles use it. A share is rounded up to a multiple of 10^-6."""
    whole = tokens(budget, 10**6) if isinstance(budget, float) or not str(budget).isdecimal() else None
    return int(budget) if whole is None else Fraction(whole, 10**6)


def model_of(i: Json) -> Model:
    """Return the oracle's model of a state. The name of a trunk is its first live position."""
    members = [i["positions"][start:stop] for start, stop in pairwise(i["offsets"])]
    trunks = [Trunk(g[0], g, i["trunk_impact"][at], i["D"][at]) for at, g in enumerate(members)]
    return Model(
        budget_of(i["budget"]), i["seen"], i["step"], trunks,
        dict(zip(i["positions"], i["impact"], strict=True)),
        dict(zip(i["positions"], i["inverse_norms"], strict=True)),
        pairs_of(i, [g.name for g in trunks]), Counter(dict(zip(i["ids"], i["counts"], strict=True))), i["mu"],
        i["sigma"], list(zip(i["tail_ids"], i["tail_inverse_norms"], strict=True)),
    )


def results_of(now: Model) -> dict[str, Any]:
    """Return the fields of a state by their names in `STATE`."""
    order = [i for g in now.trunks for i in g.members]
    ids = sorted(token for token, number in now.counts.items() if number)
    return {
        "seen": now.seen, "step": now.step, "positions": order,
        "offsets": [sum(len(g.members) for g in now.trunks[:at]) for at in range(len(now.trunks) + 1)],
        "impact": [now.M[i] for i in order], "inverse_norms": [now.norm[i] for i in order],
        "trunk_impact": [g.M_bar for g in now.trunks], "D": [g.D for g in now.trunks],
        **csr_of(now.W, [g.name for g in now.trunks]), "ids": ids, "counts": [now.counts[token] for token in ids],
        "mu": now.mu, "sigma": now.sigma, "tail_ids": [token for token, _ in now.tail],
        "tail_inverse_norms": [norm for _, norm in now.tail],
    }


CHAIN: Json = {"indptr": [0, 1, 3, 4], "indices": [1, 0, 2, 1], "weights": [0.5, 0.5, 0.25, 0.25]}
# Fields of a state with three tokens in the tail.
WAITING = {"tail_ids": [3, 2, 5], "tail_inverse_norms": [0.5, float("inf"), 1.0], "seen": 14, "step": 3}


def state(**changes: Json) -> dict[str, Any]:
    """Return a state of three trunks with 8 live tokens of 11, edges in a chain, and an empty tail."""
    return {
        "budget": 8, "seen": 11, "step": 0, "positions": [0, 1, 2, 5, 6, 7, 9, 10], "offsets": [0, 3, 6, 8],
        "impact": [4.0, 1.0, 2.0, 3.0, 3.0, 1.0, 0.5, 8.0],
        "inverse_norms": [1.0, 0.25, 0.125, 1.0, 0.5, 0.125, 0.25, 0.25], "trunk_impact": [2.0, 3.0, 4.0],
        "D": [0.5, 0.25, 0.75], **CHAIN, "ids": [2, 3, 7], "counts": [2, 8, 1], "mu": 0.5, "sigma": 0.25,
        "tail_ids": [], "tail_inverse_norms": [], **changes,
    }


Item = Callable[[Any, CrystalCacheParameters], Mapping[str, object]]


def floats(values: Json) -> Any:
    """Return a float64 array in which null becomes NaN."""
    return np.array(values, dtype=np.float64)


def integers(values: Json) -> Any:
    return np.array(values, dtype=np.int64)


def flags(values: Json) -> Any:
    return np.array(values, dtype=np.bool_)


def named(names: Sequence[str], values: Sequence[object]) -> Mapping[str, object]:
    return dict(zip(names, values, strict=True))


def plain(value: Any) -> Any:
    """Convert arrays and NumPy numbers to lists and numbers of Python."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plain(x) for x in value] if isinstance(value, list | tuple) else value


def record(i: Json) -> CoAttention:
    """Return neighbours as a `CoAttention`. Its salience is 1, because it is not used."""
    return CoAttention(
        i["start"], np.ones(len(i["intra"])), integers(i["intra"]), floats(i["intra_weight"]), integers(i["cross"]),
        floats(i["cross_weight"]),
    )


def trunks_of(i: Json) -> Trunks:
    """Return offsets as `Trunks`. Their impact is 1, because it is not used."""
    offsets = integers(i["offsets"])
    return Trunks(offsets, np.ones(len(offsets) - 1))


def weights_of(i: Json) -> TrunkWeights:
    return TrunkWeights(integers(i["indptr"]), integers(i["indices"]), floats(i["weights"]))


def edges_of(i: Json) -> Edges:
    first, second, weight = zip(*i["edges"], strict=True) if i["edges"] else ((), (), ())
    return Edges(integers(first), integers(second), floats(weight))


def table_of(i: Json) -> LiveTrunks:
    """Return the live trunks of a state. Missing columns are 1."""
    n, m = i["offsets"][-1], len(i["offsets"]) - 1
    columns = {"impact": n, "inverse_norms": n, "trunk_impact": m}
    given = {name: floats(i.get(name, [1.0] * size)) for name, size in columns.items()}
    return LiveTrunks(integers(i.get("positions", range(n))), integers(i["offsets"]), **given)


def state_of(i: Json) -> DecodeState:
    """Return the record of a flat state."""
    return DecodeState(
        parse_budget(i["budget"]), i["seen"], i["step"], table_of(i), floats(i["D"]), weights_of(i),
        integers(i["ids"]), integers(i["counts"]), i["mu"], i["sigma"], tuple(i["tail_ids"]),
        tuple(i["tail_inverse_norms"]),
    )


def fields_of(state: DecodeState) -> Mapping[str, Any]:
    """Return a state as a flat mapping, without its budget."""
    everything = {**vars(state), **vars(state.live), **state.W._asdict()}
    return {name: everything[name] for name in STATE}


RECORDS: Mapping[Any, Callable[[Json], object]] = {
    CoAttention: record, Trunks: trunks_of, TrunkWeights: weights_of, Edges: edges_of, LiveTrunks: table_of,
    DecodeState: state_of, NestedKVParameters: nestedkv_parameters,
}
"""Records whose fields are separate inputs."""


def read(kind: Any, name: str, i: Json, p: CrystalCacheParameters) -> Any:
    """Return the argument with this name and annotation, from the inputs or otherwise from the parameters."""
    if kind is CrystalCacheParameters:
        return p
    if kind in RECORDS:
        return RECORDS[kind](i)
    value = i[name] if name in i else getattr(p, name)
    if kind is Budget:
        return parse_budget(value)
    return converted(kind, value)


def converted(kind: Any, value: Json) -> Any:
    """Return a value with the type of an annotation: an array, a set, a tuple, or a list of them."""
    if get_origin(kind) in (frozenset, tuple):
        return get_origin(kind)(value)
    if get_origin(kind) is Sequence:
        return [converted(get_args(kind)[0], one) for one in value]
    if kind is np.ndarray:  # `Cube` of a sequence of layers, the only array without a dtype in its annotation
        return np.array(value, dtype=np.float64)
    kinds: Any = next((one.dtypes for one in (kind, *get_args(kind)) if hasattr(one, "dtypes")), ())
    return np.array(value, dtype="float64" if "float64" in kinds else kinds[0]) if kinds else value


def call(function: Callable[..., Any], i: Json, p: CrystalCacheParameters, **given: object) -> Any:
    """Call a function with a vector's inputs and return the result. An argument without a value keeps its default."""
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


def results(result: Any, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return the result of a function by the names of a vector's results. A record or a mapping keeps its names."""
    if isinstance(result, Mapping):
        return result
    if isinstance(result, DecodeState):
        return fields_of(result)
    if not names:
        return vars(result) if is_dataclass(result) else dict(result._asdict())
    return {names[0]: result} if len(names) == 1 else named(names, result)


BLOCKS, SMALLEST = 16, 32  # Maximum number of blocks of a summary, and minimum number of values of a block.
NAN_BITS, NAN_STEP = np.uint64(0x7FF8_0000_0000_0000), np.uint64(2**63)  # Words of a digest for NaN.

Inputs = Mapping[str, Any]


def is_compact(value: Json) -> bool:
    """Return True if a value, or a value inside its lists, is an object."""
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(map(is_compact, value)))


def expanded(inputs: Mapping[str, Json]) -> dict[str, Json]:
    """Return inputs without compact values: plain numbers in nested lists."""
    result: dict[str, Json] = {}
    for name, value in inputs.items():
        result[name] = _array(value, result).tolist() if is_compact(value) else value
    return result


def _array(value: Json, others: Inputs) -> Any:
    """Return a compact or plain value as an array. A list of compact values is stacked."""
    if isinstance(value, Mapping):
        return FORMS[value["form"]]({name: _whole(x) for name, x in value.items()}, others)
    if is_compact(value):
        return np.stack([_array(x, others) for x in value])
    return np.array(_whole(value))


def _whole(value: Json) -> Json:
    """Convert digits in quotes to integers, at every depth. Integers beyond 2^53 are written in quotes."""
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
    """Return the first k allowed places of each token. The steps start at a random step and wrap around."""
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
    """Return the word that a digest reads for each value, as uint64."""
    if flat.dtype.kind != "f":
        return flat.astype(np.int64).view(np.uint64)
    missing = np.isnan(flat)
    if bits is None:
        return np.where(missing, NAN_BITS, np.ascontiguousarray(flat, dtype=np.float64).view(np.uint64))
    steps = np.floor(np.where(missing, 0.0, flat) * 2.0**bits + 0.5).astype(np.int64).view(np.uint64)
    return np.where(missing, NAN_STEP, steps)


def _block(length: int) -> int:
    """Return the number of values of one digest: a power of two, at least 32, for at most 16 digests."""
    return max(SMALLEST, 1 << (-(-length // BLOCKS) - 1).bit_length())


def summary(values: Any, bits: int | None = None, block: int | None = None) -> dict[str, Json]:
    """Return the shape of values, and the first value and the digest of each block.

    The digest is exact to the bit, or on the grid 2^-bits.
    """
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


def mismatches(name: str, result: Any, want: Mapping[str, Json]) -> Iterator[str]:
    """Yield how a result differs from its summary: in type, in shape, or in the first wrong block."""
    got = np.array(result)
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
