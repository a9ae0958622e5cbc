"""Every worked example of spec/nestedkv.md holds for the reference."""

import json
import re

import numpy as np
import pytest

from conformance.assurance.item_vectors.items import ITEMS as OF_REFERENCE
from conformance.checks.bounds import BOUNDED
from conformance.items import items_of
from conformance.own.spec.test_examples import FENCE
from conformance.paths import SPEC
from conformance.tolerances import scores_agree
from spec.parameters import PAPER

PAGE = SPEC / "nestedkv.md"
ITEMS = dict(items_of(PAGE.read_text(encoding="utf-8")))


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in ITEMS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(ITEMS[name])
    given = json.loads(block)
    assert given["item"] == name
    for key, found in OF_REFERENCE[name](given["inputs"], PAPER).items():
        want = given["expected"][key]
        if name in BOUNDED and key in BOUNDED[name].results:
            assert scores_agree(np.ravel(np.asarray(found)), np.ravel(want).tolist())
        else:
            assert found == want



def test_each_equation_of_the_paper_has_its_row() -> None:
    rows = re.findall(r"^\| ([\d, to]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {int(number) for numbers, _ in rows for number in re.findall(r"\d+", numbers)}
    assert named == set(range(1, 19)) - {17}
    assert ("16 to 18", "NK-NESTEDKV") in rows
