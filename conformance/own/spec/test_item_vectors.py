"""The published vectors of items hold for the reference."""

from typing import Any

import pytest

from conformance.assurance.item_vectors.items import ITEMS
from conformance.checks.vector_checks import BOUNDED, cases, problems
from conformance.vectors import files
from conformance.vectors.subject import STAGES


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(("group", "test"), cases(ITEMS))
def test_the_reference_holds_a_vector_of_an_item(group: Any, test: Any) -> None:
    assert problems(group, test, ITEMS[group["operation"]], BOUNDED, "float64") == []


def test_every_operation_has_vectors() -> None:
    """None is left out because a file of vectors is not there."""
    assert {group["operation"] for _, group, _ in files.published()} == ITEMS.keys() | STAGES.keys()
