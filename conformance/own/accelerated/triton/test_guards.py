"""No kernel reads or writes outside its arrays, or reads what none has written; inputs stay as they are."""

# ruff: noqa: E402 - the imports below need what is asked for first

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.own.accelerated.triton.runtime import require_runtime

require_runtime()

import torch

from accelerated.triton_gpu import (
    coattention,
    compaction,
    crystallization,
    device,
    dissolution,
    graph,
    impact,
    score,
    trunks,
)
from accelerated.triton_gpu.backend import ON_DEVICE
from conformance.own.accelerated.triton.guards import POISON, guarded, poisoned_allocations
from conformance.strategies.prompts import AttentionInputs, attention_inputs, later_segments
from conformance.strategies.trunks import EvictionProblem, Text, evictions, partitions, texts
from spec.records import CoAttention, Trunks

pytestmark = pytest.mark.judges("triton")

MODULES = [coattention, compaction, crystallization, dissolution, graph, impact, score, trunks]
STAGES = ON_DEVICE.require_crystal()


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, array by array."""
    if not isinstance(a, np.ndarray | int):
        return all(same(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
    if isinstance(a, int):
        return bool(a == b)
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


def run(inputs: AttentionInputs, q: Any, k: Any, lse: Any = None) -> CoAttention:
    return STAGES.coattention(q, k, inputs.positions, inputs.parameters, inputs.scaling, inputs.softcap, lse)


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=st.one_of(attention_inputs(), later_segments()), with_lse=st.booleans())
def test_attention_stays_inside_its_arrays(inputs: AttentionInputs, with_lse: bool) -> None:
    """S1: every input, buffer and output between bands; the same bits as without them."""
    q, k = device.attention_tensors(inputs.q, inputs.k)
    # Any numbers do: what is asked is where they are read.
    lse = torch.linspace(0, 9, q.shape[0] * q.shape[1], device=q.device).view(q.shape[:2]) if with_lse else None
    with poisoned_allocations(MODULES) as fields:
        found = run(
            inputs, guarded(q, fields), guarded(k, fields), None if lse is None else guarded(lse, fields)
        )
    assert len(fields) >= 6
    assert all(field.is_whole() for field in fields)
    assert same(found, run(inputs, q, k, lse))


@pytest.mark.spec("CC-TRUNKS", "CC-TRUNK-IMPACT")
@given(text=texts())
def test_trunks_stay_inside_their_arrays(text: Text) -> None:
    with poisoned_allocations(MODULES) as fields:
        found = STAGES.trunks(text.coattention, text.impact, text.ends, text.parameters)
    assert fields
    assert all(field.is_whole() for field in fields)
    assert same(found, STAGES.trunks(text.coattention, text.impact, text.ends, text.parameters))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Text, Trunks]:
    text = draw(texts(), label="text")
    return text, draw(partitions(len(text.ends)), label="trunks")


@pytest.mark.spec("CC-TRUNK-WEIGHT", "CC-CRYSTALLIZATION")
@given(case=graphs())
def test_the_graph_stays_inside_its_arrays(case: tuple[Text, Trunks]) -> None:
    text, among = case
    with poisoned_allocations(MODULES) as fields:
        found = STAGES.graph(text.coattention, among, text.parameters)
    assert fields
    assert all(field.is_whole() for field in fields)
    assert same(found, STAGES.graph(text.coattention, among, text.parameters))


@pytest.mark.spec("CC-DISSOLVE", "CC-SCORE")
@given(problem=evictions(), ids=st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_impact_score_and_eviction_stay_inside_their_arrays(problem: EvictionProblem, ids: list[int]) -> None:
    p, protected = problem.parameters, problem.protected

    def all_three() -> list[Any]:
        return [
            STAGES.impact(np.ones(len(ids)), np.array(ids), p),
            STAGES.score(problem.D, problem.D + 1, protected, p),
            STAGES.dissolve(
                problem.score, problem.trunks, problem.impact, problem.D, protected, problem.budget, p
            ),
        ]

    with poisoned_allocations(MODULES) as fields:
        found = all_three()
    assert fields
    assert all(field.is_whole() for field in fields)
    assert all(same(a, b) for a, b in zip(found, all_three(), strict=True))


@pytest.mark.spec("CC-COMPACT")
@given(n=st.integers(1, 40), width=st.integers(1, 20), dtype=st.sampled_from(list(POISON)), data=st.data())
def test_the_gather_stays_inside_its_arrays(n: int, width: int, dtype: torch.dtype, data: st.DataObject) -> None:
    R = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1)), label="R")), dtype=np.int64)
    K = torch.randn(2, n, width, device=device.default_device()).to(dtype)
    with poisoned_allocations(MODULES) as fields:
        K_R, V_R = compaction.compact(guarded(K, fields), guarded(-K, fields), R)
    assert all(field.is_whole() for field in fields)
    assert torch.equal(K_R, K[:, R])
    assert torch.equal(V_R, -K[:, R])


@pytest.mark.spec("CC-COATTENTION")
@given(inputs=attention_inputs())
def test_a_run_repeats_to_the_bit_and_leaves_its_inputs(inputs: AttentionInputs) -> None:
    """Tensors are read where they are; nothing is written to them."""
    q, k = device.attention_tensors(inputs.q, inputs.k)
    before = q.clone(), k.clone()
    first = run(inputs, q, k)
    assert same(run(inputs, q, k), first)
    assert same(run(inputs, inputs.q, inputs.k), first)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
