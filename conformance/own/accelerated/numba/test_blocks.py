"""S1 in small blocks of queries and tiles of keys: at their real sizes one holds any prompt of the common suite."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the Numba backend needs it")

from accelerated.numba_cpu import coattention as s1_blocks
from conformance.checks import stage_checks
from conformance.oracles import s1
from conformance.strategies.prompts import AttentionInputs, attention_inputs, hot_sets, later_segments
from spec.records import CoAttention

pytestmark = pytest.mark.judges("numba")

SIZES = [(1, 1, 2), (2, 3, 1), (5, 2, 3)]  # queries of a block, keys of a tile, side of a block of cosines


def run(inputs: AttentionInputs, queries: int, keys: int, side: int) -> CoAttention:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s1_blocks, "BLOCK", (queries, queries))
        patch.setattr(s1_blocks, "KEYS", keys)
        patch.setattr(s1_blocks, "SQUARE", side)
        return s1_blocks.coattention(
            inputs.q, inputs.k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap
        )


@pytest.mark.spec("CC-ATTENTION", "CC-SALIENCE", "CC-ROW-NORM", "CC-INTRA", "CC-CROSS", "CC-COATTENTION")
@given(inputs=st.one_of(attention_inputs(), later_segments()), sizes=st.sampled_from(SIZES))
def test_blocks_lie_in_the_certified_box(inputs: AttentionInputs, sizes: tuple[int, int, int]) -> None:
    """Where a block or a tile ends says nothing about the result."""
    assert not list(stage_checks.coattention(run(inputs, *sizes), inputs, "float32"))


@pytest.mark.spec("CC-SALIENCE", "CC-CROSS")
@given(inputs=hot_sets(), sizes=st.sampled_from(SIZES))
def test_blocks_of_hot_sets_are_exact(inputs: AttentionInputs, sizes: tuple[int, int, int]) -> None:
    """Ties between sources of different tiles go to the lower index, too."""
    found = run(inputs, *sizes)
    want = s1.coattention(
        inputs.q.tolist(), inputs.k.tolist(), inputs.positions.tolist(), inputs.parameters, inputs.scaling,
        inputs.softcap,
    )
    assert found.salience.tolist() == want.salience
    assert [[j for j in row if j >= 0] for row in found.cross.tolist()] == [[j for j, _ in row] for row in want.cross]
