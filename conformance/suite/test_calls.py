"""Tests of the section "Calls" of spec/implementing.md: what a result depends on, and errors for bad input.

S1 is also tested with the log-sum-exp of the forward pass, views of any layout, and head dimensions of real models.
"""

import math
import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.calls import arrays_of, in_turns, side_by_side
from conformance.checks import stage_checks
from conformance.checks.refusals import refused, unchecked
from conformance.oracles import s1
from conformance.plugin import skip_without
from conformance.strategies.numbers import TYPE_PAIRS, of_type
from conformance.strategies.one_change import CALLS, LARGE, Calls
from conformance.strategies.prompts import AttentionInputs, attention_inputs, later_segments
from reference.crystalcache import prefill
from spec.arrays import Matrix
from spec.backend import Backend, CrystalStages
from spec.parameters import TINY

Stage = Callable[..., Any]
STRIDES, SECONDS = (1, 3), 0.03

STAGES = [pytest.param(op, marks=pytest.mark.spec(calls.item), id=op) for op, calls in CALLS.items()]
CHANGES = [
    pytest.param(op, name, marks=pytest.mark.spec(calls.item), id=f"{op}-{name}")
    for op, calls in CALLS.items() for name in calls.changes
]
FAR_CHANGES = [
    pytest.param(op, calls, name, marks=pytest.mark.spec(calls.item), id=f"{op}-{name}-{at}")
    for at, (op, calls) in enumerate(LARGE) for name in calls.changes
]


def stage_of(backend: Backend, op: str) -> Stage:
    family, _, name = op.partition(".")
    skip_without(backend, family)
    stage: Stage = getattr(getattr(backend, family), name)
    return stage


def parts(value: Any) -> list[Any]:
    """Return all numbers of a result, and arrays as shape, dtype and bytes."""
    if isinstance(value, np.ndarray):
        return [value.shape, value.dtype, value.tobytes()]
    members = value if isinstance(value, tuple) else vars(value).values() if is_dataclass(value) else None
    return [value] if members is None else [part for one in members for part in parts(one)]


@pytest.mark.parametrize(("op", "change"), CHANGES)
def test_what_changes_is_read(backend_under_test: Backend, op: str, change: str) -> None:
    """Check that a call with one change has a different result, and that the repeated first call does not."""
    check_that_it_is_read(stage_of(backend_under_test, op), CALLS[op], change)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("op", "calls", "change"), FAR_CHANGES)
def test_large_arrays_are_read_whole(backend_under_test: Backend, op: str, calls: Calls, change: str) -> None:
    """Check one change of a number or a row of large arrays, of which the first and last 60 KB do not change."""
    check_that_it_is_read(stage_of(backend_under_test, op), calls, change)


def check_that_it_is_read(stage: Stage, calls: Calls, change: str) -> None:
    same = tuple(calls.arguments.values())
    before, other, after = stage(*same), stage(*calls.changed(change)), stage(*same)
    assert parts(before) == parts(after), "the result depends on an earlier call"
    assert parts(before) != parts(other), "the changed argument was not read"


@pytest.mark.parametrize(("op", "change"), CHANGES)
def test_arrays_filled_anew_are_read_anew(backend_under_test: Backend, subject: Backend, op: str, change: str) -> None:
    """Check that arrays of an earlier call that the caller filled with new content have the result of the content."""
    stage, calls = stage_of(subject, op), CALLS[op]
    given, wanted = deepcopy(tuple(calls.arguments.values())), calls.changed(change)
    stage(*given)
    for argument, new in zip(given, wanted, strict=True):
        for array, other in zip(arrays_of(argument), arrays_of(new) if list(arrays_of(argument)) else (), strict=True):
            array[...] = other
    rest = [new if not list(arrays_of(argument)) else argument for argument, new in zip(given, wanted, strict=True)]
    actual = parts(stage(*rest))
    assert actual == parts(stage(*deepcopy(wanted)))


@pytest.mark.parametrize("op", STAGES)
def test_threads_have_results_of_their_own(
    backend_under_test: Backend, subject: Backend, together: bool, op: str,
) -> None:
    """Check two threads that call a stage with inputs of the same sizes and different content.

    The threads take turns at every line, at every third line, and as the interpreter switches them.
    """
    stage, calls = stage_of(subject, op), (tuple(CALLS[op].arguments.values()), CALLS[op].all_changed)
    wanted = [parts(stage(*call)) for call in calls]
    if not together:
        return
    actual = [pair for stride in STRIDES for pair in enumerate(in_turns(stage, calls, stride))]
    for at, result in [*actual, *side_by_side(stage, calls, SECONDS)]:
        assert not isinstance(result, BaseException), f"a thread failed: {result!r}"
        assert parts(result) == wanted[at], "another thread's call changed the result"


N = 6


def good() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((4, N, 4)), "k": rng.standard_normal((2, N, 4)), "token_ids": np.arange(N),
        "sentence_ends": frozenset({2}), "budget": 0.5, "parameters": TINY,
    }


def with_value(array: np.ndarray[Any, Any], value: float) -> np.ndarray[Any, Any]:
    changed = array.copy()
    changed.flat[5] = value
    return changed


