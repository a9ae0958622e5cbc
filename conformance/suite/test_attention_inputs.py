"""S1 over what it may be given: the forward's log-sum-exp, views of any layout, real widths of heads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checks import stage_checks
from conformance.checks.refusals import refused
from conformance.oracles import s1
from conformance.strategies.attention import AttentionInputs, attention_inputs, later_segments
from conformance.strategies.close_numbers import TYPE_PAIRS, of_type
from spec.arrays import Matrix
from spec.backend import CrystalStages
from spec.parameters import TINY

Array = np.ndarray[Any, Any]


def lse_of(inputs: AttentionInputs) -> Matrix:
    """The right lse of these inputs, (H, n)."""
    at = inputs.positions.tolist()
    return np.array(s1.log_sum_exp(
        inputs.q.tolist(), inputs.k.tolist(), at[-inputs.q.shape[1] :], at, inputs.scaling, inputs.softcap
    ))


@pytest.mark.spec("CC-ATTENTION", "CC-COATTENTION")
@given(inputs=st.one_of(attention_inputs(), later_segments()), k_cross=st.sampled_from([None, 0]))
def test_with_the_right_lse_s1_lies_in_the_certified_box(
    stages: CrystalStages, precision: str, inputs: AttentionInputs, k_cross: int | None,
) -> None:
    """A given lse, in the backend's own precision, MUST change nothing beyond rounding."""
    p = inputs.parameters
    inputs = replace(inputs, parameters=p if k_cross is None else replace(p, k_cross=k_cross))
    lse = lse_of(inputs).astype(precision)
    assert not list(stage_checks.coattention(inputs.run(stages, lse), inputs, precision))


def plain(H: int, n: int) -> AttentionInputs:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((H, n, 8)), rng.standard_normal((1, n, 8))
    return AttentionInputs(q.astype(np.float32), k.astype(np.float32), np.arange(n), TINY, 0.5, None)


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize(
    "lse",
    [
        np.zeros((2, 5), np.float32), np.zeros((1, 2, 4), np.float32), [[0.0] * 4] * 2, np.zeros((2, 4), np.int64),
        np.full((2, 4), -np.inf, np.float32), np.full((2, 4), np.nan, np.float32),
        np.zeros((1, 4), np.float32), np.zeros((2, 1), np.float32),
    ],
)
def test_a_bad_lse_is_refused_by_name(stages: CrystalStages, lse: object) -> None:
    """Of another shape, no array, not floating, not finite."""
    with refused("lse", lse):
        plain(2, 4).run(stages, lse)


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=attention_inputs(), pad=st.integers(1, 5))
def test_a_left_padded_row_is_the_view_behind_its_padding(
    stages: CrystalStages, precision: str, inputs: AttentionInputs, pad: int,
) -> None:
    """S1 reads q[:, pad:] and k[:, pad:] and nothing before: padding of NaN MUST NOT show."""
    q: Array = np.pad(inputs.q, ((0, 0), (pad, 0), (0, 0)), constant_values=np.nan)[:, pad:]
    k: Array = np.pad(inputs.k, ((0, 0), (pad, 0), (0, 0)), constant_values=np.nan)[:, pad:]
    lse = np.pad(lse_of(inputs).astype(precision), ((0, 0), (pad, 0)), constant_values=np.nan)[:, pad:]
    views = replace(inputs, q=q, k=k)
    for given_lse in (None, lse):
        assert not list(stage_checks.coattention(views.run(stages, given_lse), inputs, precision))


def orders(x: Array) -> list[Array]:
    """The same (heads, tokens, d): of (tokens, heads, d), of every other row, channel, and of both in reverse."""
    return [
        np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2),
        np.repeat(x, 2, axis=1)[:, ::2], np.repeat(x, 2, axis=2)[:, :, ::2],
        np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1],
    ]


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=later_segments(), order=st.integers(0, 3))
def test_any_order_in_memory_is_read(
    stages: CrystalStages, precision: str, inputs: AttentionInputs, order: int,
) -> None:
    """Views of other layouts lie in the same certified box."""
    views = replace(inputs, q=orders(inputs.q)[order], k=orders(inputs.k)[order])
    assert not views.k.flags.c_contiguous or min(inputs.k.shape) == 1
    assert not list(stage_checks.coattention(views.run(stages), inputs, precision))


@pytest.mark.spec("CC-ATTENTION")
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("group", "softcap"), [(1, None), (7, 20.0), (8, None)])
def test_every_width_and_type(
    stages: CrystalStages, precision: str, d: int, dtype: type, group: int, softcap: float | None,
) -> None:
    """Real widths of heads, in the types that models have; bfloat16 has no NumPy type."""
    rng = np.random.default_rng(d + group)
    q: Array = rng.standard_normal((group, 24, d)).astype(dtype)
    k: Array = rng.standard_normal((1, 24, d)).astype(dtype)
    inputs = AttentionInputs(q, k, np.arange(24), replace(TINY, C=10), 1.5 * d**-0.5, softcap)
    assert not list(stage_checks.coattention(inputs.run(stages), inputs, precision))


@pytest.mark.spec("CC-ATTENTION", "CC-COATTENTION")
@pytest.mark.parametrize(("of_q", "of_k"), TYPE_PAIRS)
def test_every_type_and_size_of_numbers(stages: CrystalStages, precision: str, of_q: str, of_k: str) -> None:
    """All that are finite, also those of whose sum the type is not; q and k may be of two types."""
    (q, large), (k, small) = of_type(of_q, 1, (2, 12, 4)), of_type(of_k, 2, (1, 12, 4))
    inputs = AttentionInputs(q, k, np.arange(12), replace(TINY, C=5), 0.5 / (large * small), None)
    wide = replace(inputs, q=q.astype(np.float64), k=k.astype(np.float64))
    assert not list(stage_checks.coattention(inputs.run(stages), wide, precision))


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [3, 65, 257, 1_025])
@pytest.mark.parametrize("name", ["q", "k", "lse"])
def test_what_is_not_finite_is_refused_anywhere(stages: CrystalStages, name: str, n: int, value: float) -> None:
    """The first, a middle and the last number, of few queries and many keys; whatever becomes of the result."""
    p = replace(TINY, k_heads=0, k_intra=0, k_cross=0)
    m = n if name == "lse" and n < 257 else 3
    for place in (0, 1, -1):
        given: dict[str, Array] = {
            "q": np.ones((2, m, 2), np.float32), "k": np.ones((1, n, 2), np.float32),
            "lse": np.ones((2, m), np.float32),
        }
        given[name].flat[given[name].size // 2 if place == 1 else place] = value
        with refused(name, given[name]):
            stages.coattention(given["q"], given["k"], np.arange(n), p, 1.0, None, given["lse"])
