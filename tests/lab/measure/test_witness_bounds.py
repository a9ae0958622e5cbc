"""The measurement of the witness's bounds, on a tiny model."""

from pathlib import Path

import pytest

from conformance.cache_suite.judge import save_tiny
from lab.measure.witness_bounds import FAULTS, Measured, measure, table


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, 1e-4), ("bfloat16", 1e-4, 0.3)])
def test_rounding_of_a_session_is_inside_the_bound(dtype: str, least: float, most: float, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    actual = measure(str(folder), dtype, ["shared prefixes"])
    assert len(actual) == 4
    assert all(least < one.mean < most for one in actual)
    decided = [one for one in actual if one.decided]
    assert decided
    for one in decided:
        assert {"full cache", *(FAULTS if dtype == "float32" else ())} <= {*one.noticed}


@pytest.mark.law("figures-are-counted-right")
def test_the_table_counts_decided_answers() -> None:
    answers = [
        Measured(0.03, 1.0, True, ("full cache",)), Measured(0.21, 0.5, True, ("full cache", "renumbered")),
        Measured(0.1, 0.1, False, FAULTS),
    ]
    assert table({"bfloat16": answers}).splitlines()[2] == "| bfloat16 | 3 | 0.03 to 0.21 | 1 | 2 | 2 | 0 | 0 | 1 |"
