"""A table of results that breaks any one rule is refused, and the error says where."""

import pytest

from spec.errors import SpecError

tables = pytest.importorskip("spec.tables", reason="the extra 'tables' is not installed", exc_type=ImportError)

RESULT = {
    "policy": "crystalcache", "task": "needle", "length": 1024, "budget_requested": "0.3", "budget": 308,
    "placement": "after", "n": 20, "correct": 19, "accuracy": 0.95, "mean_kept": 300.0, "mean_cache": 320.5,
    "peak_cache": 330, "over_budget": 0, "seed": 42, "model": "pocket", "backend": "numpy", "spec_version": "0.1.0",
    "control": False,
}


def test_results_make_a_table_with_one_row_each() -> None:
    rows = [RESULT, RESULT | {"policy": "streamingllm", "correct": 0, "accuracy": 0.0}]
    assert tables.result_table(rows)["policy"].tolist() == ["crystalcache", "streamingllm"]


@pytest.mark.parametrize(
    ("column", "value", "where"),
    [
        ("policy", "", "ResultTable.policy"),
        ("task", "", "ResultTable.task"),
        ("length", 0, "ResultTable.length"),
        ("budget_requested", 0.3, "ResultTable.budget_requested"),
        ("budget", 0, "ResultTable.budget"),
        ("placement", "before", "ResultTable.placement"),
        ("n", 0, "ResultTable.n"),
        ("correct", -1, "ResultTable.correct"),
        ("correct", 18, "ResultTable"),
        ("correct", 21, "ResultTable"),
        ("accuracy", 1.5, "ResultTable.accuracy"),
        ("mean_cache", -1.0, "ResultTable.mean_cache"),
        ("peak_cache", 300, "ResultTable"),
        ("over_budget", -1, "ResultTable.over_budget"),
        ("seed", -1, "ResultTable.seed"),
        ("model", "", "ResultTable.model"),
        ("backend", "", "ResultTable.backend"),
        ("spec_version", "new", "ResultTable.spec_version"),
        ("control", "no", "ResultTable.control"),
    ],
)
def test_a_result_that_breaks_a_rule_is_refused(column: str, value: object, where: str) -> None:
    with pytest.raises(SpecError) as caught:
        tables.result_table([RESULT | {column: value}])
    assert caught.value.argument == where


def test_a_repeated_a_missing_and_an_unknown_column_are_refused() -> None:
    with pytest.raises(SpecError):
        tables.result_table([RESULT, RESULT | {"correct": 0, "accuracy": 0.0}])
    with pytest.raises(SpecError):
        tables.result_table([{name: value for name, value in RESULT.items() if name != "seed"}])
    with pytest.raises(SpecError):
        tables.result_table([RESULT | {"note": "fast"}])


def test_the_error_names_the_value_and_the_rule() -> None:
    with pytest.raises(SpecError, match=r"ResultTable\.length = -7: breaks greater_than_or_equal_to\(1\)"):
        tables.result_table([RESULT | {"length": -7}])
