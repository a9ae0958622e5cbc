"""Parameters, retentions and policies that cannot be are refused by name."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks.refusals import refused
from reference.policies import crystalcache, streaming_llm
from spec.errors import SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.retention import Granularity, Retention
from spec.validate import check_token_ids

pytestmark = pytest.mark.usefixtures("reference_items")


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


@pytest.mark.spec("CC-PREFILL")
def test_paper_parameters_are_table_14() -> None:
    assert CrystalCacheParameters() == PAPER
    assert (PAPER.C, PAPER.k_heads, PAPER.k_intra, PAPER.tau_intra, PAPER.k_cross, PAPER.tau_cross) == (
        1024, 3, 8, 0.3, 4, 0.02
    )
    assert (PAPER.M_min, PAPER.M_max, PAPER.tau_merge, PAPER.T_max, PAPER.tau_edge, PAPER.s) == (
        0.1, 20.0, 0.3, 32, 0.05, 5.0
    )
    assert (PAPER.alpha, PAPER.N_sink, PAPER.W_recent, PAPER.N_min, PAPER.epsilon) == (1.0, 4, 128, 3, 1e-8)


@pytest.mark.spec("CC-PREFILL")
def test_an_id_outside_the_vocabulary_is_refused() -> None:
    assert check_token_ids(np.array([0, 9]), 2, vocabulary=10).dtype == np.int64
    with refused("token_ids", 10):
        check_token_ids(np.array([0, 10]), 2, vocabulary=10)


@pytest.mark.spec("CC-PREFILL")
def test_policies_are_refused_when_they_are_made() -> None:
    with refused("sentence_ends", frozenset()):
        crystalcache(frozenset())
    with refused("backend", "nampy"):
        crystalcache(frozenset({1}), backend="nampy")
    with refused("N_sink", -1):
        streaming_llm(-1)


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize("kept", [[1, 0], [0, 0], [-1, 2], [3, 5]])
def test_a_retention_holds_ascending_positions_inside_the_prompt(kept: list[int]) -> None:
    with refused("positions", kept):
        Retention.shared(np.array(kept, dtype=np.int64), 5)


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize("offsets", [[0], [1, 2], [0, 1], [0, 2, 1, 2]])
def test_a_retention_has_offsets_that_cover_its_positions(offsets: list[int]) -> None:
    with refused("offsets", offsets):
        Retention(np.array([0, 3]), np.array(offsets), 5, Granularity.LAYER)


@pytest.mark.spec("CC-COMPACT")
def test_one_group_for_a_model_and_any_number_for_layers() -> None:
    groups = Retention(np.array([0, 3, 1]), np.array([0, 2, 3]), 5, Granularity.LAYER)
    assert [groups.group(g).tolist() for g in range(groups.groups)] == [[0, 3], [1]]
    with refused("offsets", groups.offsets):
        Retention(groups.positions, groups.offsets, 5)


@pytest.mark.spec("CC-PREFILL")
@given(value=st.one_of(st.integers(), st.text(), st.none()))
def test_errors_survive_a_process_boundary(value: object) -> None:
    """Workers pickle them."""
    error = SpecError("q", value, "must be finite")
    again = pickle.loads(pickle.dumps(error))
    assert (again.argument, again.value, again.bound, str(again)) == ("q", value, "must be finite", str(error))
