"""The page of implementations and methods is made from its file, and a cell that is run again is the stored one."""

import json

import pytest

from conformance.measure.matrix import CONFORMS, DIFFERS, IMPLEMENTATIONS, PAGE, STORE, cell_of, measured, page
from conformance.methods.method import METHODS
from conformance.verify.outcomes import Outcome

pytestmark = pytest.mark.law("as-it-is-described")

CELLS = json.loads(STORE.read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_file() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(CELLS)
    assert list(CELLS) == list(IMPLEMENTATIONS)
    assert all(list(one["cells"]) == list(METHODS) for one in CELLS.values())
    verdicts = [cell["verdict"] for one in CELLS.values() for cell in one["cells"].values()]
    assert sum(verdict in (CONFORMS, DIFFERS) for verdict in verdicts) >= 60


def test_a_cell_that_is_run_again_is_the_stored_one() -> None:
    assert measured("numpy", ["knorm"]) == {"knorm": CELLS["numpy"]["cells"]["knorm"]}


def test_a_failure_is_a_cell_with_its_smallest_input_on_the_page() -> None:
    said = "not knorm with 2 tokens, B = 1: kept set 0 of 1 holds [1] instead of [0]"
    cell = cell_of("knorm", Outcome("test[knorm]", [], [], "failed", found=f"{said}\nit agrees with nothing"))
    assert cell == {"verdict": "differs", "as": "knorm", "smallest": said}
    cells = {**CELLS["numpy"]["cells"], "knorm": cell}
    assert f"- numpy, knorm: {said}" in page({**CELLS, "numpy": {**CELLS["numpy"], "cells": cells}})
