"""Tables made from records are valid; a table that breaks any one rule is refused, and the error says where."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference.crystalcache import prefill
from spec.errors import SpecError
from spec.parameters import TINY
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

tables = pytest.importorskip("spec.tables", reason="the extra 'tables' is not installed", exc_type=ImportError)

Table = Any

RESULT = {
    "policy": "crystalcache", "task": "needle", "length": 1024, "budget_requested": "0.3", "budget": 308,
    "placement": "after", "n": 20, "correct": 19, "accuracy": 0.95, "mean_cache": 320.5, "peak_cache": 330,
    "over_budget": 0, "seed": 42, "model": "pocket", "backend": "numpy", "spec_version": "0.1.0", "control": False,
}


def retained() -> CrystalRetention:
    """A prefill with intra and cross edges, protected, whole, partial and evicted trunks."""
    random = np.random.default_rng(3)
    q, k = random.normal(size=(4, 61, 8)), random.normal(size=(2, 61, 8))
    return prefill(q, k, random.integers(0, 9, 61), frozenset([0]), 0.5, TINY)


@pytest.fixture(scope="module")
def crystal() -> CrystalRetention:
    return retained()


@pytest.fixture(scope="module")
def edges(crystal: CrystalRetention) -> Table:
    return tables.edge_table(crystal.coattention)


@pytest.fixture(scope="module")
def trunks(crystal: CrystalRetention) -> Table:
    return tables.trunk_table(crystal)


def with_cell(table: Table, row: int, column: str, value: object) -> Table:
    changed = table.copy()
    changed.loc[row, column] = value
    return changed


def refuse(model: Table, table: Table, where: str) -> None:
    with pytest.raises(SpecError) as caught:
        tables.checked(model, table)
    assert caught.value.argument == where


def test_the_edge_table_holds_the_edges_in_order(crystal: CrystalRetention, edges: Table) -> None:
    first, second, weight = crystal.coattention.edges()
    assert edges["first"].tolist() == first.tolist()
    assert edges["second"].tolist() == second.tolist()
    assert edges["weight"].tolist() == weight.tolist()
    cross = int((crystal.coattention.cross >= 0).sum())
    assert edges["kind"].tolist() == ["intra"] * (len(first) - cross) + ["cross"] * cross
    assert 0 < cross < len(first)


def test_a_prompt_without_edges_has_an_empty_edge_table() -> None:
    zeros = np.zeros((1, 4, 1))
    lonely = prefill(zeros, zeros, np.arange(4), frozenset([0]), 0.5, replace(TINY, k_intra=0, k_cross=0))
    assert len(tables.edge_table(lonely.coattention)) == 0
    assert tables.trunk_table(lonely)["D"].tolist() == [0.5, 0.5]


def test_the_trunk_table_counts_what_is_kept(crystal: CrystalRetention, trunks: Table) -> None:
    assert len(trunks) == len(crystal.trunks.sizes)
    assert trunks["kept"].sum() == len(crystal.kept)
    assert set(trunks["protected"]) == {True, False}
    assert {0.0, 1.0} <= set(trunks["ratio"])
    assert ((trunks["ratio"] > 0) & (trunks["ratio"] < 1)).any()


def test_the_retention_table_counts_slots_per_group() -> None:
    retention = Retention(np.array([0, 4, 1, 2, 3]), np.array([0, 2, 5]), 5, Granularity.LAYER)
    table = tables.retention_table(retention)
    assert table.to_dict("list") == {"group": [0, 0, 1, 1, 1], "slot": [0, 1, 0, 1, 2], "position": [0, 4, 1, 2, 3]}


def test_an_empty_group_is_a_valid_retention() -> None:
    table = tables.retention_table(Retention.shared(np.empty(0, dtype=np.int64), 5))
    assert len(table) == 0


def test_results_make_a_table_with_one_row_each() -> None:
    rows = [RESULT, RESULT | {"policy": "streamingllm", "correct": 0, "accuracy": 0.0}]
    assert tables.result_table(rows)["policy"].tolist() == ["crystalcache", "streamingllm"]


@pytest.mark.parametrize(
    ("column", "value", "where"),
    [
        ("first", -1, "EdgeTable.first"),
        ("weight", 0.0, "EdgeTable.weight"),
        ("weight", 1.1, "EdgeTable.weight"),
        ("weight", float("nan"), "EdgeTable.weight"),
        ("kind", "other", "EdgeTable.kind"),
    ],
)
def test_an_edge_out_of_range_is_refused(edges: Table, column: str, value: object, where: str) -> None:
    refuse(tables.EdgeTable, with_cell(edges, 0, column, value), where)


def test_a_loop_a_backward_cross_edge_and_a_repeated_edge_are_refused(edges: Table) -> None:
    last = len(edges) - 1
    refuse(tables.EdgeTable, with_cell(edges, 0, "second", edges.loc[0, "first"]), "EdgeTable")
    refuse(tables.EdgeTable, with_cell(edges, last, "first", edges.loc[last, "second"] + 1), "EdgeTable")
    repeated = with_cell(with_cell(edges, 1, "first", edges.loc[0, "first"]), 1, "second", edges.loc[0, "second"])
    refuse(tables.EdgeTable, repeated, "EdgeTable")


@pytest.mark.parametrize(
    ("column", "value", "where"),
    [
        ("trunk", 1, "TrunkTable.trunk"),
        ("start", -1, "TrunkTable.start"),
        ("stop", 0, "TrunkTable.stop"),
        ("stop", 1, "TrunkTable"),
        ("impact", -0.5, "TrunkTable.impact"),
        ("degree", -0.5, "TrunkTable.degree"),
        ("D", 1.5, "TrunkTable.D"),
        ("D_before", 0.0, "TrunkTable"),
        ("ratio", 2.0, "TrunkTable.ratio"),
        ("ratio", 0.5, "TrunkTable"),
        ("kept", 0, "TrunkTable"),
        ("score", 0.5, "TrunkTable"),
        ("protected", False, "TrunkTable"),
    ],
)
def test_a_trunk_that_breaks_a_rule_is_refused(trunks: Table, column: str, value: object, where: str) -> None:
    refuse(tables.TrunkTable, with_cell(trunks, 0, column, value), where)


@pytest.mark.parametrize(
    ("column", "value", "where"),
    [
        ("group", -1, "RetentionTable.group"),
        ("slot", 5, "RetentionTable"),
        ("position", 4, "RetentionTable"),
        ("position", 3, "RetentionTable"),
    ],
)
def test_a_retention_out_of_order_is_refused(column: str, value: object, where: str) -> None:
    table = tables.retention_table(Retention.shared(np.array([0, 2, 3]), 5))
    refuse(tables.RetentionTable, with_cell(table, 0, column, value), where)


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
