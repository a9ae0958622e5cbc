"""Invalid parameters, budgets, retentions, policies and tables of results raise an error that names the argument."""

import math
import pickle
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.checks.refusals import refused
from reference.policies import crystalcache, streaming_llm
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.retention import Granularity, Retention
from spec.validate import check_token_ids


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("CC-PREFILL")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("C", 0), ("T_max", 0), ("k_intra", -1), ("N_min", -1), ("W_recent", -1), ("N_sink", True), ("C", 8.0),
        ("tau_intra", -0.1), ("tau_merge", math.nan), ("tau_edge", "0.05"), ("alpha", -1.0), ("alpha", math.inf),
        ("M_max", 0.0), ("s", 0), ("epsilon", 0.0), ("M_min", 21.0), ("impact", "mean"), ("graph", None),
    ],
)
def test_parameters_are_refused_by_name(field: str, value: object) -> None:
    with refused(field, value):
        replace(PAPER, **{field: value})  # type: ignore[arg-type]


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("CC-PREFILL")
def test_an_id_outside_the_vocabulary_is_refused() -> None:
    assert check_token_ids(np.array([0, 9]), 2, vocabulary=10).dtype == np.int64
    with refused("token_ids", 10):
        check_token_ids(np.array([0, 10]), 2, vocabulary=10)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("CC-PREFILL")
def test_policies_are_refused_when_they_are_made() -> None:
    with refused("sentence_ends", frozenset()):
        crystalcache(frozenset())
    with refused("backend", "nampy"):
        crystalcache(frozenset({1}), backend="nampy")
    with refused("N_sink", -1):
        streaming_llm(-1)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize("kept", [[1, 0], [0, 0], [-1, 2], [3, 5]])
def test_a_retention_holds_ascending_positions_inside_the_prompt(kept: list[int]) -> None:
    with refused("positions", kept):
        Retention.shared(np.array(kept, dtype=np.int64), 5)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize("offsets", [[0], [1, 2], [0, 1], [0, 2, 1, 2]])
def test_a_retention_has_offsets_that_cover_its_positions(offsets: list[int]) -> None:
    with refused("offsets", offsets):
        Retention(np.array([0, 3]), np.array(offsets), 5, Granularity.LAYER)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("CC-COMPACT")
def test_one_group_for_a_model_and_any_number_for_layers() -> None:
    groups = Retention(np.array([0, 3, 1]), np.array([0, 2, 3]), 5, Granularity.LAYER)
    assert [groups.group(g).tolist() for g in range(groups.groups)] == [[0, 3], [1]]
    with refused("offsets", groups.offsets):
        Retention(groups.positions, groups.offsets, 5)


@pytest.mark.usefixtures("reference_items")
@pytest.mark.spec("CC-PREFILL")
@given(value=st.one_of(st.integers(), st.text(), st.none()))
def test_errors_survive_a_process_boundary(value: object) -> None:
    """Worker processes pickle errors."""
    error = SpecError("q", value, "must be finite")
    again = pickle.loads(pickle.dumps(error))
    assert (again.argument, again.value, again.bound, str(again)) == ("q", value, "must be finite", str(error))


@pytest.mark.spec("CC-BUDGET-FORMS")
@given(thousandths=st.integers(1, 1000), n=st.integers(0, 200_000))
@example(280, 25)
def test_a_float_is_its_decimal(thousandths: int, n: int) -> None:
    """The number of tokens must be the exact ceiling of the decimal, never of the double."""
    expected = -(-thousandths * n // 1000)
    assert parse_budget(thousandths / 1000).tokens(n) == expected
    assert parse_budget(f"{thousandths / 1000:.3f}").tokens(n) == expected
    assert parse_budget(f"{Decimal(thousandths) / 10}%").tokens(n) == expected
    assert parse_budget(Fraction(thousandths, 1000)).tokens(n) == expected


@pytest.mark.spec("CC-BUDGET-FORMS")
def test_a_float32_is_read_as_its_own_decimal() -> None:
    """Scalars of NumPy are floats and ints like those of Python."""
    assert parse_budget(np.float32(0.3)).fraction == Fraction(3, 10)
    assert parse_budget(np.int64(7)).count == 7


@pytest.mark.spec("CC-BUDGET-FORMS")
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (1, Budget(count=1)), ("1", Budget(count=1)), (512, Budget(count=512)), (" 512 ", Budget(count=512)),
        (1.0, Budget(fraction=Fraction(1))), ("1.0", Budget(fraction=Fraction(1))),
        ("100%", Budget(fraction=Fraction(1))), ("30%", Budget(fraction=Fraction(3, 10))),
        (".5", Budget(fraction=Fraction(1, 2))), ("1.", Budget(fraction=Fraction(1))),
        ("0.5%", Budget(fraction=Fraction(1, 200))), (Budget(count=3), Budget(count=3)),
        ("1.%", Budget(fraction=Fraction(1, 100))), (2**63 - 1, Budget(count=2**63 - 1)),
        (str(2**63 - 1), Budget(count=2**63 - 1)), ("0" * 63 + "7", Budget(count=7)),
        ("0." + "1" * 62, Budget(fraction=Fraction(int("1" * 62), 10**62))),
        (" " * 61 + "0.5", Budget(fraction=Fraction(1, 2))),
    ],
)
def test_forms(form: object, expected: Budget) -> None:
    """An int is a number of tokens (1 is one token). A float, or text with "." or "%", is a fraction."""
    assert parse_budget(form) == expected


