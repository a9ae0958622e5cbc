"""Tests of S1 on all inputs that the kernels accept: head sizes, dtypes, strides, tiles, stripes. Also errors."""

# ruff: noqa: E402 - the imports below need what is asked for first

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.accelerated.triton import require_runtime

require_runtime()

import torch

from accelerated.torch_device.records import to_host
from accelerated.triton_gpu import coattention as stage
from accelerated.triton_gpu import device, kernels, launch
from accelerated.triton_gpu.coattention import coattention, neighbours
from accelerated.triton_gpu.device import INTERPRETED, default_device, shaped_tensors
from accelerated.triton_gpu.launch import AttentionTiles, Shape
from conformance.checks import stage_checks
from conformance.oracles import s1
from conformance.strategies.prompts import GROUPS, AttentionInputs, attention_inputs, later_segments, random_prompt
from lab.measure.gpu.counts import Work
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import PAPER, TINY
from spec.records import CoAttention

pytestmark = pytest.mark.judges("triton")

interpreted = pytest.mark.skipif(not INTERPRETED, reason="says what the interpreter refuses")
compiled = pytest.mark.skipif(INTERPRETED, reason="needs CUDA")


def run(inputs: AttentionInputs, q: Any = None, k: Any = None, lse: Any = None) -> CoAttention:
    return coattention(
        inputs.q if q is None else q, inputs.k if k is None else k, inputs.positions, inputs.parameters,
        inputs.scaling, inputs.softcap, lse, inputs.sinks,
    )


def wide(d: int, group: int, n: int = 40, dtype: Any = np.float32) -> AttentionInputs:
    """Return inputs with two KV heads of d channels."""
    rng = np.random.default_rng(d + group)
    q, k = rng.standard_normal((2 * group, n, d)).astype(dtype), rng.standard_normal((2, n, d)).astype(dtype)
    return AttentionInputs(q, k, np.arange(n), replace(TINY, C=16), d**-0.5, None)


def same_edges(a: CoAttention, b: CoAttention) -> bool:
    """Return True if salience, neighbours and weights are equal, bit for bit."""
    names = ("salience", "intra", "intra_weight", "cross", "cross_weight")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.spec("CC-ATTENTION")
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_every_width_of_heads(d: int, dtype: Any) -> None:
    inputs = wide(d, 2, dtype=dtype)
    assert not list(stage_checks.coattention(run(inputs), inputs, "float32"))


@pytest.mark.spec("CC-ATTENTION")
@pytest.mark.parametrize("group", GROUPS)
def test_every_head_group(group: int) -> None:
    inputs = wide(16, group)
    assert not list(stage_checks.coattention(run(inputs), inputs, "float32"))


@compiled
@pytest.mark.spec("CC-ATTENTION")
def test_bfloat16_on_the_device() -> None:
    """Check bfloat16 on a device, because the interpreter computes it wrongly."""
    inputs = wide(128, 4)
    q, k = (torch.from_numpy(x).to(default_device(), torch.bfloat16) for x in (inputs.q, inputs.k))
    given_values = replace(inputs, q=q.float().cpu().numpy(), k=k.float().cpu().numpy())
    assert not list(stage_checks.coattention(run(inputs, q, k), given_values, "float32"))


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=attention_inputs())
def test_strides_are_read_as_they_are(inputs: AttentionInputs) -> None:
    """Check that views with any strides are not copied, and have the same result, bit for bit."""
    q, k = shaped_tensors(inputs.q, inputs.k)
    plain = run(inputs, q, k)
    views = [
        (q.transpose(0, 1).contiguous().transpose(0, 1), k.transpose(0, 1).contiguous().transpose(0, 1)),
        (q.repeat_interleave(2, dim=1)[:, ::2], k.repeat_interleave(2, dim=2)[:, :, ::2]),
    ]
    for view_q, view_k in views:
        taken = shaped_tensors(view_q, view_k)
        assert (taken[0].data_ptr(), taken[1].data_ptr()) == (view_q.data_ptr(), view_k.data_ptr())
        assert same_edges(run(inputs, view_q, view_k), plain)


def right_lse(inputs: AttentionInputs) -> torch.Tensor:
    """Return the log-sum-exp of a correct attention kernel, (H, n) in float32."""
    at = inputs.positions.tolist()
    rows = s1.log_sum_exp(
        inputs.q.tolist(), inputs.k.tolist(), at[-inputs.q.shape[1] :], at, inputs.scaling, inputs.softcap
    )
    return torch.tensor(rows, device=default_device())


@pytest.mark.spec("CC-ATTENTION")
def test_a_given_lse_is_read_where_it_is() -> None:
    """Check that a view after NaN padding has the same result, and that a wrong lse changes the weights."""
    inputs = wide(16, 2, n=24)
    lse = right_lse(inputs)
    padded = torch.nn.functional.pad(lse, (3, 0), value=float("nan"))[:, 3:]
    actual = run(inputs, lse=lse)
    assert not list(stage_checks.coattention(actual, inputs, "float32"))
    assert same_edges(run(inputs, lse=padded), actual)
    assert list(stage_checks.coattention(run(inputs, lse=lse + math.log(2)), inputs, "float32"))