def ones(*shape: int, dtype: type = np.float64) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype)


BAD: list[tuple[str, str, dict[str, Any]]] = [
    *[("budget", f"budget {value!r}", {"budget": value})
      for value in (0.0, 0, -3, 1.5, math.nan, math.inf, "half", True, None)],
    *[(name, f"{name} holds {value}", {name: with_value(good()[name], value)})
      for name in ("q", "k") for value in (math.nan, math.inf, -math.inf)],
    ("token_ids", "negative id", {"token_ids": np.array([0, 1, -1, 2, 3, 4])}),
    ("token_ids", "fewer ids than keys", {"token_ids": np.arange(N - 1)}),
    ("token_ids", "more ids than keys", {"token_ids": np.arange(N + 1)}),
    ("token_ids", "ids are floats", {"token_ids": np.arange(float(N))}),
    ("token_ids", "ids are bools", {"token_ids": np.ones(N, np.bool_)}),
    ("token_ids", "ids in a batch", {"token_ids": np.arange(N)[None]}),
    ("k", "k longer than q and ids", {"k": ones(2, N + 2, 4)}),
    ("k", "fewer queries than keys and ids", {"k": ones(2, N + 1, 4), "token_ids": np.arange(N + 1)}),
    ("q", "more queries than keys", {"q": ones(4, N + 1, 4)}),
    ("q", "n = 0", {"q": ones(4, 0, 4), "k": ones(2, 0, 4), "token_ids": np.arange(0)}),
    ("token_ids", "n = 1", {"q": ones(4, 1, 4), "k": ones(2, 1, 4), "token_ids": np.arange(1)}),
    ("q", "heads that do not divide", {"q": ones(3, N, 4)}),
    ("q", "fewer heads than k", {"q": ones(1, N, 4)}),
    ("k", "another head dimension", {"k": ones(2, N, 5)}),
    ("q", "no head dimension", {"q": ones(4, N, 0), "k": ones(2, N, 0)}),
    ("q", "no head", {"q": ones(0, N, 4)}),
    ("k", "no KV head", {"k": ones(0, N, 4)}),
    ("q", "a batch axis", {"q": ones(1, 4, N, 4)}),
    ("k", "a matrix", {"k": ones(N, 4)}),
    ("q", "integers", {"q": ones(4, N, 4, dtype=np.int64)}),
    ("k", "complex numbers", {"k": ones(2, N, 4, dtype=np.complex128)}),
    ("q", "a list", {"q": [[[1.0]]]}),
    ("q", "nothing", {"q": None}),
    ("sentence_ends", "no sentence ends", {"sentence_ends": frozenset()}),
    ("sentence_ends", "None", {"sentence_ends": None}),
    ("sentence_ends", "text", {"sentence_ends": ".!?"}),
    ("sentence_ends", "words", {"sentence_ends": {"."}}),
    ("sentence_ends", "a negative end", {"sentence_ends": {-1}}),
    ("sentence_ends", "a bool", {"sentence_ends": {True}}),
    ("scaling", "scaling 0", {"scaling": 0.0}),
    ("scaling", "scaling NaN", {"scaling": math.nan}),
    ("softcap", "softcap -1", {"softcap": -1.0}),
    ("softcap", "softcap infinite", {"softcap": math.inf}),
    ("backend", "an unknown backend", {"backend": "nampy"}),
]


@pytest.mark.spec("CC-PREFILL")
@pytest.mark.parametrize(("argument", "change"), [bad[::2] for bad in BAD], ids=[bad[1] for bad in BAD])
def test_bad_input_is_refused_by_name(backend: Backend, argument: str, change: dict[str, Any]) -> None:
    """A SpecError MUST name the argument, its value and the bound. The inputs MUST NOT change."""
    arguments = {**good(), "backend": backend, **change}
    before = pickle.dumps({name: value for name, value in arguments.items() if name != "backend"})
    with unchecked(), refused(argument, arguments.get(argument)):
        prefill(**arguments)
    assert pickle.dumps({name: value for name, value in arguments.items() if name != "backend"}) == before


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize(
    ("argument", "change"),
    [("q", {"q": with_value(good()["q"], math.nan)}), ("k", {"k": with_value(good()["k"], math.inf)}),
     ("q", {"q": ones(3, N, 4)}), ("k", {"k": ones(2, N, 5)}), ("q", {"q": ones(4, N + 1, 4)})],
)
def test_the_first_stage_refuses_bad_tensors_itself(backend: Backend, argument: str, change: dict[str, Any]) -> None:
    """The first stage MUST check its tensors, because a policy calls it without `prefill`."""
    arguments = {**good(), **change}
    with unchecked(), refused(argument, arguments[argument]):
        backend.require_crystal().coattention(arguments["q"], arguments["k"], np.arange(N), TINY, 0.5, None)


@pytest.mark.spec("CC-PREFILL")
def test_good_input_is_accepted(backend: Backend) -> None:
    """Check that the valid arguments, from which the invalid arguments above are made, are accepted."""
    assert len(prefill(**good(), backend=backend).kept) >= 5


