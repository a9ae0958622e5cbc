"""Every worked example of the other pages of spec/ holds for the reference."""

import json
import re
from typing import Any

import numpy as np
import pytest

from conformance.assurance.item_vectors.adapters import cosines, vocabulary
from conformance.assurance.item_vectors.items import ITEMS as OF_REFERENCE
from conformance.checks.bounds import BOUNDED
from conformance.items import items_of
from conformance.own.spec.test_examples import FENCE, agree
from conformance.paths import SPEC
from conformance.tolerances import scores_agree
from conformance.vectors.codec import floats, integers
from reference import statistics
from reference.injection import diagnostics, fusion, quantisers, rotation, splicing, wrappers
from spec.errors import SpecError
from spec.parameters import PAPER

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


ADAPTERS: dict[str, Any] = {
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


def test_every_item_has_an_adapter() -> None:
    assert ADAPTERS.keys() <= TEXTS.keys() <= ADAPTERS.keys() | OF_REFERENCE.keys()


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in TEXTS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(TEXTS[name])
    given = json.loads(block)
    assert given["item"] == name
    found = ADAPTERS[name](given["inputs"]) if name in ADAPTERS else OF_REFERENCE[name](given["inputs"], PAPER)
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
