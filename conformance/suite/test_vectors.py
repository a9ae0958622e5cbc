"""Tests that the backend under test satisfies the published vectors of the stages."""

from typing import Any

import pytest

from conformance.checks.vector_checks import BOUNDED, cases, problems
from conformance.plugin import skip_without
from conformance.vectors.codec import is_compact
from conformance.vectors.subject import FAMILIES, STAGES
from spec.backend import Backend


@pytest.mark.parametrize(("group", "test"), cases(STAGES))
def test_the_backend_holds_a_vector_of_a_stage(
    request: pytest.FixtureRequest, backend_under_test: Backend, precision: str, group: Any, test: Any,
) -> None:
    operation = group["operation"]
    skip_without(backend_under_test, *FAMILIES[operation])
    if is_compact(list(test["inputs"].values())):
        request.getfixturevalue("compiled")
    assert problems(group, test, lambda i, p: STAGES[operation](backend_under_test, i, p), BOUNDED, precision) == []


def test_every_stage_has_vectors() -> None:
    """Check that no stage is left out because its file of vectors is missing."""
    assert {case.values[0]["operation"] for case in cases(STAGES)} == STAGES.keys()
