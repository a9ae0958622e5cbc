"""What judges vectors accepts no other value than the expected one, and JSON keeps every value."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from conformance.assurance.item_vectors.items import ITEMS
from conformance.assurance.vector_writer.expected import OPERATIONS
from conformance.assurance.vector_writer.operation import encoded
from conformance.checks.vector_checks import BOUNDED, complaints
from conformance.vectors import files
from conformance.vectors.compact import expanded
from conformance.vectors.files import decoded, parameters_of
from conformance.vectors.subject import STAGES
from spec.backend import resolve
from spec.parameters import CrystalCacheParameters


def test_every_operation_of_the_writer_is_run() -> None:
    assert OPERATIONS.keys() == ITEMS.keys() | STAGES.keys()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_result_is_a_complaint(operation: str) -> None:
    """Every expected value of every valid vector is read: another one is not accepted."""
    bound = BOUNDED.get(operation)
    for _, group, test in files.published():
        if group["operation"] != operation or test["result"] != "valid":
            continue
        p, given = parameters_of(decoded(group["parameters"])), decoded(test)
        given["inputs"] = expanded(given["inputs"])
        right = ITEMS[operation](given["inputs"], p) if operation in ITEMS else run_numpy(operation, given, p)
        for name in given["expected"]:
            # A choice inside its bound may fall either way, and prefill's bounded results are read from its record.
            if name in given.get("bounded", []) and (name in ("intra", "cross") or operation == "prefill"):
                continue
            wrong = spoiled(right[name])
            if wrong is not None:
                found = list(complaints({**right, name: wrong}, given, bound, p, "float64"))
                assert found, (test["tcId"], name)


def run_numpy(operation: str, given: Any, p: CrystalCacheParameters) -> Mapping[str, Any]:
    return STAGES[operation](resolve("numpy"), given["inputs"], p)


def spoiled(value: Any) -> Any:
    """The value with its first number moved, or a longer text; None where it has no number."""
    if isinstance(value, str):
        return value + "0"
    if isinstance(value, list) and value and isinstance(value[0], list):
        first = spoiled(value[0])
        return None if first is None else [np.asarray(first).tolist(), *value[1:]]
    array = np.array(value)
    if not array.size:
        return None
    array.flat[0] = not array.flat[0] if array.dtype == np.bool_ else np.nan_to_num(array.flat[0]) + 1
    return array


@pytest.mark.parametrize("value", [0.1, -0.0, 1e-320, float("inf"), -float("inf"), 3, True, None, "28%", [[0.5], []]])
def test_values_survive_json(value: object) -> None:
    again = decoded(json.loads(json.dumps(encoded({"value": value}))))["value"]
    assert repr(again) == repr(value)
