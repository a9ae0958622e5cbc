"""The gather moves bits: every element type, any strides, any kept set."""

# ruff: noqa: E402 - the imports below need what is asked for first

import numpy as np
import pytest

from conformance.own.accelerated.triton.runtime import require_runtime

require_runtime()

import torch

from accelerated.triton_gpu.compaction import compact
from accelerated.triton_gpu.device import default_device
from spec.errors import SpecError

pytestmark = pytest.mark.judges("triton")

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8]


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", [[], [0], [3, 4, 39], list(range(40))])
def test_kept_rows_keep_their_bits(dtype: torch.dtype, kept: list[int]) -> None:
    """Keys from a (tokens, heads, channels) block, values of another width."""
    K = (torch.randn(40, 3, 20) * 100).to(default_device(), dtype).transpose(0, 1)
    V = (torch.randn(3, 40, 5) * 100).to(default_device(), dtype)
    R = np.array(kept, dtype=np.int64)
    K_R, V_R = compact(K, V, R)
    assert torch.equal(K_R, K[:, kept])
    assert torch.equal(V_R, V[:, kept])
    assert K_R.dtype == K.dtype
    assert K_R.is_contiguous()


@pytest.mark.spec("CC-COMPACT")
def test_a_NaN_keeps_its_payload() -> None:
    bits = torch.tensor([[[0x7FC1, 0x7F81]]], dtype=torch.int16, device=default_device())
    K = bits.view(torch.bfloat16)
    assert compact(K, K, np.array([0]))[0].view(torch.int16).tolist() == bits.tolist()


@pytest.mark.spec("CC-COMPACT")
@pytest.mark.parametrize(
    ("kept", "message"), [([4], r"R = \(4, 4\): must lie in \[0, 4\)"), ([-1, 2], r"R = \(-1, 2\): must lie")]
)
def test_positions_outside_the_cache_are_refused(kept: list[int], message: str) -> None:
    K = torch.zeros(1, 4, 2, device=default_device())
    with pytest.raises(SpecError, match=message):
        compact(K, K, np.array(kept))


@pytest.mark.spec("CC-COMPACT")
def test_another_rank_is_refused() -> None:
    K = torch.zeros(4, 2, device=default_device())
    with pytest.raises(SpecError, match=r"must be a tensor \(H_kv, n, d\)"):
        compact(K, K, np.array([0]))


@pytest.mark.spec("CC-COMPACT")
def test_tensors_elsewhere_are_refused_by_name() -> None:
    here, there = default_device().type, "cpu" if default_device().type == "cuda" else "meta"
    K = torch.zeros(1, 4, 2, device=here)
    with pytest.raises(SpecError, match=f"V = '{there}': a tensor must be on {here} here"):
        compact(K, K.to(there), np.array([0]))


@pytest.mark.spec("CC-COMPACT")
def test_an_element_type_that_is_no_power_of_two_bytes_wide_up_to_eight_is_refused() -> None:
    K = torch.zeros(1, 4, 2, dtype=torch.complex128, device=default_device())
    with pytest.raises(SpecError, match=r"K = .*complex128.*must be a tensor \(H_kv, n, d\)"):
        compact(K, K, np.array([0]))
