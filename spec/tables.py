"""Tables at the border: edges, trunks, retentions and results as validated data frames.

The only module that imports pandera (the extra `tables`); nothing inside a pipeline uses it. A table that breaks a
rule raises SpecError, which names the column (or the rule across columns) and a value.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaError, SchemaErrors

from spec.errors import SpecError
from spec.records import CoAttention, CrystalRetention
from spec.retention import Retention

__all__ = [
    "EdgeTable", "ResultTable", "RetentionTable", "TrunkTable", "checked", "edge_table", "result_table",
    "retention_table", "trunk_table",
]

ROUNDED_ONE = 1 + 2.0**-20
"""1 for weights that S1 may have rounded in float32."""

RESULT_KEY = [
    "policy", "task", "length", "budget_requested", "budget", "placement", "n", "seed", "model", "backend",
    "spec_version", "control",
]


class EdgeTable(pa.DataFrameModel):
    """Eq. 15's directed triples, in their stated order."""

    first: int = pa.Field(ge=0)
    second: int = pa.Field(ge=0)
    weight: float = pa.Field(gt=0, le=ROUNDED_ONE)
    kind: str = pa.Field(isin=("intra", "cross"))

    class Config:
        """No other columns; an ordered pair occurs once."""

        strict = True
        unique = ["first", "second"]  # noqa: RUF012  (pandera reads the class attribute)

    @pa.dataframe_check
    @classmethod
    def no_loop(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """An edge joins two tokens."""
        return table["first"] != table["second"]

    @pa.dataframe_check
    @classmethod
    def cross_runs_forward(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """A cross edge is stored with the earlier token first."""
        return (table["kind"] != "cross") | (table["first"] < table["second"])


class TrunkTable(pa.DataFrameModel):
    """One row per trunk: where it lies, why it was ranked so, and what was left of it."""

    trunk: int = pa.Field(ge=0, unique=True)
    start: int = pa.Field(ge=0)
    stop: int = pa.Field(ge=1)
    impact: float = pa.Field(ge=0)
    degree: float = pa.Field(ge=0)
    D_before: float = pa.Field(ge=0, le=1)
    D: float = pa.Field(ge=0, le=1)
    score: float = pa.Field(ge=0, nullable=True)
    protected: bool
    ratio: float = pa.Field(ge=0, le=1)
    kept: int = pa.Field(ge=0)

    class Config:
        """No other columns."""

        strict = True

    @pa.dataframe_check
    @classmethod
    def contiguous(cls, table: pd.DataFrame) -> bool:
        """Trunks follow each other without gap or overlap; none is empty."""
        follows = bool((table["start"].to_numpy()[1:] == table["stop"].to_numpy()[:-1]).all())
        return follows and bool((table["start"] < table["stop"]).all())

    @pa.dataframe_check
    @classmethod
    def kept_fits_ratio(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """Ratio 1 keeps the whole trunk, ratio 0 nothing, any other some of it."""
        size, kept, ratio = table["stop"] - table["start"], table["kept"], table["ratio"]
        partial = (ratio > 0) & (ratio < 1) & (kept > 0) & (kept < size)
        return ((ratio == 1) & (kept == size)) | ((ratio == 0) & (kept == 0)) | partial

    @pa.dataframe_check
    @classmethod
    def protected_is_whole_and_not_scored(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """A protected trunk has ratio 1 and no score; every other has a score."""
        scored = table["score"].notna()
        return (table["protected"] & ~scored & (table["ratio"] == 1)) | (~table["protected"] & scored)

    @pa.dataframe_check
    @classmethod
    def never_grows(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """Eq. 34 can only lower D."""
        return table["D"] <= table["D_before"]


class RetentionTable(pa.DataFrameModel):
    """One row per kept position of each group; `slot` is its place in the cache."""

    group: int = pa.Field(ge=0)
    slot: int = pa.Field(ge=0)
    position: int = pa.Field(ge=0)

    class Config:
        """No other columns; a group keeps a position once."""

        strict = True
        unique = ["group", "position"]  # noqa: RUF012

    @pa.dataframe_check
    @classmethod
    def ascending(cls, table: pd.DataFrame) -> bool:
        """Inside a group, slots count from 0 and positions ascend."""
        groups = [group for _, group in table.groupby("group")]
        return all(
            group["slot"].tolist() == list(range(len(group))) and group["position"].is_monotonic_increasing
            for group in groups
        )


class ResultTable(pa.DataFrameModel):
    """One row per cell of an evaluation. Cache sizes are in tokens, per layer and KV head."""

    policy: str = pa.Field(str_length={"min_value": 1})
    task: str = pa.Field(str_length={"min_value": 1})
    length: int = pa.Field(ge=1)
    budget_requested: str = pa.Field(str_length={"min_value": 1})
    budget: int = pa.Field(ge=1)
    placement: str = pa.Field(isin=("after", "in_prompt", "paper"))
    n: int = pa.Field(ge=1)
    correct: int = pa.Field(ge=0)
    accuracy: float = pa.Field(ge=0, le=1)
    mean_cache: float = pa.Field(ge=0)
    peak_cache: float = pa.Field(ge=0, coerce=True)
    over_budget: float = pa.Field(ge=0, coerce=True)
    seed: int = pa.Field(ge=0)
    model: str = pa.Field(str_length={"min_value": 1})
    backend: str = pa.Field(str_length={"min_value": 1})
    spec_version: str = pa.Field(str_matches=r"^\d+\.\d+\.\d+$")
    control: bool

    class Config:
        """No other columns; a cell has one row."""

        strict = True
        unique = RESULT_KEY

    @pa.dataframe_check
    @classmethod
    def accuracy_is_correct_over_n(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """The share says the same as the counts."""
        return (table["correct"] <= table["n"]) & (table["accuracy"] == table["correct"] / table["n"])

    @pa.dataframe_check
    @classmethod
    def mean_below_peak(cls, table: pd.DataFrame) -> "pd.Series[bool]":
        """A mean does not exceed the largest value."""
        return table["mean_cache"] <= table["peak_cache"]


def checked(model: type[pa.DataFrameModel], table: pd.DataFrame) -> pd.DataFrame:
    """The table, if every rule of the model holds.

    Raises:
        SpecError: at the first rule that does not; its argument is `model.column` or `model`.
    """
    try:
        return pd.DataFrame(model.validate(table))
    except SchemaErrors as errors:
        raise _as_spec_error(model.__name__, errors.schema_errors[0]) from errors
    except SchemaError as error:
        raise _as_spec_error(model.__name__, error) from error


def _as_spec_error(model: str, error: SchemaError) -> SpecError:
    column = getattr(error.schema, "name", None)
    where = model if column in (None, model) else f"{model}.{column}"
    cases = error.failure_cases
    value = cases["failure_case"].tolist()[0] if isinstance(cases, pd.DataFrame) and len(cases) else cases
    rule = getattr(error.check, "error", None) or getattr(error.check, "name", None) or error.check
    return SpecError(where, value, f"breaks {rule}")


def edge_table(coattention: CoAttention) -> pd.DataFrame:
    """The edges of S1."""
    first, second, weight = coattention.edges()
    intra = int((coattention.intra >= 0).sum())
    kind = ["intra"] * intra + ["cross"] * (len(first) - intra)
    columns = {"first": first, "second": second, "weight": weight, "kind": pd.Series(kind, dtype="str")}
    return checked(EdgeTable, pd.DataFrame(columns))


def trunk_table(retention: CrystalRetention) -> pd.DataFrame:
    """The trunks of a prefill, with what each stage said of them."""
    offsets = retention.trunks.offsets
    columns = {
        "trunk": np.arange(len(offsets) - 1), "start": offsets[:-1], "stop": offsets[1:],
        "impact": retention.trunks.impact, "degree": retention.graph.degree, "D_before": retention.graph.D,
        "D": retention.D, "score": retention.scores, "protected": retention.protected, "ratio": retention.ratio,
        "kept": np.diff(np.searchsorted(retention.kept, offsets)),
    }
    return checked(TrunkTable, pd.DataFrame(columns))


def retention_table(retention: Retention) -> pd.DataFrame:
    """The kept positions, group by group."""
    sizes = np.diff(retention.offsets)
    group = np.repeat(np.arange(retention.groups), sizes)
    slot = np.arange(len(retention.positions)) - np.repeat(retention.offsets[:-1], sizes)
    columns = {"group": group, "slot": slot, "position": retention.positions}
    return checked(RetentionTable, pd.DataFrame(columns))


def result_table(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Results of an evaluation; each row has every column of ResultTable."""
    return checked(ResultTable, pd.DataFrame([dict(row) for row in rows]))
