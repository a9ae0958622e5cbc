"""The published vectors hold: for the reference item by item, for the judged backend stage by stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
import pytest

from conformance.checks.refusals import refused
from conformance.checks.vector_checks import complaints
from conformance.plugin import skip_without
from conformance.vectors import files
from conformance.vectors.compact import expanded, is_compact
from conformance.vectors.json_values import decoded, parameters_of
from conformance.vectors.nestedkv_subject import NESTEDKV_STAGES
from conformance.vectors.subject import ITEMS
from conformance.vectors.subject import STAGES as STAGE_RUNS
from conformance.vectors.subject_decode import DECODE_STAGES
from spec.backend import Backend


def cases(of_stages: bool) -> list[Any]:
    """Vectors of stages or of items, under the marks of their items."""
    return [
        pytest.param(
            group, test, id=f"{stage}-{test['tcId']}", marks=[pytest.mark.spec(id=item) for item in test["items"]]
        )
        for stage, group, test in files.published() if (group["operation"] in STAGE_RUNS) == of_stages
    ]


@contextmanager
def unchecked() -> Iterator[None]:
    """Refusals are for users, who run without the shape checks of a test session."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def families_of(operation: str) -> tuple[str, ...]:
    """The stage families that an operation runs."""
    if operation in NESTEDKV_STAGES:
        return ("nestedkv",)
    if operation in ("decode_step", "extend"):
        return ("crystal", "breath")
    return ("breath",) if operation in DECODE_STAGES else ("crystal",)


def holds(group: Any, test: Any, run: Any, precision: str) -> None:
    p, inputs = parameters_of(decoded(group["parameters"])), expanded(decoded(test["inputs"]))
    if test["result"] == "invalid":
        with unchecked(), refused(test["expected"]["argument"]):
            run(inputs, p)
    else:
        given = {**decoded(test), "inputs": inputs}
        assert list(complaints(run(inputs, p), given, group["operation"], p, precision)) == []


@pytest.mark.usefixtures("reference_items")
@pytest.mark.parametrize(("group", "test"), cases(of_stages=False))
def test_the_reference_holds_a_vector_of_an_item(group: Any, test: Any) -> None:
    holds(group, test, ITEMS[group["operation"]], "float64")


@pytest.mark.parametrize(("group", "test"), cases(of_stages=True))
def test_the_backend_holds_a_vector_of_a_stage(
    request: pytest.FixtureRequest, judged: Backend, precision: str, group: Any, test: Any,
) -> None:
    skip_without(judged, *families_of(group["operation"]))
    if is_compact(list(test["inputs"].values())):
        request.getfixturevalue("compiled")
    holds(group, test, lambda i, p: STAGE_RUNS[group["operation"]](judged, i, p), precision)


def test_every_operation_has_vectors() -> None:
    """None is left out because a file of vectors is not there."""
    assert {group["operation"] for _, group, _ in files.published()} == ITEMS.keys() | STAGE_RUNS.keys()