Array = np.ndarray[Any, Any]


def lse_of(inputs: AttentionInputs) -> Matrix:
    """Return the correct lse of these inputs, (H, n)."""
    at = inputs.positions.tolist()
    return np.array(s1.log_sum_exp(
        inputs.q.tolist(), inputs.k.tolist(), at[-inputs.q.shape[1] :], at, inputs.scaling, inputs.softcap
    ))


@pytest.mark.spec("CC-COATTENTION", "CC-ATTENTION")
@given(inputs=st.one_of(attention_inputs(), later_segments()), k_cross=st.sampled_from([None, 0]))
def test_with_the_right_lse_s1_lies_in_the_certified_box(
    stages: CrystalStages, precision: str, inputs: AttentionInputs, k_cross: int | None,
) -> None:
    """A given lse in the precision of the backend MUST change the result only by rounding."""
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
    """Check values of a wrong shape or type, and values that are not finite."""
    with refused("lse", lse):
        plain(2, 4).run(stages, lse)


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize("sinks", [
    np.zeros(3, np.float32), np.zeros((2, 1), np.float32), [0.0] * 2, np.zeros(2, np.int64), np.array([0.0, np.nan]),
    np.array([-np.inf, 0.0]),
])
def test_bad_sinks_are_refused_by_name(stages: CrystalStages, sinks: object) -> None:
    """Check values of a wrong shape or type, and values that are not finite."""
    with refused("sinks", sinks):
        replace(plain(2, 4), sinks=sinks).run(stages)


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=attention_inputs(), pad=st.integers(1, 5))
def test_a_left_padded_row_is_the_view_behind_its_padding(
    stages: CrystalStages, precision: str, inputs: AttentionInputs, pad: int,
) -> None:
    """S1 MUST read only q[:, pad:] and k[:, pad:], so padding of NaN MUST NOT change the result."""
    q: Array = np.pad(inputs.q, ((0, 0), (pad, 0), (0, 0)), constant_values=np.nan)[:, pad:]
    k: Array = np.pad(inputs.k, ((0, 0), (pad, 0), (0, 0)), constant_values=np.nan)[:, pad:]
    lse = np.pad(lse_of(inputs).astype(precision), ((0, 0), (pad, 0)), constant_values=np.nan)[:, pad:]
    views = replace(inputs, q=q, k=k)
    for given_lse in (None, lse):
        assert not list(stage_checks.coattention(views.run(stages, given_lse), inputs, precision))


def orders(x: Array) -> list[Array]:
    """Return views (heads, tokens, d) of equal content in four memory layouts.

    The layouts are (tokens, heads, d), every second row, every second channel, and both axes in reverse order.
    """
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
    """Check that views of any layout have a result inside the same certified box."""
    views = replace(inputs, q=orders(inputs.q)[order], k=orders(inputs.k)[order])
    assert not views.k.flags.c_contiguous or min(inputs.k.shape) == 1
    assert not list(stage_checks.coattention(views.run(stages), inputs, precision))


@pytest.mark.spec("CC-COATTENTION", "CC-ATTENTION")
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("group", "softcap"), [(1, None), (7, 20.0), (8, None)])
def test_every_width_and_type(
    stages: CrystalStages, precision: str, d: int, dtype: type, group: int, softcap: float | None,
) -> None:
    """Check head dimensions and types of real models. NumPy has no bfloat16."""
    rng = np.random.default_rng(d + group)
    q: Array = rng.standard_normal((group, 24, d)).astype(dtype)
    k: Array = rng.standard_normal((1, 24, d)).astype(dtype)
    inputs = AttentionInputs(q, k, np.arange(24), replace(TINY, C=10), 1.5 * d**-0.5, softcap)
    assert not list(stage_checks.coattention(inputs.run(stages), inputs, precision))


@pytest.mark.spec("CC-COATTENTION", "CC-ATTENTION")
@pytest.mark.parametrize(("of_q", "of_k"), TYPE_PAIRS)
def test_every_type_and_size_of_numbers(stages: CrystalStages, precision: str, of_q: str, of_k: str) -> None:
    """Check finite numbers of any size, also if the type cannot hold their sum. q and k may have different types."""
    (q, large), (k, small) = of_type(of_q, 1, (2, 12, 4)), of_type(of_k, 2, (1, 12, 4))
    inputs = AttentionInputs(q, k, np.arange(12), replace(TINY, C=5), 0.5 / (large * small), None)
    wide = replace(inputs, q=q.astype(np.float64), k=k.astype(np.float64))
    assert not list(stage_checks.coattention(inputs.run(stages), wide, precision))


@pytest.mark.spec("CC-COATTENTION")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [3, 65, 257, 1_025])
@pytest.mark.parametrize("name", ["q", "k", "lse"])
def test_what_is_not_finite_is_refused_anywhere(stages: CrystalStages, name: str, n: int, value: float) -> None:
    """Check a NaN or an infinity at the first, a middle and the last place, with few queries and many keys.

    S1 MUST raise an error even if the value would not change the result.
    """
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
