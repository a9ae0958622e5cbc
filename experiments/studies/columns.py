"""Columns of the row of a sample, and checks of rows that other people may have written."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from spec.retention import Granularity

__all__ = ["check_row", "missing_column"]

_MOST = 2**53
"""Largest size of an integer. Every such integer is exact as a float."""
_SECONDS = 2**20
"""Longest time of one part of a sample. A sum of a longer time may have no date."""
_GRANULARITIES = (None, *(one.value for one in Granularity))
_DIGEST = {"digest", "controlled"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or _is_text(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: Any) -> bool:
    """Return True for a number. A number that was not measured is NaN or None."""
    return value is None or type(value) is float or _is_whole(value)


def _is_finite(value: Any) -> bool:
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


def _is_amount(value: Any) -> bool:
    """Return True for a number of tokens, or for a list with the number of each layer or head."""
    each = value if isinstance(value, list) and value else [value]
    return all(_is_finite(one) and 0 <= one <= _MOST for one in each)


def _is_score(value: Any) -> bool:
    return value is None or type(value) is bool or (_is_finite(value) and 0 <= value <= 1)


def _is_scalar(value: Any) -> bool:
    return value is None or type(value) in (str, bool, float) or _is_whole(value)


def _is_metadata(value: Any) -> bool:
    if not isinstance(value, dict) or not all(map(_is_scalar, value.values())):
        return False
    complete = "question" not in value or {"text", "expected"} <= value.keys()
    return complete and _is_finite(value.get("depth", 0.0))


def _is_calibration(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.keys() >= _DIGEST and _is_text(value["digest"]))


def _is_seconds(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_finite(one) and 0 <= one <= _SECONDS for one in value.values())


def _are_cells(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


_Columns = Mapping[str, Callable[[Any], bool]]
_NEEDED: _Columns = {
    **dict.fromkeys(("rules", "model", "task", "part", "placement"), _is_text), "length": _is_count,
    "metadata": _is_metadata, "cells": _are_cells, "seed": _is_whole, "evidence_tokens": _is_count,
    **dict.fromkeys(("context", "backend", "spec_version"), _is_text),
}
_OTHERS: _Columns = {
    **dict.fromkeys(("index", "question"), _is_scalar), **dict.fromkeys(("commit", "metric"), _is_text),
    **dict.fromkeys(("prompt_tokens", "question_tokens", "answer_tokens"), _is_count),
    "calibration": _is_calibration, "seconds": _is_seconds,
    **dict.fromkeys(("template", "chat_template", "control"), _is_text_or_none),
}
_CELL_NEEDED: _Columns = {
    **dict.fromkeys(("policy", "budget"), _is_text), "right": _is_score,
    **dict.fromkeys(("kept", "evidence_kept"), _is_amount),
}
_CELL_OTHERS: _Columns = {
    "granularity": _GRANULARITIES.__contains__, "backend": _is_text,
    "answer": _is_text_or_none,
    **dict.fromkeys(("mean_cache", "peak_cache", "mean_bytes", "peak_bytes"), _is_finite),
    **dict.fromkeys(("likelihood", "divergence", "lost_attention"), _is_number),
}
_NO_CELL = {"policy": None, "budget": None}
_ANSWERED = ("mean_cache", "peak_cache")
"""Columns of a cell with a score."""


def check_row(row: Mapping[str, Any]) -> str:
    """Return the name of the first column of a sample's row that has an invalid value, or "".

    Columns may be missing, as in the row of an error, but each cell has a policy and a budget.
    """
    if wrong := _wrong(row, {**_NEEDED, **_OTHERS}):
        return wrong
    cells = (_wrong({**_NO_CELL, **cell}, {**_CELL_NEEDED, **_CELL_OTHERS}) for cell in row.get("cells", ()))
    return next(filter(None, cells), "")


def missing_column(row: Mapping[str, Any]) -> str:
    """Return the name of the first column that the row of a sample lacks, or ""."""
    if lacking := [name for name in _NEEDED if name not in row]:
        return lacking[0]
    for cell in row["cells"]:
        answered = _ANSWERED if cell.get("right") is not None else ()
        if lacking := [name for name in (*_CELL_NEEDED, *answered) if name not in cell]:
            return lacking[0]
    return ""


def _wrong(row: Mapping[str, Any], columns: _Columns) -> str:
    return next((name for name, value in row.items() if name in columns and not columns[name](value)), "")
