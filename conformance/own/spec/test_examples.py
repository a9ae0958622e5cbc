"""Every worked example of spec/crystalcache*.md holds for the reference; every item of all pages has its six parts."""

import inspect
import json
import re
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from conformance.assurance.item_vectors.adapters import cosines, vocabulary
from conformance.assurance.item_vectors.items import BY_ITEM
from conformance.assurance.item_vectors.items import ITEMS as OF_REFERENCE
from conformance.assurance.vector_writer.expected import OPERATIONS
from conformance.checks.bounds import BOUNDED
from conformance.items import items_of
from conformance.paths import SPEC
from conformance.tolerances import scores_agree
from conformance.vectors.codec import call, flags, floats, integers, plain
from conformance.vectors.files import decoded, parameters_of
from reference import statistics
from reference.crystalcache import coattention as s1
from reference.crystalcache import compaction, coverage, dissolution, graph, impact, protection, sentences, trunks
from reference.crystalcache import prefill as run_prefill
from reference.crystalcache.crystallization import crystallization
from reference.injection import diagnostics, fusion, quantisers, rotation, splicing, wrappers
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import CoAttention, Dissolution, Edges

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


PAGE = SPEC / "crystalcache.md"
ALL = {
    name: text for path in sorted(SPEC.glob("*.md")) for name, text in items_of(path.read_text(encoding="utf-8"))
}
ITEMS = {name: text for name, text in ALL.items() if name.startswith("CC-")}
PARTS = ["Source", "Determinism", "Formula", "MUST", "Example", "Rationale"]
FENCE = re.compile(r"```json\n(.*?)```", re.DOTALL)

Adapter = Callable[[Json], object]


def parameters(inputs: Json) -> CrystalCacheParameters:
    return CrystalCacheParameters(**inputs["parameters"])


def edges(triples: Json) -> Edges:
    columns: list[Json] = list(zip(*triples, strict=True)) or [[], [], []]
    return Edges(integers(columns[0]), integers(columns[1]), floats(columns[2]))


def budget_forms(inputs: Json) -> object:
    for refused in inputs["refused"]:
        with pytest.raises(SpecError):
            parse_budget(refused)
    return [parse_budget(budget).tokens(seen) for budget, seen in inputs["asked"]]


def edge_view(inputs: Json) -> object:
    n = len(inputs["intra"])
    view = CoAttention(
        inputs["start"], np.zeros(n), integers(inputs["intra"]), floats(inputs["intra_weight"]),
        integers(inputs["cross"]), floats(inputs["cross_weight"]),
    ).edges()
    return list(zip(*(column.tolist() for column in view), strict=True))


def coattention(inputs: Json) -> object:
    return vars(
        s1.coattention(
            floats(inputs["q"]), floats(inputs["k"]), integers(inputs["positions"]), parameters(inputs),
            inputs["scaling"], inputs["softcap"],
        )
    )


def interface(case: Json) -> object:
    current, sentence = case
    return [(side.start, side.stop) for side in trunks.interface((current[0], current[1]), (sentence[0], sentence[1]))]


def interface_edges(inputs: Json) -> object:
    by_pair = {(a, b): w for a, b, w in inputs["edges"]}
    return trunks.interface_weights(by_pair, trunks.interface(tuple(inputs["current"]), tuple(inputs["sentence"])))


def merges(inputs: Json) -> object:
    return [trunks.merges(floats(w), size, following, parameters(inputs)) for w, size, following in inputs["cases"]]


def trunk_offsets(inputs: Json) -> object:
    return [
        trunks.trunk_offsets(flags(case["ends"]), edges(case["edges"]), case["start"], parameters(inputs))
        for case in inputs["cases"]
    ]


def impacts(inputs: Json) -> object:
    S, U = floats(inputs["S"]), floats(inputs["U"])
    forms = {
        "mixture": impact.impact, "salience": impact.impact_without_rarity, "uniform": impact.uniform_impact,
    }
    return {name: form(S, U, parameters(inputs)) for name, form in forms.items()}


def trunk_pairs(inputs: Json) -> object:
    pairs = graph.trunk_pairs(edges(inputs["edges"]), integers(inputs["offsets"]))
    return list(zip(*(column.tolist() for column in pairs), strict=True))


def trunk_weights(inputs: Json) -> object:
    a, b, number, total = zip(*inputs["pairs"], strict=True)
    pairs = graph.TrunkPairs(integers(a), integers(b), integers(number), floats(total))
    W, kept = graph.trunk_weights(pairs, integers(inputs["sizes"]), inputs["tau_edge"])
    return {"weights": W, "kept": kept}


def crystallizations(inputs: Json) -> object:
    p = parameters(inputs)
    return [crystallization(floats(degree), p.s, p.epsilon) for degree in inputs["cases"]]


