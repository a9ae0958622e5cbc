"""Every worked example of spec/injection.md holds for the reference."""

import json
from typing import Any

import pytest

from conformance.assurance.item_vectors.adapters import cosines, vocabulary
from conformance.items import items_of
from conformance.own.spec.test_examples import FENCE, agree, by_name
from conformance.paths import SPEC
from conformance.vectors.codec import floats, integers
from reference import statistics
from reference.injection import diagnostics, fusion, quantisers, splicing, wrappers
from spec.errors import SpecError

PAGE = SPEC / "injection.md"
ITEMS = dict(items_of(PAGE.read_text(encoding="utf-8")))


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


ADAPTERS: dict[str, Any] = {
    "IN-SCALE": lambda i: quantisers.scale(floats(i["x"]), quantisers.SCHEMES[i["scheme"]], i["bits"]),
    "IN-ARMS": regions,
    "IN-MARKER": markers,
    "IN-WRAP": wraps,
    "IN-SLICES": lambda cases: [wrappers.slices(ids, frozenset(ends), size) for ids, ends, size in cases],
    "IN-FUSE": lambda i: fusion.fused(i["rankings"], i["k"]),
    "IN-WILSON": lambda cases: [statistics.wilson(*case) for case in cases],
    "IN-BOOTSTRAP": lambda i: statistics.bootstrap(floats(i["differences"]), integers(i["drawn"]), i["confidence"]),
    "IN-CLUSTER-BOOTSTRAP": lambda i: statistics.cluster_bootstrap(
        floats(i["differences"]), integers(i["clusters"]), integers(i["drawn"]), i["confidence"]
    ),
    "IN-BASELINES": lambda i: [vars(splicing.held(arm, i["session"], i["prefix"], i["raw"], i["wrapped"]))
                               for arm in i["arms"]],
    "IN-KEY-COSINE": cosines,
    "IN-BANDS": lambda depths: [diagnostics.bands(depth) for depth in depths],
}


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in ITEMS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(ITEMS[name])
    given = json.loads(block)
    assert given["item"] == name
    found = ADAPTERS[name](given["inputs"]) if name in ADAPTERS else by_name(name, given["inputs"])
    agree(found, given["expected"], given.get("bound", 0.0))
