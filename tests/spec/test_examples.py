"""Every worked example of a page of spec/ holds for the reference, and every item of all pages has its six parts."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from conformance.checks.vector_checks import BOUNDED
from conformance.items import items_of
from conformance.paths import SPEC
from conformance.tolerances import scores_agree
from conformance.vectors.codec import call, flags, floats, integers, plain
from conformance.vectors.files import decoded, parameters_of
from lab.item_vectors import BY_ITEM, vocabulary
from lab.vector_writer.expected import OPERATIONS
from reference.crystalcache import coverage, impact
from reference.crystalcache import prefill as run_prefill
from reference.crystalcache.crystallization import crystallization
from reference.injection import diagnostics, quantisers, splicing, wrappers
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.records import Dissolution

Json = Any

PAGE = SPEC / "crystalcache.md"
ITEMS = {
    name: text for path in sorted(SPEC.glob("*.md")) for name, text in items_of(path.read_text(encoding="utf-8"))
}
PARTS = ["Source", "Determinism", "Formula", "MUST", "Example", "Rationale"]
FENCE = re.compile(r"```json\n(.*?)```", re.DOTALL)


def budget_forms(inputs: Json) -> object:
    for refused in inputs["refused"]:
        with pytest.raises(SpecError):
            parse_budget(refused)
    return [parse_budget(budget).tokens(seen) for budget, seen in inputs["asked"]]


def covered(i: Json) -> object:
    reserves = [coverage.coverage_reserve(integers(sizes), flags(shut), *rest) for sizes, shut, *rest in i["reserves"]]
    before = Dissolution(integers(i["kept"]), floats(i["ratio"]), floats(i["ratio"]) * floats(i["D"]))
    actual = coverage.backfill(before, integers(i["offsets"]), floats(i["D"]), i["reserve"])
    return {"reserves": reserves, **vars(actual)}


def impacts(inputs: Json) -> object:
    S, U, p = floats(inputs["S"]), floats(inputs["U"]), CrystalCacheParameters(**inputs["parameters"])
    forms = {"mixture": impact.impact, "salience": impact.impact_without_rarity, "uniform": impact.uniform_impact}
    return {name: form(S, U, p) for name, form in forms.items()}


def prefill(inputs: Json) -> object:
    zeros, p = np.zeros((1, inputs["n"], 1)), CrystalCacheParameters(**inputs["parameters"])
    ends = frozenset(inputs["sentence_ends"])
    result = run_prefill(zeros, zeros, integers(inputs["token_ids"]), ends, inputs["budget"], p)
    return {name: getattr(result, name) for name in ("kept", "budget", "over_budget", "ratio", "scores", "D")}


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


SPECIAL: dict[str, Callable[[Json], object]] = {
    "CC-BUDGET-FORMS": budget_forms, "CC-COVERAGE": covered, "CC-IMPACT": impacts, "CC-PREFILL": prefill,
    "CC-RARITY-FORMS": lambda c: {
        "reciprocal": impact.reciprocal_rarity(integers(c)), "exponential": impact.exponential_rarity(integers(c)),
    },
    "CC-CRYSTALLIZATION": lambda i: [crystallization(floats(case), PAPER.s, PAPER.epsilon) for case in i["cases"]],
    "IN-ARMS": regions, "IN-MARKER": markers, "IN-WRAP": wraps,
    "IN-BASELINES": lambda i: [
        vars(splicing.held(arm, *(i[name] for name in ("session", "prefix", "raw", "wrapped")))) for arm in i["arms"]
    ],
    "IN-BANDS": lambda depths: [diagnostics.bands(depth) for depth in depths],
}
"""Examples of several functions, and examples that show an error."""
FUNCTIONS = {
    "CC-COATTENTION": "crystalcache.coattention.coattention", "CC-INTERFACE": "crystalcache.trunks.interface",
    "CC-TRUNKS": "crystalcache.trunks.trunk_offsets", "CC-DISSOLVE": "crystalcache.dissolution.dissolve",
    "IN-FUSE": "injection.fusion.fused", "IN-BOOTSTRAP": "statistics.bootstrap",
    "IN-CLUSTER-BOOTSTRAP": "statistics.cluster_bootstrap",
    **{name: one.reference for name, one in OPERATIONS.items() if one.reference},
}
"""Functions of the reference. Examples give their arguments by name or in order."""


def named(case: Json, names: list[str]) -> dict[str, Json]:
    """Return the arguments of a case by name. The case gives them by name, in order, or as the only argument."""
    if isinstance(case, dict):
        return case
    return dict(zip(names, case, strict=False)) if len(names) > 1 else {names[0]: case}


def by_function(name: str, given: Json) -> object:
    """Return the results of a reference function on inputs by name, or on cases.

    If a function has one argument, the inputs are this argument.
    """
    function = resolve_name(f"reference.{FUNCTIONS[name]}")
    names = [*inspect.signature(function).parameters]
    if not isinstance(given, dict):
        whole = len(names) == 1 and not isinstance(given[0], list)
        given = {names[0]: given} if whole else {"cases": given}
    shared = {key: x for key, x in given.items() if key not in ("parameters", "cases")}
    p, open_ = CrystalCacheParameters(**given.get("parameters", {})), [key for key in names if key not in shared]
    actual = [call(function, {**shared, **named(case, open_)}, p) for case in given.get("cases", [{}])]
    return actual if "cases" in given else actual[0]


def by_item(name: str, given: Json) -> object:
    """Return the results of an item on inputs in the format of vectors. If the example names no result, return one."""
    cases = given["inputs"] if isinstance(given["inputs"], list) else [given["inputs"]]
    actual = []
    for case in map(decoded, cases):
        p = parameters_of(given.get("parameters", {}))
        if name in ("CC-ADAPTIVE-MERGE", "CC-TRUNK-WEIGHT"):
            p = replace(p, **{key: case[key] for key in vars(p) if key in case})
        result = {key: plain(value) for key, value in BY_ITEM[name](case, p).items()}
        whole = isinstance(given["expected"], dict)
        actual.append(result if whole else [*result.values()] if len(result) > 1 else next(iter(result.values())))
    return actual if isinstance(given["inputs"], list) else actual[0]


def agree(actual: Any, expected: Json, bound: float) -> None:
    """Check equal structure, and numbers within the bound. A bound of 0 requires equality, and null means NaN."""
    if isinstance(actual, range):
        actual = [actual.start, actual.stop]
    elif is_dataclass(actual):
        actual = vars(actual)
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


def test_every_item_is_called() -> None:
    assert SPECIAL.keys() <= ITEMS.keys() <= {*SPECIAL, *FUNCTIONS, *BY_ITEM}


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in ITEMS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(ITEMS[name])
    given = json.loads(block)
    assert given["item"] == name
    want = decoded(given["expected"])
    if name in SPECIAL:
        actual: Any = SPECIAL[name](given["inputs"])
    elif name in FUNCTIONS and "parameters" not in given and (name == "CC-COATTENTION" or not isinstance(want, dict)):
        actual = by_function(name, given["inputs"])
    else:
        actual = by_item(name, given)
    for key in BOUNDED[name].results if name.startswith("NK-") and name in BOUNDED else []:
        assert scores_agree(np.ravel(actual.pop(key)), np.ravel(want.pop(key)).tolist())
    agree(actual, want, given.get("bound", 0.0))


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_has_its_parts_in_order(name: str) -> None:
    parts = re.findall(r"^\*\*(\w+)\*\*\s", ITEMS[name], re.MULTILINE)
    assert list(dict.fromkeys(parts)) == PARTS
    assert parts == sorted(parts, key=PARTS.index)
    assert re.search(r"^\*\*Determinism\*\* (exact|bounded: \S)", ITEMS[name], re.MULTILINE)


def test_each_equation_of_the_paper_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \|[^|]*\| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 44))
    for _, text in rows:
        named = re.findall(r"\bCC(?:-[A-Z]+)+", text)
        assert named or text.startswith("N/A")
        assert set(named) <= ITEMS.keys()


def test_each_equation_of_nestedkv_s_paper_has_its_row() -> None:
    page = (SPEC / "nestedkv.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, to]+) \| (.+) \|$", page, re.MULTILINE)
    named = {int(number) for numbers, _ in rows for number in re.findall(r"\d+", numbers)}
    assert named == set(range(1, 19)) - {17}
    assert ("16 to 18", "NK-NESTEDKV") in rows


@pytest.mark.parametrize(
    "name", ["1d_div", "`1d`", "variant_b", "diversity-signature-mode", "λ", "per_ch", "pt_asym", "mscale"]
)
def test_a_name_of_the_diversity_or_the_injection_paper_is_on_their_pages(name: str) -> None:
    assert any(name in (SPEC / page).read_text(encoding="utf-8") for page in ("diversity.md", "injection.md"))
