"""Tokens seen, counted one by one: the only operation of decode that `conformance.oracles` does not hold alone."""

from conformance.vectors.json_values import Json, Results
from spec.parameters import CrystalCacheParameters

__all__ = ["seen_count"]


def seen_count(i: Json, p: CrystalCacheParameters) -> Results:
    everything = [token for token, number in zip(i["ids"], i["counts"], strict=True) for _ in range(number)] + i["new"]
    ids = sorted(set(everything))
    return {"ids": ids, "counts": [everything.count(token) for token in ids],
            "c": [everything.count(token) for token in i["new"]]}
