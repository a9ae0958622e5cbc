"""Operations of the vectors, and plain Python for the items that `conformance.oracles` covers only inside a stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

from conformance.oracles.s1 import Edge
from conformance.oracles.s4 import cross_weights
from conformance.vectors.codec import call, results
from conformance.vectors.files import Json, Results
from spec.parameters import CrystalCacheParameters


def kv_bytes(L: int, H_kv: int, d: int, n: int, batch: int, b: int) -> int:
    """Return Eq. 4, counted layer by layer and head by head."""
    return sum(b * d * n for _ in range(batch) for _ in range(L) for _ in range(H_kv) for _ in ("key", "value"))


def observed_layer(full_layers: list[int], i: int) -> int:
    """Return the layer of CC-OBSERVED-LAYER. Layers are removed one by one, from the end that the sign of i selects."""
    left = sorted(full_layers, reverse=i < 0)
    for _ in range(-i - 1 if i < 0 else i):
        left.pop(0)
    return left[0]


def trunk_lists(offsets: Sequence[int]) -> list[list[int]]:
    """Return the trunks as lists of positions."""
    return [list(range(start, stop)) for start, stop in pairwise(offsets)]


def edge_list(
    start: int, intra: Sequence[Sequence[int]], intra_weight: Sequence[Sequence[float]],
    cross: Sequence[Sequence[int]], cross_weight: Sequence[Sequence[float]],
) -> list[Edge]:
    """Return the edges of Eq. 15 from the padded arrays, in the order of CC-EDGES."""
    E: list[Edge] = []
    for i, row in enumerate(intra):
        E += [(start + i, j, intra_weight[i][rank]) for rank, j in enumerate(row) if j >= 0]
    for j, row in enumerate(cross):
        E += [(i, start + j, cross_weight[j][rank]) for rank, i in enumerate(row) if i >= 0]
    return E


def cut(sizes: Sequence[int], protected: Sequence[bool], B: int) -> int:
    """Return c_0 of Eq. 31: evict unprotected tokens one by one, while more than B are kept."""
    T_alive = sum(size for size, shut in zip(sizes, protected, strict=True) if not shut)
    kept, c_0 = sum(sizes), 0
    while kept > B and c_0 < T_alive:
        kept, c_0 = kept - 1, c_0 + 1
    return c_0


def pairs(E: Sequence[Edge], offsets: Sequence[int]) -> list[list[Any]]:
    """Return a row (a, b, number of edges, sum of weights) of Eq. 24 for each pair of trunks with an edge."""
    trunks = trunk_lists(offsets)
    rows: list[list[Any]] = []
    for a, g_a in enumerate(trunks):
        for b in range(a + 1, len(trunks)):
            weights = cross_weights(E, g_a, trunks[b])
            if weights:
                total = 0.0
                for w in weights:
                    total += w
                rows.append([a, b, len(weights), total])
    return rows


def rows_of(indptr: Sequence[int], weights: Sequence[float]) -> list[list[float]]:
    """Return the rows of a CSR matrix without zeros."""
    return [list(weights[start:stop]) for start, stop in pairwise(indptr)]


def score(D: Sequence[float], M_tilde: Sequence[float], alpha: float) -> list[float]:
    """Return the scores of Eq. 29. A trunk that is not scored stays NaN."""
    return [m if m != m else (d if d > alpha * m else alpha * m) for d, m in zip(D, M_tilde, strict=True)]


def dissolved_D(D: Sequence[float], r: Sequence[float]) -> list[float]:
    """Return D of Eq. 34, with its three cases."""
    after = []
    for D_g, r_g in zip(D, r, strict=True):
        if r_g == 0:
            after.append(0.0)
        else:
            after.append(D_g if r_g == 1 else r_g * D_g)
    return after


def compact(K: list[Any], V: list[Any], R: Sequence[int]) -> dict[str, list[Any]]:
    """Return K and V of Eq. 35, head by head and position by position."""
    return {name: [[head[at] for at in R] for head in cache] for name, cache in (("K", K), ("V", V))}


def renewed_D(D: Sequence[float], active: Sequence[bool], renewal: float) -> list[float]:
    """Return D after the direct renewal of the essay."""
    return [d + renewal * (1 - d) if on else d for d, on in zip(D, active, strict=True)]


@dataclass(frozen=True)
class Operation:
    """Operation, under the id of an item or the name of a stage. `conformance.checks.vector_checks` has its bound.

    Attributes:
        oracle: The names of the functions that confirm the results.
        results: Function of inputs and parameters that returns the expected results.
        items: The items that a stage covers.
        reference: The name in the package `reference` of the function to call with the inputs as keyword arguments.
            Empty for a stage, and for an item that has an adapter in `item_vectors`.
        gives: The names of this function's results. Empty if it returns a record.
    """

    oracle: str
    results: Callable[[Any, CrystalCacheParameters], Results]
    items: Sequence[str] = ()
    reference: str = ""
    gives: Sequence[str] = ()


def direct(oracle: str, gives: str, reference: str = "", items: Sequence[str] = ()) -> Operation:
    """Return an operation whose oracle is also called with the inputs as keyword arguments.

    Args:
        gives: names of the results, separated by spaces.
    """
    def run(i: Json, p: CrystalCacheParameters) -> Results:
        return results(call(resolve_name(oracle), i, p), gives.split())

    return Operation(oracle, run, items, reference, gives.split())


def encoded(value: Json) -> Json:
    """Return the value with all floats as text, at any depth."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: encoded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(inner) for inner in value]
    return value
