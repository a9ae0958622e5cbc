"""Expected results for large inputs. If the oracle in plain Python is too slow, the full-size oracle is used."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.checks.scale_checks import chosen
from conformance.oracles.scale import decode, s1, stages
from conformance.oracles.scale.s1 import Ranked
from conformance.vectors.codec import digest, expanded, is_compact, summary, words
from conformance.vectors.files import Json, Results
from lab.vector_writer.brute_force import Operation
from lab.vector_writer.expected import OPERATIONS
from spec.arrays import IntMatrix, Matrix
from spec.parameters import CrystalCacheParameters
from spec.records import CoAttention

LONG = 64  # maximum number of values in a result that is not shortened
NEAR_TIE = 2.0**-40


def integers(values: Json) -> Any:
    return np.array(values, dtype=np.int64)


def edges(i: Json) -> stages.Columns:
    return stages.edge_columns(CoAttention(
        i["start"], np.ones(len(i["intra"])), integers(i["intra"]), np.array(i["intra_weight"]), integers(i["cross"]),
        np.array(i["cross_weight"]),
    ))


def listed(result: Ranked, k: int, tau: float) -> tuple[IntMatrix, Matrix]:
    index = chosen(result, k, tau)
    return index, np.where(index >= 0, result.weight[:, :k], 0.0)


def coattention(i: Json, p: CrystalCacheParameters) -> Results:
    result = s1.coattention(
        np.array(i["q"]), np.array(i["k"]), integers(i["positions"]), p, i["scaling"], i["softcap"],
        lambda q, k: np.zeros(q.shape[1]), lambda error, Q: np.zeros((Q, Q)), 0.0,
    )
    intra, intra_weight = listed(result.intra, p.k_intra, p.tau_intra)
    cross, cross_weight = listed(result.cross, p.k_cross, p.tau_cross)
    return {"start": result.start, "salience": result.salience, "intra": intra, "intra_weight": intra_weight,
            "cross": cross, "cross_weight": cross_weight}


def trunks(i: Json, p: CrystalCacheParameters) -> Results:
    offsets = stages.trunks(np.array(i["ends"]), edges(i), i["start"], p)
    return {"offsets": offsets, "impact": stages.trunk_impact(np.array(i["impact"]), offsets - i["start"])}


def impact(i: Json, p: CrystalCacheParameters) -> Results:
    return {"M": stages.token_impact(np.array(i["salience"]), stages.counts(integers(i["token_ids"])), p)}


def graph(i: Json, p: CrystalCacheParameters) -> Results:
    offsets = integers(i["offsets"])
    sizes = np.diff(offsets)
    result = stages.pairs(edges(i), offsets[:-1])
    w = stages.pair_weights(result, sizes)
    assert (np.abs(w - p.tau_edge) > NEAR_TIE).all(), "a weight that is pruned or not as rounding has it"
    stays = w > p.tau_edge
    a, b, w = result.a[stays], result.b[stays], w[stays]
    rows, columns, values = np.concatenate([a, b]), np.concatenate([b, a]), np.concatenate([w, w])
    order = np.lexsort((columns, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(sizes)))])
    degree = stages.degrees(indptr, values[order])
    return {"indptr": indptr, "indices": columns[order], "weights": values[order], "degree": degree,
            "D": stages.crystallization(degree, p)}


def score(i: Json, p: CrystalCacheParameters) -> Results:
    return {"score": stages.score(np.array(i["D"]), np.array(i["impact"]), np.array(i["protected"]), p)}


def dissolve(i: Json, p: CrystalCacheParameters) -> Results:
    offsets = integers(i["offsets"])
    result = stages.dissolve(
        np.array(i["score"]), offsets, np.array(i["impact"]), np.array(i["D"]), np.array(i["protected"]), i["B"],
        p.N_min,
    )
    return {"kept": result.kept + offsets[0], "ratio": result.ratio, "D": result.D}


def activation(i: Json, p: CrystalCacheParameters) -> Results:
    return {"active": decode.activation(np.array(i["inverse_norms"]), integers(i["offsets"]), p.theta_act)}


FULL_SIZE = {
    "coattention": ("s1.coattention", coattention), "trunks": ("stages.trunks", trunks),
    "impact": ("stages.token_impact", impact), "graph": ("stages.pair_weights", graph),
    "score": ("stages.score", score), "dissolve": ("stages.dissolve", dissolve),
    "activation": ("decode.activation", activation),
}
LARGE_OPERATIONS = OPERATIONS | {
    name: Operation(f"conformance.oracles.scale.{oracle}", results, OPERATIONS[name].items)
    for name, (oracle, results) in FULL_SIZE.items()
}


def shortened(value: Any, bits: int | None) -> Json:
    """Return a long or bounded result as a summary, and any other result as plain numbers.

    The summary of a bounded result is on the grid 2^-bits.
    """
    array = np.array(value)
    if bits is None and array.size <= LONG:
        return array.tolist()
    assert bits is None or not unsure(array, bits), "a value too near a step of the grid: take another seed"
    return summary(array, bits)


def generate(inputs: Mapping[str, Json]) -> dict[str, Json]:
    """Return shape and digest of each compact input except text, so that a reader can compare them."""
    arrays = {name: np.array(x) for name, x in expanded(inputs).items() if is_compact(inputs[name])}
    return {
        name: [list(x.shape), digest(words(x.ravel(), None))] for name, x in arrays.items() if x.dtype.kind != "U"
    }


def unsure(values: Any, bits: int) -> int:
    """Return the number of values for which an error within the bound can change the rounding to the grid.

    A result with such a value cannot be summarised.
    """
    x = np.array(values, dtype=np.float64).ravel()
    x = x[~np.isnan(x)]
    steps = x * 2.0**bits
    off = np.abs(steps - np.floor(steps) - 0.5) * 2.0**-bits
    return int((off <= 2.0 ** (-2 * bits) * np.maximum(1.0, np.abs(x))).sum())