@pytest.mark.spec("CC-COATTENTION")
def test_a_bad_lse_tensor_is_refused_by_name() -> None:
    inputs = wide(16, 1, n=4)
    good = torch.zeros(2, 4, device=default_device())
    elsewhere = "cpu" if default_device().type == "cuda" else "meta"
    for lse, message in (
        (good[:, 1:], r"lse = .*: must be an array \(heads, queries\), \(2, 4\)"),
        (good.double(), "lse = .*float64.*: must be torch.float32 on"),
        (good.to(elsewhere), f"lse = .*{elsewhere}.*: must be torch.float32 on"),
        (good - float("inf"), r"lse = -inf: must be finite in .*; this value is at \(0, 0\)"),
    ):
        with pytest.raises(SpecError, match=message):
            run(inputs, lse=lse)


def shapes() -> st.SearchStrategy[Shape]:
    return st.builds(Shape, st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]))


@st.composite
def tile_sizes(draw: st.DrawFn) -> AttentionTiles:
    softmax, cross = draw(shapes(), label="softmax"), draw(shapes(), label="cross")
    return AttentionTiles(
        softmax, replace(cross, columns=softmax.columns), draw(shapes(), label="own"),
        draw(shapes(), label="intra"),
        depth=draw(st.sampled_from([16, 32]), label="depth"), normalise=draw(shapes(), label="normalise"),
        tokens=draw(st.sampled_from([16, 64]), label="tokens"),
    )


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=st.one_of(attention_inputs(), later_segments()), tiles=tile_sizes())
def test_every_tile_size_lies_in_the_certified_box(inputs: AttentionInputs, tiles: AttentionTiles) -> None:
    """Check tile sizes that do not divide each other or the chunk."""
    given = (inputs.q, inputs.k, inputs.parameters, inputs.scaling, inputs.softcap, None, inputs.sinks)
    actual = to_host(*neighbours(*given, tiles), inputs.positions)
    assert actual is not None
    assert not list(stage_checks.coattention(actual, inputs, "float32"))


def longer(n: int = 90) -> AttentionInputs:
    """Return inputs with several tiles and chunks, and with peaked attention."""
    inputs = random_prompt(np.random.default_rng(3), replace(TINY, C=24), n).inputs
    return replace(inputs, q=inputs.q * 2)


@pytest.mark.spec("CC-CROSS")
def test_the_bound_skips_no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the bound skips tiles, and that the result equals the result without skipped tiles, bit for bit."""
    inputs = replace(longer(), parameters=replace(TINY, C=24, tau_cross=0.1))
    plain = run(inputs)
    monkeypatch.setattr(launch, "SLACK", -1.0)
    assert same_edges(run(inputs), plain)
    assert (plain.cross >= 0).any()
    monkeypatch.setattr(launch, "SLACK", 1e3)
    assert (run(inputs).cross == -1).all()


@pytest.mark.spec("CC-CROSS")
def test_the_bound_is_sharp() -> None:
    """Check that the bound of a tile with one head is the largest weight of the tile.

    A threshold just below the bound MUST keep the edge.
    """
    inputs = wide(16, 1)
    one = replace(inputs, q=inputs.q[:1], k=inputs.k[:1])
    weights = run(one).cross_weight[:, 0]
    rows = np.flatnonzero(weights)[::6]
    assert len(rows) > 2
    for row in rows:
        below = float(np.nextafter(np.float32(weights[row]), np.float32(0)))
        actual = run(replace(one, parameters=replace(one.parameters, tau_cross=below)))
        assert actual.cross_weight[row].tolist() == [weights[row], 0.0]


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize("scratch", [1, 40_000])
def test_stripes_of_whole_chunks(monkeypatch: pytest.MonkeyPatch, scratch: int) -> None:
    """Check that S1 stays within its box for any size of the scratch memory."""
    inputs = longer()
    monkeypatch.setattr(launch, "SCRATCH", scratch)
    assert not list(stage_checks.coattention(run(inputs), inputs, "float32"))


@pytest.mark.spec("CC-COATTENTION")
def test_a_call_of_a_known_shape_uses_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a layer of the shape of Llama-3.1-8B at 4 096 tokens, with kernels that only record their names."""
    launched: list[str] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **constants: launched.append(self.name)

    for name in kernels.__all__:
        monkeypatch.setattr(kernels, name, Recorded(name))
    q, k = (torch.zeros(heads, 4_096, 128, dtype=torch.float16, device=default_device()) for heads in (32, 8))
    neighbours(q, k, PAPER, 0.1, None, None, None)
    plans = stage._plan.cache_info().misses
    launched.clear()
    with Work() as work:
        neighbours(q, k, PAPER, 0.1, None, None, None)
    assert stage._plan.cache_info().misses == plans
    assert launched == [
        "row_softmax", "active_tiles", "cross_neighbours", "chunk_attention", "salience", "row_normalise",
        "intra_neighbours",
    ]
    # The largest values of q and k (3), whether both are finite (2), and conversions to float64 (3). Nothing is filled.
    assert work.operators == 8
    neighbours(q, k, replace(PAPER, tau_cross=0.5), 0.1, None, None, None)
    neighbours(q, k[:, :, :].mT.contiguous().mT, PAPER, 0.1, None, None, None)
    assert stage._plan.cache_info().misses == plans + 2


