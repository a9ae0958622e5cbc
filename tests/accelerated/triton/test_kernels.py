"""Tests that kernels access only their arrays, read only written values, and do not change inputs."""

# ruff: noqa: E402 - the imports below need what is asked for first

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.accelerated.triton import require_runtime

require_runtime()

import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.triton_gpu import activation, coattention, device, nestedkv
from accelerated.triton_gpu.backend import BACKEND
from accelerated.triton_gpu.device import accepts_tensor, default_device, upload
from conformance import tolerances
from conformance.strategies.numbers import NESTED
from conformance.strategies.policy_inputs import drawn
from conformance.strategies.prompts import AttentionInputs, attention_inputs, later_segments
from conformance.tolerances import nestedkv_radius
from reference.backend import BACKEND as REFERENCE
from reference.policies import nestedkv as policy_of
from spec.errors import SpecError
from spec.policy import LayerView, Observation
from spec.records import CoAttention

pytestmark = pytest.mark.judges("triton")

# A NaN of our own: a kernel that writes NaN outside its array leaves a mark, too.
POISON = {
    torch.bfloat16: (torch.int16, 0x7FDE),
    torch.float16: (torch.int16, 0x7E2D),
    torch.float32: (torch.int32, 0x7FC0DEAD),
    torch.float64: (torch.int64, 0x7FF8DEADDEADDEAD),
}
BAND = 4096  # four steps of the widest kernel: what runs over an end still lands in the field


@pytest.fixture(autouse=True)
def same_tensors() -> None:
    """Seed torch, so that random values do not depend on earlier tests."""
    torch.manual_seed(0)


class Field:
    """Tensor between two bands of poison values."""

    def __init__(self, like: torch.Tensor) -> None:
        size = like.numel()
        bits, self.poison = POISON[like.dtype] if like.is_floating_point() else (like.dtype, -7)
        self.memory = torch.full((size + 2 * BAND,), self.poison, dtype=bits, device=like.device)
        self.tensor = self.memory[BAND : BAND + size].view(like.dtype).view(like.shape)

    def is_whole(self) -> bool:
        """Return True if the bands are unchanged, bit for bit."""
        bands = torch.cat([self.memory[:BAND], self.memory[BAND + self.tensor.numel() :]])
        return bool((bands == self.poison).all())


def guarded(values: torch.Tensor, fields: list[Field]) -> torch.Tensor:
    """Return a copy of the values that has memory on both sides. Later checks detect writes to this memory."""
    fields.append(Field(values))
    return fields[-1].tensor.copy_(values)


@contextmanager
def poisoned_allocations(module: ModuleType) -> Iterator[list[Field]]:
    """Context manager that puts each uploaded or allocated tensor of a module into the given fields."""
    fields: list[Field] = []
    make = {name: getattr(torch, name) for name in ("empty", "full", "zeros", "empty_like")}

    def poisoned(name: str) -> Any:
        def allocate(*arguments: Any, **options: Any) -> torch.Tensor:
            values = make[name](*arguments, **options)
            if name in ("full", "zeros"):
                return guarded(values, fields)
            fields.append(Field(values))
            return fields[-1].tensor

        return allocate

    class Torch:
        """Module torch with replaced allocation functions."""

        def __getattr__(self, name: str) -> Any:
            return poisoned(name) if name in make else getattr(torch, name)

    def guarded_upload(*arguments: Any, **options: Any) -> torch.Tensor:
        return guarded(upload(*arguments, **options), fields)

    with patch.object(module, "torch", Torch()), patch.object(module, "upload", guarded_upload, create=True):
        yield fields


STAGES = BACKEND.require_crystal()


def same(a: CoAttention, b: CoAttention) -> bool:
    """Return True if all arrays are equal, bit for bit."""
    pairs = [[np.asarray(value) for value in pair] for pair in zip(vars(a).values(), vars(b).values(), strict=True)]
    return all(x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def run(inputs: AttentionInputs, q: Any, k: Any, lse: Any = None) -> CoAttention:
    return STAGES.coattention(q, k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap, lse)


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=st.one_of(attention_inputs(), later_segments()), with_lse=st.booleans())
def test_attention_stays_inside_its_arrays(inputs: AttentionInputs, with_lse: bool) -> None:
    """Check S1 with each array between bands: the result equals the result without bands, bit for bit."""
    q, k = device.shaped_tensors(inputs.q, inputs.k)
    # Any numbers do: what is asked is where they are read.
    lse = torch.linspace(0, 9, q.shape[0] * q.shape[1], device=q.device).view(q.shape[:2]) if with_lse else None
    with poisoned_allocations(coattention) as fields:
        actual = run(
            inputs, guarded(q, fields), guarded(k, fields), None if lse is None else guarded(lse, fields)
        )
    assert len(fields) >= 6
    assert all(field.is_whole() for field in fields)
    assert same(actual, run(inputs, q, k, lse))


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=attention_inputs())
def test_a_run_repeats_to_the_bit_and_leaves_its_inputs(inputs: AttentionInputs) -> None:
    """Check that tensors are neither copied nor written."""
    q, k = device.shaped_tensors(inputs.q, inputs.k)
    before = q.clone(), k.clone()
    first = run(inputs, q, k)
    assert same(run(inputs, q, k), first)
    assert same(run(inputs, inputs.q, inputs.k), first)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


