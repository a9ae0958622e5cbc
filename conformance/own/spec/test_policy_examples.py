"""Every worked example of the policies' pages holds for the reference."""

import json

import numpy as np
import pytest

from conformance.assurance.item_vectors.items import ITEMS as OF_REFERENCE
from conformance.items import items_of
from conformance.own.spec.test_examples import FENCE
from conformance.own.spec.test_policy_table import PAGE
from spec.parameters import PAPER

PAGES = (PAGE, PAGE.with_name("diversity.md"), PAGE.with_name("triattention.md"))
ITEMS = {name: text for page in PAGES for name, text in items_of(page.read_text(encoding="utf-8"))}


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in ITEMS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(ITEMS[name])
    given = json.loads(block)
    found = OF_REFERENCE[name](given["inputs"], PAPER)
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    assert given["item"] == name
    assert plain == given["expected"]
