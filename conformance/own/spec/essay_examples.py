"""How the worked examples of spec/crystalcache_essay.md are run."""

from collections.abc import Callable
from typing import Any

from conformance.vectors.arrays import flags, floats, integers
from reference.crystalcache import coverage, impact, renewal, tiers, trunks
from reference.crystalcache.coattention import mean_salience
from spec.parameters import CrystalCacheParameters
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
    "CC-MEAN-SALIENCE": lambda i: mean_salience(floats(i["own"]), CrystalCacheParameters(**i["parameters"])),
    "CC-UNIT-IMPACT": lambda i: impact.unit_impact(floats(i["S"]), floats(i["U"]), CrystalCacheParameters()),
    "CC-UNIT-TRUNK-IMPACT": lambda i: impact.unit_trunk_impact(floats(i["M_bar"]), i["epsilon"]),
    "CC-TIER-COUNT": lambda cases: [tiers.tier_counts(integers(sizes), t, N_min) for sizes, t, N_min in cases],
    "CC-TIERS": lambda cases: [tiers.tier_allocate(integers(sizes), c_0, N_min) for sizes, c_0, N_min in cases],
    "CC-RENEWAL": lambda i: renewal.renewed_D(floats(i["D"]), flags(i["active"]), i["renewal"]),
    "CC-RARITY-FORMS": lambda c: {
        "reciprocal": impact.reciprocal_rarity(integers(c)), "exponential": impact.exponential_rarity(integers(c)),
    },
    "CC-ADAPTIVE-MERGE": merge_thresholds,
    "CC-COVERAGE": covered,
}
