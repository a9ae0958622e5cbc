"""MorphKV at the end of a prompt and in each step, against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.brute import W, plain
from conformance.assurance.oracles.morphkv import morphkv
from conformance.assurance.policy_steps import decoded, long
from conformance.own.reference.test_decoding import by_head, memoryless
from conformance.plugin import sparingly
from conformance.strategies.policy_inputs import drawn
from conformance.tolerances import scores_agree
from reference import policies
from reference.policies.morphkv import morphkv_score
from spec.errors import SpecError

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-MORPHKV")]

seeds = st.integers(0, 2**32 - 1)
fusions = pytest.mark.parametrize("fusion", ["sum", "max"])


@fusions
@sparingly
@given(seed=seeds, window=st.integers(1, 9))
def test_a_score_lies_within_its_bound(fusion: str, seed: int, window: int) -> None:
    for view in drawn(seed).layers:
        brute = morphkv(plain(view), window, fusion)
        assert all(map(scores_agree, morphkv_score(view, window, fusion), brute))


@fusions
def test_windows_of_many_queries(fusion: str) -> None:
    view = drawn(3, n=200, L=1, heads=(2, 2)).layers[0]
    for window in (33, 65, 129):
        assert all(map(scores_agree, morphkv_score(view, window, fusion), morphkv(plain(view), window, fusion)))


@fusions
@sparingly
@given(seed=seeds, B=st.integers(W, 12))
def test_each_step_asks_the_last_queries_anew(fusion: str, seed: int, B: int) -> None:
    expected = by_head(long(seed), B, memoryless(lambda x: morphkv(x, W, fusion)[0], W, 1))
    assert decoded(policies.morphkv(W, fusion), long(seed), B) == expected


def test_a_constant_out_of_range_is_refused() -> None:
    with pytest.raises(SpecError, match="W = 0"):
        policies.morphkv(0)
    with pytest.raises(SpecError, match="fusion = 'mean'"):
        policies.morphkv(fusion="mean")
