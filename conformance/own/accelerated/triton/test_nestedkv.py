"""NestedKV's kernels: nothing outside their arrays is read or written, tensors are read where they lie."""

# ruff: noqa: E402 - the imports below need what is asked for first

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.own.accelerated.triton.runtime import require_runtime

require_runtime()

import torch

from accelerated.triton_gpu import nestedkv
from accelerated.triton_gpu.backend import BACKEND
from accelerated.triton_gpu.device import default_device, takes
from conformance.own.accelerated.triton.guards import guarded, poisoned_allocations
from conformance.strategies.numbers import NESTED
from conformance.strategies.policy_inputs import drawn
from conformance.tolerances import nestedkv_radius
from reference.backend import BACKEND as REFERENCE
from reference.policies import nestedkv as policy_of
from spec.errors import SpecError
from spec.policy import Observation

pytestmark = pytest.mark.judges("triton")


STAGES, RIGHT = BACKEND.require_nestedkv(), REFERENCE.require_nestedkv()


@pytest.mark.spec("NK-SCORE")
@given(n=st.integers(1, 70), d=st.integers(1, 20), H_kv=st.integers(1, 2), W=st.integers(1, 40))
def test_scores_stay_inside_their_arrays(n: int, d: int, H_kv: int, W: int) -> None:
    """Every buffer between bands, keys from a (tokens, heads, channels) block; no score has seen a band."""
    k = torch.randn(n, H_kv, d, device=default_device()) + 1.0
    p = replace(NESTED, W=W)
    with poisoned_allocations([nestedkv]) as fields:
        found = STAGES.anomaly_score(guarded(k, fields).transpose(0, 1), p)
    assert len(fields) >= 8
    assert all(field.is_whole() for field in fields)
    plain = k.cpu().numpy().transpose(1, 0, 2)
    for head, got, want in zip(plain, found, RIGHT.anomaly_score(plain, p), strict=True):
        assert (np.abs(got - want) <= nestedkv_radius(head.tolist(), p, "float32")).all()


@pytest.mark.spec("NK-UNIT-KEYS")
def test_a_zero_key_of_a_tensor_is_refused() -> None:
    k = torch.ones(2, 5, 3, device=default_device())
    k[1, 4] = 0
    with pytest.raises(SpecError, match="KV head 1, token 4"):
        STAGES.anomaly_score(k, NESTED)


@pytest.mark.spec("NK-GAP")
def test_the_ends_of_a_row_are_found_through_ties() -> None:
    """Values of both signs, zeros of both, and many equals: the gap by a sort."""
    rows = np.array([[-1.0, 0.5, 0.5, -0.0, 0.0, 0.5, -1.0], [1.0, -1.0, 0.25, 0.25, 0.25, -0.5, 2.0**-140]])
    for m in range(1, 8):
        ranges = torch.empty(2, 3, dtype=torch.float64, device=default_device())
        values = torch.tensor(rows, dtype=torch.float32, device=default_device())
        nestedkv.extremes[(2,)](values, ranges, 7, m, SCAN=64)
        ordered = np.sort(rows.astype(np.float32).astype(np.float64), axis=1)
        gap = (ordered[:, -m:].sum(axis=1) - ordered[:, :m].sum(axis=1)) / m
        spread = ordered[:, -1] - ordered[:, 0]
        want = np.stack([ordered[:, 0], ordered[:, -1], gap / spread], axis=1)
        assert (np.abs(ranges.cpu().numpy() - want) <= 2.0**-50).all()


@pytest.mark.spec("NK-NESTEDKV")
def test_the_policy_is_shown_tensors_where_they_are() -> None:
    """Its scorer takes what the kernels take, and its kept sets are those of its own scores."""
    view = drawn(5, 30, L=1, heads=(2, 1)).layers[0]
    policy = policy_of(NESTED, BACKEND)
    k = torch.tensor(view.k, dtype=torch.float32, device=default_device())
    assert policy.scorer.needs.takes is takes
    scores = policy.scorer(Observation(30, 2, None, {0: replace(view, k=k)}), np.zeros(30, dtype=np.bool_))
    assert np.array_equal(scores.values, STAGES.anomaly_score(k, NESTED))