@interpreted
@pytest.mark.spec("CC-ATTENTION")
def test_the_interpreter_refuses_bfloat16() -> None:
    q = torch.zeros(1, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match=r"q = torch.bfloat16: .* Triton's interpreter computes bfloat16"):
        coattention(q, q, np.arange(4), TINY, 1.0, None)


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((1, 4, 257), (1, 4, 257), r"q = \(1, 4, 257\): must have at most 256 channels"),
        ((3, 4, 8), (2, 4, 8), r"q = \(3, 4, 8\): the number of heads must be a multiple of 2"),
        ((1, 5, 8), (1, 4, 8), r"q = \(1, 5, 8\): has 5 queries, but k has only 4 keys"),
        ((1, 4, 8), (1, 4, 4), r"k = \(1, 4, 4\): must have the head dimension of q, 8"),
        ((1, 0, 8), (1, 4, 8), r"q = \(1, 0, 8\): no axis may be empty"),
        ((4, 8), (1, 4, 8), r"q = (torch.Size\(\[4, 8\]\)|\(4, 8\)): must be an array \(heads, tokens, d\)"),
    ],
)
def test_shapes_are_refused_by_name(q: tuple[int, ...], k: tuple[int, ...], message: str) -> None:
    for make in (np.zeros, lambda shape: torch.zeros(shape, device=default_device())):
        with pytest.raises(SpecError, match=message):
            coattention(make(q), make(k), np.arange(4), TINY, 1.0, None)


@pytest.mark.spec("CC-COATTENTION")
def test_types_and_values_are_refused_by_name() -> None:
    x = torch.zeros(1, 4, 8, device=default_device())
    at = np.arange(4)
    for q, k, message in (
        (x.double(), x.double(), "q = torch.float64: must be float32, float16 or bfloat16 with"),
        (x, x.half(), "k = .* must have the dtype and the device of q, torch.float32"),
        (x, np.zeros((1, 4, 8)), "k = 'ndarray': must have the type of q, Tensor"),
        (np.zeros((1, 4, 8), np.int64), np.zeros((1, 4, 8), np.int64), "q = .*: must be floating point"),
        (x, x + float("nan"), r"k = nan: must be finite in .*; this value is at \(0, 0, 0\)"),
    ):
        with pytest.raises(SpecError, match=message):
            coattention(q, k, at, TINY, 1.0, None)
    with pytest.raises(SpecError, match="k_intra = 65: must be at most 64 with"):
        coattention(x, x, at, replace(TINY, k_intra=65), 1.0, None)
    elsewhere = "cpu" if default_device().type == "cuda" else "meta"
    with pytest.raises(SpecError, match=f"q = '{elsewhere}': must be on the device {default_device().type}"):
        coattention(x.to(elsewhere), x.to(elsewhere), at, TINY, 1.0, None)


@pytest.mark.spec("CC-PREFILL")
def test_a_device_with_too_little_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the error names the device, the needed device and the option, before any kernel is launched."""
    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    monkeypatch.setattr(device, "shared_memory", lambda: 101_376)
    with pytest.raises(BackendUnavailable, match=f"needs {launch.SHARED} bytes .* NVIDIA L4 has 101376.*'numba'"):
        device.require_device()
    monkeypatch.setattr(device, "shared_memory", lambda: launch.SHARED)
    device.require_device()


@compiled
@pytest.mark.spec("CC-PREFILL")
def test_this_device_says_how_much_shared_memory_it_has() -> None:
    assert device.shared_memory() >= launch.SHARED


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_tensor_elsewhere_is_refused_by_name(name: str) -> None:
    """Check that neither q nor k is copied."""
    x = {"q": torch.zeros(1, 4, 8, device=default_device()), "k": torch.zeros(1, 4, 8, device=default_device())}
    elsewhere = "cpu" if default_device().type == "cuda" else "meta"
    with pytest.raises(SpecError, match=f"{name} = '{elsewhere}': must be on the device {default_device().type}"):
        coattention(**{**x, name: x[name].to(elsewhere)}, positions=np.arange(4), parameters=TINY, scaling=1.0,
                    softcap=None)
