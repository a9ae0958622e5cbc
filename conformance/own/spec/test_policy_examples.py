"""Every worked example of the policies' pages holds for the reference."""

import json

import numpy as np
import pytest

from conformance.assurance.item_vectors.diversity import DIVERSITY_ITEMS
from conformance.assurance.item_vectors.policies import POLICY_ITEMS
from conformance.items import items_of
from conformance.own.spec.test_examples import FENCE
from conformance.own.spec.test_policy_table import PAGE

PAGES = (PAGE, PAGE.with_name("diversity.md"), PAGE.with_name("triattention.md"))
ITEMS = {name: text for page in PAGES for name, text in items_of(page.read_text(encoding="utf-8"))}
ADAPTERS = {**POLICY_ITEMS, **DIVERSITY_ITEMS}


def test_every_item_has_an_adapter() -> None:
    assert ADAPTERS.keys() == ITEMS.keys()


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(name)) for name in ADAPTERS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(ITEMS[name])
    given = json.loads(block)
    found = ADAPTERS[name](given["inputs"])
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    assert given["item"] == name
    assert plain == given["expected"]
