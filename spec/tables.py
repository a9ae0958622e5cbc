"""Validation of evaluation results as pandas data frames, and CSV files.

This module needs pandera (install the extra `tables`). kvspec raises SpecError for a table that breaks a rule. The
message contains the column, a wrong value and the rule. If the rule compares several columns, the message names the
table instead of a column.
"""

from collections.abc import Iterable, Mapping

import pandas as pd
import pandera.pandas as pa
from pandas.api.types import is_numeric_dtype
from pandera.errors import SchemaError, SchemaErrors

from spec.errors import SpecError

__all__ = ["ResultTable", "csv_text", "result_table"]

RESULT_KEY = [
    "policy", "task", "length", "budget_requested", "budget", "placement", "n", "seed", "model", "backend",
    "spec_version", "control",
]


class ResultTable(pa.DataFrameModel):
    """Schema of a table of evaluation results. One row has the result of one policy at one task, length and budget.

    `mean_cache` and `peak_cache` are numbers of tokens per layer and KV head.

    `mean_kept` counts only tokens of the prompt. `mean_cache` also counts tokens of the answer.
    """

    policy: str = pa.Field(str_length={"min_value": 1})
    task: str = pa.Field(str_length={"min_value": 1})
    length: int = pa.Field(ge=1)
    budget_requested: str = pa.Field(str_length={"min_value": 1})
    budget: int = pa.Field(ge=1)
    placement: str = pa.Field(isin=("after", "in_prompt", "paper"))
    n: int = pa.Field(ge=1)
    correct: float = pa.Field(ge=0, coerce=True)
    accuracy: float = pa.Field(ge=0, le=1)
    mean_kept: float = pa.Field(ge=0)
    mean_cache: float = pa.Field(ge=0)
    peak_cache: float = pa.Field(ge=0, coerce=True)
    over_budget: float = pa.Field(ge=0, coerce=True)
    seed: int = pa.Field(ge=0)
    model: str = pa.Field(str_length={"min_value": 1})
    backend: str = pa.Field(str_length={"min_value": 1})
    spec_version: str = pa.Field(str_matches=r"^\d+\.\d+\.\d+$")
    control: bool

    class Config:
        """Pandera settings: an extra column is an error, and two rows with equal values in RESULT_KEY are an error."""

        strict = True
        unique = RESULT_KEY

    @pa.dataframe_check
    @classmethod
    def accuracy_is_correct_over_n(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """Check that `accuracy` equals `correct` / `n`."""
        return (table["correct"] <= table["n"]) & (table["accuracy"] == table["correct"] / table["n"])

    @pa.dataframe_check
    @classmethod
    def mean_below_peak(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """Check that the mean cache size is at most the peak cache size."""
        return table["mean_cache"] <= table["peak_cache"]


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of texts that a spreadsheet runs as formulas."""


def csv_text(frame: pd.DataFrame) -> str:
    """Return a data frame as CSV. A text that a spreadsheet would run as a formula begins with an apostrophe.

    Numbers stay as they are, also if they are stored as text, such as an answer "-3".
    """
    texts = {name: frame[name].map(_no_formula) for name in frame if not is_numeric_dtype(frame[name])}
    return str(frame.assign(**texts).rename(columns=_no_formula).to_csv(index=False))


def _no_formula(cell: object) -> object:
    if not isinstance(cell, str) or not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def result_table(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Return the rows as a validated data frame. Each row must have every column of ResultTable.

    Raises:
        SpecError: if a row breaks a rule. The argument in the message is `ResultTable.column`, or `ResultTable`.
    """
    try:
        return pd.DataFrame(ResultTable.validate(pd.DataFrame([dict(row) for row in rows])))
    except SchemaErrors as errors:
        raise _as_spec_error(errors.schema_errors[0]) from errors
    except SchemaError as error:
        raise _as_spec_error(error) from error


def _as_spec_error(error: SchemaError) -> SpecError:
    table, column = ResultTable.__name__, getattr(error.schema, "name", None)
    where = table if column in (None, table) else f"{table}.{column}"
    cases = error.failure_cases
    value = cases["failure_case"].tolist()[0] if isinstance(cases, pd.DataFrame) and len(cases) else cases
    rule = getattr(error.check, "error", None) or getattr(error.check, "name", None) or error.check
    return SpecError(where, value, f"breaks {rule}")
