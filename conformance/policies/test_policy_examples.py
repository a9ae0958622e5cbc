"""Every worked example of spec/policies.md holds for the reference, and every item has its six parts in order."""

import json
import re

import numpy as np
import pytest

from conformance.policies.test_table import PAGE
from conformance.test_examples import FENCE, PARTS
from conformance.trace import items_of
from conformance.vectors.policy_subject import POLICY_ITEMS

ITEMS = dict(items_of(PAGE.read_text(encoding="utf-8")))


def test_every_item_has_an_adapter() -> None:
    assert POLICY_ITEMS.keys() == ITEMS.keys()


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spec(id=name)) for name in POLICY_ITEMS])
def test_the_example_holds(name: str) -> None:
    (block,) = FENCE.findall(ITEMS[name])
    given = json.loads(block)
    found = POLICY_ITEMS[name](given["inputs"])
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.items()}
    assert given["item"] == name
    assert plain == given["expected"]


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_has_its_parts_in_order(name: str) -> None:
    parts = re.findall(r"^\*\*(\w+)\*\*\s", ITEMS[name], re.MULTILINE)
    assert list(dict.fromkeys(parts)) == PARTS
    assert parts == sorted(parts, key=PARTS.index)
    assert re.search(r"^\*\*Determinism\*\* (exact|bounded: \S)", ITEMS[name], re.MULTILINE)