@pytest.mark.spec("CC-BUDGET-FORMS")
@pytest.mark.parametrize(
    "form",
    [
        0, -1, 0.0, 1.5, -0.5, math.nan, math.inf, -math.inf, True, False, np.True_, "half", "", "-3", "0", "0.0",
        "101%", "1e-1", "0,5", "٣", "0x10", "1/2", "%", ".", None, 1 + 0j, [0.5], b"0.5", "nan", "inf", "٠.٣", "٣%",
        "\u20030.5", "0.5\n", "1_000", "+1", "0.5%%", "0x1.0p-1", 2**63, str(2**63), "9" * 65, "0." + "1" * 5000,
        "0" * 64 + "7", " " * 62 + "0.5",
        Fraction(3, 2), Decimal("NaN"), np.float32("nan"), np.datetime64("NaT", "D"),
    ],
)
def test_what_is_no_budget(form: object) -> None:
    """Check that an invalid budget raises an error with the argument and the given value."""
    with pytest.raises(SpecError) as caught:
        parse_budget(form)
    assert caught.value.argument == "budget"
    assert caught.value.bound
    assert str(caught.value.value)[:64] == str(form)[:64]


@pytest.mark.spec("CC-BUDGET-FORMS")
@pytest.mark.parametrize(("form", "words"), [
    ("0,3", "'64MiB' (memory); did you mean 0.3?"), ("30,5%", "did you mean 30.5%?"), ("1,000", "did you mean 1000?"),
    ("30 %", "did you mean 30%?"), ("2,048,000", "did you mean 2048000?"), ("1,5", "'64MiB' (memory)"),
    ("64mib", "did you mean 64MiB?"), (" 1.5 m", "did you mean 1.5MB or 1.5MiB?"), ("64MiBs", "'64MiB' (memory)"),
    ("0", "a fraction has a point, such as 0.3"), (2**63, "2^63 - 1"), (2.0, "tokens has no point, such as 512"),
])
def test_an_error_about_a_budget_has_a_form_that_is_valid(form: object, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_budget(form)
    assert str(caught.value).endswith(words) or f"{words};" in str(caught.value)


@pytest.mark.spec("CC-BUDGET-FORMS")
@given(text=st.one_of(st.text("0123456789.% +-_e/xp", max_size=8), st.text(max_size=4), st.floats().map(float.hex)))
def test_text_is_read_by_the_grammar_and_by_nothing_else(text: str) -> None:
    """Compare with a grammar that is spelled out letter by letter.

    A hexadecimal float, as in the vectors, is no budget.
    """
    bare = text.strip(" ")
    number = bare.removesuffix("%")
    whole, point, part = number.partition(".")
    digits = bool(whole + part) and set(whole + part) <= set("0123456789") and (bool(part) or bool(whole))
    value = (Fraction(int(whole + part or "0"), 10 ** len(part)) if digits else Fraction(0))
    if digits and not point and number == bare and value >= 1:
        assert parse_budget(text) == Budget(count=int(value))
    elif digits and (point or number != bare) and 0 < (share := value / (1 if number == bare else 100)) <= 1:
        assert parse_budget(text) == Budget(fraction=share)
    else:
        with pytest.raises(SpecError):
            parse_budget(text)


@pytest.mark.spec("CC-BUDGET-FORMS")
@pytest.mark.parametrize(
    "parts",
    [{}, {"fraction": Fraction(1, 2), "count": 3}, {"fraction": Fraction(0)}, {"fraction": Fraction(2)}, {"count": 0},
     {"count": True}, {"count": 2**63}],
)
def test_a_record_that_is_no_budget_is_refused(parts: dict[str, Any]) -> None:
    """A Budget passes through `parse_budget`, so it must satisfy the rules of the forms."""
    with pytest.raises(SpecError) as caught:
        Budget(**parts)
    assert caught.value.argument == "budget"


@pytest.mark.spec("CC-BUDGET-FORMS")
@given(budget=st.one_of(
    st.integers(1, 2**63 - 1).map(lambda k: Budget(count=k)),
    st.integers(1, 10**12).map(lambda k: Budget(fraction=Fraction(k, 10**12))),
))
def test_a_count_does_not_grow_and_text_goes_back(budget: Budget) -> None:
    """Check that `str` of a budget is parsed as the same budget."""
    assert parse_budget(str(budget)) == budget
    if budget.count is not None:
        assert budget.tokens(10**9) == budget.count


@pytest.fixture
def tables() -> Any:
    return pytest.importorskip("spec.tables", reason="the extra 'tables' is not installed", exc_type=ImportError)


RESULT = {
    "policy": "crystalcache", "task": "needle", "length": 1024, "budget_requested": "0.3", "budget": 308,
    "placement": "after", "n": 20, "correct": 19, "accuracy": 0.95, "mean_kept": 300.0, "mean_cache": 320.5,
    "peak_cache": 330, "over_budget": 0, "seed": 42, "model": "pocket", "backend": "numpy", "spec_version": "0.1.0",
    "control": False,
}


def test_results_make_a_table_with_one_row_each(tables: Any) -> None:
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
def test_a_result_that_breaks_a_rule_is_refused(tables: Any, column: str, value: object, where: str) -> None:
    with pytest.raises(SpecError) as caught:
        tables.result_table([RESULT | {column: value}])
    assert caught.value.argument == where


def test_a_repeated_a_missing_and_an_unknown_column_are_refused(tables: Any) -> None:
    with pytest.raises(SpecError):
        tables.result_table([RESULT, RESULT | {"correct": 0, "accuracy": 0.0}])
    with pytest.raises(SpecError):
        tables.result_table([{name: value for name, value in RESULT.items() if name != "seed"}])
    with pytest.raises(SpecError):
        tables.result_table([RESULT | {"note": "fast"}])


def test_the_error_names_the_value_and_the_rule(tables: Any) -> None:
    with pytest.raises(SpecError, match=r"ResultTable\.length = -7: breaks greater_than_or_equal_to\(1\)"):
        tables.result_table([RESULT | {"length": -7}])
