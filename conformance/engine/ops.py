"""Operations of an engine: names, types and shapes of arguments and results, one row for each operation.

The tables of spec/protocol.md are generated from this table. A type is a number (`float`, `int`), an array (`bool[m]`,
`float[n, k]`), a record, or a set of parameters. The word ` or ` adds other allowed values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from spec.backend import FAMILIES

PARAMETERS = ("crystalcache", "nestedkv")


@dataclass(frozen=True)
class Op:
    """Arguments of an operation, in the order of its stage in `spec.backend`, and its result.

    Attributes:
        vector: name of the result in the vectors, or "" if the result is a record. None if the vectors do not call the
            operation.
    """

    arguments: Mapping[str, str]
    result: str
    vector: str | None = None


@dataclass(frozen=True)
class Array:
    """A number (no axes) or an array, with the allowed values besides finite numbers: nan, inf or null."""

    kind: str
    axes: tuple[str, ...]
    beside: frozenset[str]


@dataclass(frozen=True)
class KeptSets:
    """Kept sets of a method: ascending positions of each group, offsets of the groups, and the score of each token.

    The formula of the method's item defines the scores. An engine may leave the scores out.
    """

    positions: Any
    offsets: Any
    scores: Any = None


@cache
def array_of(text: str) -> Array | None:
    """Parse the type of a number or an array. Return None for the name of a record or of parameters."""
    match = re.fullmatch(r"(float|int|bool)(?:\[(.+?)\])?((?: or \w+)*)", text)
    if match is None:
        return None
    kind, axes, beside = match.groups()
    return Array(kind, tuple(axes.split(", ")) if axes else (), frozenset(beside.split(" or ")[1:]))


RECORDS: Mapping[str, Mapping[str, str]] = {
    "CoAttention": {
        "start": "int", "salience": "float[n]", "intra": "int[n, k_intra]", "intra_weight": "float[n, k_intra]",
        "cross": "int[n, k_cross]", "cross_weight": "float[n, k_cross]",
    },
    "Trunks": {"offsets": "int[m + 1]", "impact": "float[m]"},
    "TrunkGraph": {
        "indptr": "int[m + 1]", "indices": "int[edges]", "weights": "float[edges]", "degree": "float[m]",
        "D": "float[m]",
    },
    "Dissolution": {"kept": "int[kept]", "ratio": "float[m]", "D": "float[m]"},
    "LiveTrunks": {
        "positions": "int[live]", "offsets": "int[m + 1]", "impact": "float[live]",
        "inverse_norms": "float[live] or inf", "trunk_impact": "float[m]",
    },
    "TrunkWeights": {"indptr": "int[m + 1]", "indices": "int[edges]", "weights": "float[edges]"},
    "Selection": {"positions": "int[kept]", "offsets": "int[g + 1]"},
    "KeptSets": {"positions": "int[kept]", "offsets": "int[g + 1]", "scores": "float[g, n] or nan or inf or null"},
}

OPS: Mapping[str, Op] = {
    "crystal.coattention": Op(
        {
            "q": "float[H, n, d]", "k": "float[H_kv, live, d]", "positions": "int[live]", "parameters": "crystalcache",
            "scaling": "float", "softcap": "float or null", "lse": "float[H, n] or null",
            "sinks": "float[H] or null",
        },
        "CoAttention", "",
    ),
    "crystal.impact": Op(
        {"salience": "float[n]", "token_ids": "int[n]", "parameters": "crystalcache"}, "float[n]", "M",
    ),
    "crystal.trunks": Op(
        {"coattention": "CoAttention", "impact": "float[n]", "ends": "bool[n]", "parameters": "crystalcache"},
        "Trunks", "",
    ),
    "crystal.graph": Op(
        {"coattention": "CoAttention", "trunks": "Trunks", "parameters": "crystalcache"}, "TrunkGraph", "",
    ),
    "crystal.score": Op(
        {"D": "float[m]", "impact": "float[m]", "protected": "bool[m]", "parameters": "crystalcache"},
        "float[m] or nan", "score",
    ),
    "crystal.dissolve": Op(
        {
            "score": "float[m] or nan", "trunks": "Trunks", "impact": "float[n]", "D": "float[m]",
            "protected": "bool[m]", "budget": "int", "parameters": "crystalcache",
        },
        "Dissolution", "",
    ),
    "breath.inverse_key_norms": Op({"k": "float[H_kv, n, d]"}, "float[n] or inf", "inverse_norms"),
    "breath.impact": Op({"salience": "float[n]", "counts": "int[n]", "parameters": "crystalcache"}, "float[n]"),
    "breath.decay": Op({"D": "float[m]", "trunk_impact": "float[m]", "parameters": "crystalcache"}, "float[m]", "D"),
    "breath.activation": Op({"live": "LiveTrunks", "parameters": "crystalcache"}, "bool[m]", "active"),
    "breath.resonance": Op(
        {"D": "float[m]", "W": "TrunkWeights", "active": "bool[m]", "parameters": "crystalcache"}, "float[m]", "D",
    ),
    "breath.hebbian": Op(
        {"W": "TrunkWeights", "active": "bool[m]", "parameters": "crystalcache"}, "TrunkWeights", "",
    ),
    "breath.segment_graph": Op(
        {
            "coattention": "CoAttention", "bounds": "int[m + 1]", "sizes": "int[m]", "W": "TrunkWeights",
            "parameters": "crystalcache",
        },
        "TrunkWeights",
    ),
    "breath.segment_crystallization": Op(
        {"degree": "float[m]", "old": "int", "parameters": "crystalcache"}, "float[m - old]", "D",
    ),
    "diversity.diverse": Op(
        {"s": "float[n] or nan or inf", "V": "float[n, d]", "retained": "bool[n]", "k": "int", "lam": "float"},
        "int[k]",
    ),
    "nestedkv.anomaly_score": Op({"k": "float[H_kv, n, d]", "parameters": "nestedkv"}, "float[H_kv, n]", "score"),
    "policies.received_attention": Op(
        {
            "q": "float[H, m, d]", "k": "float[H_kv, n, d]", "scaling": "float", "softcap": "float or null",
            "sinks": "float[H] or null",
        },
        "float[H_kv, n]",
    ),
    "policies.largest_attention": Op(
        {
            "q": "float[H, m, d]", "k": "float[H_kv, n, d]", "norms": "float[m]", "scaling": "float",
            "softcap": "float or null", "sinks": "float[H] or null",
        },
        "float[H, n]",
    ),
    "policies.expected_attention": Op(
        {
            "q": "float[H, m, d]", "k": "float[H_kv, n, d]", "v": "float[H_kv, n, d]", "at": "int[m]",
            "ahead": "int[steps]", "inv_freq": "float[d / 2]", "factor": "float", "scaling": "float",
            "sinks": "float[H] or null",
        },
        "float[H_kv, n]",
    ),
    "policies.best_tokens": Op(
        {"values": "float[g, n] or nan or inf", "shares": "int[g]", "pinned": "bool[g, n]"}, "Selection",
    ),
}


def stages(family: str) -> list[str]:
    """Return the stages of a family. The list is empty if the family does not exist."""
    assert set(FAMILIES) == {op.partition(".")[0] for op in OPS}
    return [op.partition(".")[2] for op in OPS if op.startswith(f"{family}.")]
