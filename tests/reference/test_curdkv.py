"""CurDKV: scores within their bound, windows at the end of the prompt, and windows of zeros."""

import numpy as np
import pytest
from hypothesis import given

from conformance.methods.brute import BLOCK, SINK, plain
from conformance.methods.curdkv import curdkv as brute_curdkv
from conformance.plugin import fewer_examples
from conformance.strategies.numbers import seeds
from conformance.strategies.policy_inputs import drawn
from conformance.tolerances import scores_agree
from reference.policies.curdkv import curdkv_score, leverage_shares

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-CURDKV")]


@fewer_examples
@given(seed=seeds)
def test_scores_lie_within_their_bound(seed: int) -> None:
    for view in drawn(seed).layers:
        rows = curdkv_score(view, BLOCK)
        for row, brute in zip(rows, brute_curdkv(plain(view), SINK, BLOCK), strict=True):
            assert scores_agree(row[SINK:], brute[SINK:])


def test_a_shorter_last_window_is_a_window_of_its_own() -> None:
    x = np.array([1.0, 2.0, 1.0, 1.0, 3.0])[None, :, None]
    assert leverage_shares(x, 2)[0].tolist() == [0.2, 0.8, 0.5, 0.5, 1.0]


def test_shares_of_a_window_of_zeros_are_zero() -> None:
    x = np.array([[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    assert leverage_shares(x, 2).tolist() == [[0.0, 0.0, 0.5, 0.5]]
