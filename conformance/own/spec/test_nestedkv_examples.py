"""Every worked example of spec/nestedkv.md holds for the reference."""

import json
import re

import numpy as np
import pytest

from conformance.assurance.item_vectors.nestedkv import NESTEDKV_ITEMS
from conformance.assurance.vector_writer.expected_nestedkv import BOUNDED as NESTEDKV_BOUNDED
from conformance.items import items_of
from conformance.own.spec.test_examples import FENCE
from conformance.paths import SPEC
from conformance.tolerances import scores_agree

PAGE = SPEC / "nestedkv.md"
ITEMS = dict(items_of(PAGE.read_text(encoding="utf-8")))


def test_every_item_has_an_adapter() -> None:
    assert NESTEDKV_ITEMS.keys() == ITEMS.keys()


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in NESTEDKV_ITEMS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(ITEMS[name])
    given = json.loads(block)
    assert given["item"] == name
    for key, found in NESTEDKV_ITEMS[name](given["inputs"]).items():
        want = given["expected"][key]
        if NESTEDKV_BOUNDED.get(name) == key:
            assert scores_agree(np.ravel(np.asarray(found)), np.ravel(want).tolist())
        else:
            assert found == want



def test_each_equation_of_the_paper_has_its_row() -> None:
    rows = re.findall(r"^\| ([\d, to]+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {int(number) for numbers, _ in rows for number in re.findall(r"\d+", numbers)}
    assert named == set(range(1, 19)) - {17}
    assert ("16 to 18", "NK-NESTEDKV") in rows
