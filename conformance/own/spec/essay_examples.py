"""How the worked examples of spec/crystalcache_essay.md are run."""

from collections.abc import Callable
from typing import Any

from conformance.vectors.codec import flags, floats, integers
from reference.crystalcache import coverage, impact, trunks
from spec.records import Dissolution

__all__ = ["ESSAY_ADAPTERS"]

Json = Any


def merge_thresholds(cases: Json) -> object:
    return [
        trunks.median_strength(
            integers(case["sentences"]), {(a, b): w for a, b, w in case["edges"]}, case["tau_merge"]
        )
        for case in cases
    ]


def covered(i: Json) -> object:
    reserves = [coverage.coverage_reserve(integers(sizes), flags(shut), *rest) for sizes, shut, *rest in i["reserves"]]
    before = Dissolution(integers(i["kept"]), floats(i["ratio"]), floats(i["ratio"]) * floats(i["D"]))
    return {
        "reserves": reserves, **vars(coverage.backfill(before, integers(i["offsets"]), floats(i["D"]), i["reserve"]))
    }


ESSAY_ADAPTERS: dict[str, Callable[[Json], object]] = {
    "CC-RARITY-FORMS": lambda c: {
        "reciprocal": impact.reciprocal_rarity(integers(c)), "exponential": impact.exponential_rarity(integers(c)),
    },
    "CC-ADAPTIVE-MERGE": merge_thresholds,
    "CC-COVERAGE": covered,
}