NORMS, RIGHT_NORMS = BACKEND.require_breath(), REFERENCE.require_breath()


@pytest.mark.spec("CC-KEY-NORM")
@given(n=st.integers(1, 40), d=st.integers(1, 20), H_kv=st.integers(1, 3), zero=st.booleans())
def test_norms_stay_inside_their_arrays(n: int, d: int, H_kv: int, zero: bool) -> None:
    """Check norms of keys from a (tokens, heads, channels) block. The inverse norm of a zero key is infinite."""
    k = torch.randn(n, H_kv, d, device=default_device())
    if zero:
        k[0, 0] = 0
    with poisoned_allocations(activation) as fields:
        actual = NORMS.inverse_key_norms(guarded(k, fields).transpose(0, 1))
    assert all(field.is_whole() for field in fields)
    want = RIGHT_NORMS.inverse_key_norms(k.cpu().numpy().transpose(1, 0, 2))
    finite = np.isfinite(want)
    assert np.isfinite(actual).tolist() == finite.tolist()
    radius = tolerances.key_norm_error(H_kv, d) * want[finite]
    assert (np.abs(actual[finite] - want[finite]) <= radius).all()


SCORES, RIGHT_SCORES = BACKEND.require_nestedkv(), REFERENCE.require_nestedkv()


@pytest.mark.spec("NK-SCORE")
def test_a_score_that_stays_on_the_device_is_nan_if_a_key_has_no_direction() -> None:
    """Check that a session and a call of the stage have the same scores. Heads of 257 channels are scored by torch."""
    score = BACKEND.tensors["nestedkv_score"]
    k = torch.randn(2, 37, 6, device=default_device()) + 1.0
    on_device = score(LayerView(k, k, None, 1.0, None), SCORES, NESTED)
    np.testing.assert_array_equal(on_device.cpu().numpy(), SCORES.anomaly_score(k, NESTED))
    for value in (0.0, torch.nan, torch.inf):
        bad = k.clone()
        bad[1, 5] = value
        with np.errstate(all="ignore"):
            lost = score(LayerView(bad, bad, None, 1.0, None), SCORES, NESTED).isnan()
        assert lost.all(dim=1).tolist() == lost.any(dim=1).tolist() == [False, True]
    wide = torch.randn(1, 9, 257, device=default_device())
    assert score(LayerView(wide, wide, None, 1.0, None), SCORES, NESTED).isfinite().all()


@pytest.mark.spec("NK-SCORE")
@given(n=st.integers(1, 70), d=st.integers(1, 20), H_kv=st.integers(1, 2), W=st.integers(1, 40))
def test_scores_stay_inside_their_arrays(n: int, d: int, H_kv: int, W: int) -> None:
    """Check scores with each buffer between bands, and keys from a (tokens, heads, channels) block."""
    k = torch.randn(n, H_kv, d, device=default_device()) + 1.0
    p = replace(NESTED, W=W)
    with poisoned_allocations(nestedkv) as fields:
        actual = SCORES.anomaly_score(guarded(k, fields).transpose(0, 1), p)
    assert len(fields) >= 8
    assert all(field.is_whole() for field in fields)
    plain = k.cpu().numpy().transpose(1, 0, 2)
    for head, got, want in zip(plain, actual, RIGHT_SCORES.anomaly_score(plain, p), strict=True):
        assert (np.abs(got - want) <= nestedkv_radius(head.tolist(), p, "float32")).all()


@pytest.mark.spec("NK-UNIT-KEYS")
def test_a_zero_key_of_a_tensor_is_refused() -> None:
    k = torch.ones(2, 5, 3, device=default_device())
    k[1, 4] = 0
    with pytest.raises(SpecError, match="KV head 1, token 4"):
        SCORES.anomaly_score(k, NESTED)


@pytest.mark.spec("NK-GAP")
def test_the_ends_of_a_row_are_found_through_ties() -> None:
    """Check rows with both signs, both zeros and many ties against the gap of the sorted row."""
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
    """Check that the scorer accepts all inputs of the kernels, and that the kept sets follow from the scores."""
    view = drawn(5, 30, L=1, heads=(2, 1)).layers[0]
    policy = policy_of(NESTED, BACKEND)
    k = torch.tensor(view.k, dtype=torch.float32, device=default_device())
    assert policy.scorer.needs.accepts_tensor is accepts_tensor
    scores = policy.scorer(Observation(30, 2, None, {0: replace(view, k=k)}), np.zeros(30, dtype=np.bool_))
    assert np.array_equal(scores.values, SCORES.anomaly_score(k, NESTED))
