"""Tables are whole in every terminal, and a report states the answers of a task that the full cache cannot do."""

from io import StringIO

import pytest

pytest.importorskip("transformers", reason="the reports are of transformers models")

from rich.console import Console

from experiments.studies.evidence.samples import Samples
from experiments.studies.evidence.tables import right_answers
from experiments.studies.own_texts import user_question_rows
from experiments.studies.report import fitting_tables

pytestmark = pytest.mark.law("figures-are-counted-right")


@pytest.mark.parametrize("width", [200, 80, 40])
def test_no_number_of_a_wide_table_is_cut(width: int) -> None:
    headings = ["policy", *(f"column {at}" for at in range(20))]
    lines = [[name, *(f"0.{at:02}{row}" for at in range(20))] for row, name in enumerate(("snapkv", "crystalcache"))]
    pieces = fitting_tables("Table 13", headings, lines, width)
    stream = StringIO()
    for piece in pieces:
        Console(width=width, file=stream).print(piece)
    assert "…" not in stream.getvalue()
    assert all(len(line) <= width for line in stream.getvalue().splitlines())
    assert {cell for line in lines for cell in line} <= set(stream.getvalue().split())
    assert (len(pieces) == 1) is (width == 200)


def row(index: int, full: float, own: float) -> dict[str, object]:
    cells = [
        {"policy": policy, "budget": budget, "right": right, "kept": 10, "evidence_kept": 0}
        for policy, budget, right in (("fullcache", "1.0", full), ("snapkv", "0.3", own))
    ]
    return {
        "task": "mine", "length": 100, "placement": "after", "context": str(index), "metadata": {},
        "evidence_tokens": 0, "cells": cells,
    }


def test_a_report_states_the_answers_that_it_compares() -> None:
    """Check answers below the smallest accuracy of the full cache: one of four, and none of four."""
    rows = [row(at, float(at == 0), 0.0) for at in range(4)]
    shown = right_answers(Samples(rows))
    assert "Compared with fullcache 1.0: 0.25 [" in shown
    assert '0.00 <span class="unbroken">[' in shown
    assert user_question_rows(rows) == []
