"""Key norms on the device: any strides, tensors where they lie, nothing outside the arrays."""

# ruff: noqa: E402 - the imports below need what is asked for first

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.own.accelerated.triton.runtime import require_runtime

require_runtime()

import torch

from accelerated.triton_gpu import activation
from accelerated.triton_gpu.backend import BACKEND
from accelerated.triton_gpu.device import default_device
from conformance import tolerances
from conformance.own.accelerated.triton.guards import guarded, poisoned_allocations
from reference.backend import BACKEND as REFERENCE

pytestmark = pytest.mark.judges("triton")


STAGES, RIGHT = BACKEND.require_breath(), REFERENCE.require_breath()


@pytest.mark.spec("CC-KEY-NORM")
@given(n=st.integers(1, 40), d=st.integers(1, 20), H_kv=st.integers(1, 3), zero=st.booleans())
def test_norms_stay_inside_their_arrays(n: int, d: int, H_kv: int, zero: bool) -> None:
    """float32 tensors from a (tokens, heads, channels) block; a zero key is infinite."""
    k = torch.randn(n, H_kv, d, device=default_device())
    if zero:
        k[0, 0] = 0
    with poisoned_allocations([activation]) as fields:
        found = STAGES.inverse_key_norms(guarded(k, fields).transpose(0, 1))
    assert all(field.is_whole() for field in fields)
    want = RIGHT.inverse_key_norms(k.cpu().numpy().transpose(1, 0, 2))
    finite = np.isfinite(want)
    assert np.isfinite(found).tolist() == finite.tolist()
    radius = tolerances.key_norm_error(H_kv, d) * want[finite]
    assert (np.abs(found[finite] - want[finite]) <= radius).all()