def dissolve(inputs: Json) -> object:
    return vars(
        dissolution.dissolve(
            floats(inputs["score"]), integers(inputs["offsets"]), floats(inputs["M"]), floats(inputs["D"]),
            flags(inputs["protected"]), inputs["B"], inputs["N_min"],
        )
    )


def compact(inputs: Json) -> object:
    K, V = compaction.compact(floats(inputs["K"]), floats(inputs["V"]), integers(inputs["R"]))
    return {"K": K, "V": V}


def prefill(inputs: Json) -> object:
    zeros = np.zeros((1, inputs["n"], 1))
    ends = frozenset(inputs["sentence_ends"])
    result = run_prefill(zeros, zeros, integers(inputs["token_ids"]), ends, inputs["budget"], parameters(inputs))
    return {name: getattr(result, name) for name in ("kept", "budget", "over_budget", "ratio", "scores", "D")}


def by_name(item: str, given: Json) -> object:
    """The reference's function of the table on inputs by name, or on cases, each in the order of its arguments."""
    function = resolve_name(f"reference.{OPERATIONS[item].reference}")
    if not isinstance(given, dict):
        return [by_name(item, dict(zip(inspect.signature(function).parameters, case, strict=True))) for case in given]
    return call(function, given, CrystalCacheParameters(**given.get("parameters", {})))


def of_decode(name: str, given: Json) -> object:
    """The page's examples of decode are written as the vectors are."""
    found = BY_ITEM[name](decoded(given["inputs"]), parameters_of(given["parameters"]))
    return {field: plain(value) for field, value in found.items()}


ADAPTERS: dict[str, Adapter] = {
    "CC-BUDGET-FORMS": budget_forms,
    "CC-EDGES": edge_view,
    "CC-COATTENTION": coattention,
    "CC-SENTENCES": lambda cases: [sentences.sentence_offsets(flags(case)) for case in cases],
    "CC-INTERFACE": lambda cases: [interface(case) for case in cases],
    "CC-INTERFACE-EDGES": interface_edges,
    "CC-MERGE": merges,
    "CC-TRUNKS": trunk_offsets,
    "CC-COUNT": lambda ids: impact.token_counts(integers(ids)),
    "CC-RARITY": lambda c: impact.rarity(integers(c)),
    "CC-IMPACT": impacts,
    "CC-TRUNK-EDGES": trunk_pairs,
    "CC-TRUNK-WEIGHT": trunk_weights,
    "CC-CRYSTALLIZATION": crystallizations,
    "CC-PROTECTED": lambda i: [
        protection.protected_trunks(integers(offsets), i["n"], *rest) for offsets, *rest in i["cases"]
    ],
    "CC-DISSOLVE": lambda cases: [dissolve(case) for case in cases],
    "CC-COMPACT": compact,
    "CC-PREFILL": prefill,
    **ESSAY_ADAPTERS,
}


def example(name: str) -> Json:
    (block,) = FENCE.findall(ITEMS[name])
    return json.loads(block)


def agree(actual: Any, expected: Json, bound: float) -> None:
    """Same structure; numbers within the bound, and equal where it is 0; null for NaN."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            agree(actual[key], expected[key], bound)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            agree(one, other, bound)
    elif expected is None:
        assert np.isnan(actual)
    elif isinstance(expected, float) and bound and np.isfinite(expected):
        assert abs(actual - expected) <= bound
    else:
        assert actual == expected


def test_every_item_has_an_adapter() -> None:
    assert ADAPTERS.keys() <= ITEMS.keys() <= ADAPTERS.keys() | BY_ITEM.keys()


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in ITEMS])
def test_the_example_holds(name: str) -> None:
    given = example(name)
    assert given["item"] == name
    if name in ADAPTERS:
        found = ADAPTERS[name](given["inputs"])
    else:
        found = of_decode(name, given) if "parameters" in given else by_name(name, given["inputs"])
    agree(found, decoded(given["expected"]), given.get("bound", 0.0))


@pytest.mark.parametrize("name", ALL)
def test_an_item_has_its_parts_in_order(name: str) -> None:
    parts = re.findall(r"^\*\*(\w+)\*\*\s", ALL[name], re.MULTILINE)
    assert list(dict.fromkeys(parts)) == PARTS
    assert parts == sorted(parts, key=PARTS.index)
    assert re.search(r"^\*\*Determinism\*\* (exact|bounded: \S)", ALL[name], re.MULTILINE)


def test_each_equation_of_the_paper_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \|[^|]*\| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 44))
    for _, text in rows:
        named = re.findall(r"\bCC(?:-[A-Z]+)+", text)
        assert named or text.startswith("N/A")
        assert set(named) <= ITEMS.keys()


TEXTS = {
    name: text for page in ("diversity", "injection", "nestedkv", "policies", "triattention")
    for name, text in items_of((SPEC / f"{page}.md").read_text(encoding="utf-8"))
}


def markers(i: Any) -> object:
    words = vocabulary(i["vocabulary"])
    for refused in i["refused"]:
        with pytest.raises(SpecError, match="one token id"):
            wrappers.marker_id(wrappers.Marker(refused), words)
    return [wrappers.marker_id(wrappers.Marker(text), words) for text in i["markers"]]


def wraps(i: Any) -> object:
    words = vocabulary(i["vocabulary"])
    return [vars(wrappers.wrap(wrappers.FORMS[form], chunk, words)) for form, chunk in i["cases"]]


def regions(cases: Any) -> object:
    return [
        [[run.start, run.stop] for run in quantisers.quantised_region(quantisers.ARMS[arm], layers, tokens)]
        for arm, layers, tokens in cases
    ]


BY_REFERENCE: dict[str, Any] = {
    "IN-SHIFT-ANGLES": lambda i: rotation.shift_angles(i["n"], i["start"], floats(i["inverse_frequencies"])),
    "IN-REBASE-ANGLES": lambda i: rotation.rebase_angles(
        i["n"], i["start"], floats(i["archived"]), floats(i["live"])
    ),
    "IN-HALF-SPLIT": lambda i: rotation.turn_half_split(floats(i["x"]), floats(i["angles"])),
    "IN-INTERLEAVED": lambda i: rotation.turn_interleaved(floats(i["x"]), floats(i["angles"])),
    "IN-SCALE": lambda i: quantisers.scale(floats(i["x"]), quantisers.SCHEMES[i["scheme"]], i["bits"]),
    "IN-CODES": lambda i: quantisers.codes(floats(i["x"]), floats(i["step"]), i["bits"]),
    "IN-ARMS": regions,
    "IN-MARKER": markers,
    "IN-WRAP": wraps,
    "IN-SLICES": lambda cases: [wrappers.slices(ids, frozenset(ends), size) for ids, ends, size in cases],
    "IN-FUSE": lambda i: fusion.fused(i["rankings"], i["k"]),
    "IN-MCNEMAR": lambda cases: [statistics.mcnemar(b, c) for b, c in cases],
    "IN-WILSON": lambda cases: [statistics.wilson(*case) for case in cases],
    "IN-BOOTSTRAP": lambda i: statistics.bootstrap(floats(i["differences"]), integers(i["drawn"]), i["confidence"]),
    "IN-CLUSTER-BOOTSTRAP": lambda i: statistics.cluster_bootstrap(
        floats(i["differences"]), integers(i["clusters"]), integers(i["drawn"]), i["confidence"]
    ),
    "IN-PLACES": lambda cases: [splicing.placed(n, hidden, start, integers(kept)) for n, hidden, start, kept in cases],
    "IN-BASELINES": lambda i: [vars(splicing.held(arm, i["session"], i["prefix"], i["raw"], i["wrapped"]))
                               for arm in i["arms"]],
    "IN-LEGOLINK": lambda cases: [splicing.first_tokens(*case) for case in cases],
    "IN-CACHEBLEND": lambda cases: [
        splicing.most_deviating(floats(spliced), floats(fresh), start, r) for spliced, fresh, start, r in cases
    ],
    "IN-ENTROPY": lambda i: diagnostics.entropy(floats(i["weights"])),
    "IN-SINK-MASS": lambda i: diagnostics.sink_mass(floats(i["weights"]), integers(i["positions"]), i["sinks"]),
    "IN-KEY-COSINE": cosines,
    "IN-BANDS": lambda depths: [diagnostics.bands(depth) for depth in depths],
    "IN-POWER": lambda cases: [statistics.mcnemar_power(*case) for case in cases],
}


def test_every_item_of_a_page_has_an_adapter() -> None:
    assert BY_REFERENCE.keys() <= TEXTS.keys() <= BY_REFERENCE.keys() | OF_REFERENCE.keys()


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in TEXTS])
def test_the_example_of_a_page_holds(name: str) -> None:
    (block,) = FENCE.findall(TEXTS[name])
    given = json.loads(block)
    assert given["item"] == name
    found = BY_REFERENCE[name](given["inputs"]) if name in BY_REFERENCE else OF_REFERENCE[name](given["inputs"], PAPER)
    want = given["expected"]
    bounded = BOUNDED[name].results if name.startswith("NK-") and name in BOUNDED else []
    for key in bounded:
        assert scores_agree(np.ravel(np.asarray(found[key])), np.ravel(want[key]).tolist())
    if bounded:
        found, want = ({key: value for key, value in one.items() if key not in bounded} for one in (found, want))
    agree(found, want, given.get("bound", 0.0))


def test_each_equation_of_nestedkv_s_paper_has_its_row() -> None:
    page = (SPEC / "nestedkv.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, to]+) \| (.+) \|$", page, re.MULTILINE)
    named = {int(number) for numbers, _ in rows for number in re.findall(r"\d+", numbers)}
    assert named == set(range(1, 19)) - {17}
    assert ("16 to 18", "NK-NESTEDKV") in rows
