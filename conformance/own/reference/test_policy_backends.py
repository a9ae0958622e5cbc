"""Policies whose stages a backend runs: which engine decides, and who is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.assurance.policy_cases import CASES
from conformance.strategies.policy_inputs import decided, drawn
from reference import policies
from reference.policies.attention import received_attention
from spec.backend import Backend
from spec.errors import BackendUnavailable
from spec.policy import Policy

pytestmark = pytest.mark.usefixtures("reference_items")

MAKERS: list[Any] = [
    pytest.param("h2o", lambda i, **on: policies.h2o(**on), marks=pytest.mark.spec("PO-H2O")),
    pytest.param("tova", lambda i, **on: policies.tova(**on), marks=pytest.mark.spec("PO-TOVA")),
    pytest.param("vatp", lambda i, **on: policies.vatp(1, **on), marks=pytest.mark.spec("PO-VATP")),
    pytest.param(
        "h2o-described", lambda i, **on: policies.h2o_described(3, **on), marks=pytest.mark.spec("PO-H2O-DESCRIBED")
    ),
    pytest.param(
        "expected-attention",
        lambda i, **on: policies.expected_attention(i.inv_freq, i.factor, 2, 5, **on),
        marks=pytest.mark.spec("PO-EXPECTED-ATTENTION"),
    ),
]


@pytest.mark.parametrize(("name", "make"), MAKERS)
def test_a_backend_without_the_family_is_named(name: str, make: Callable[..., Policy]) -> None:
    with pytest.raises(BackendUnavailable, match="no stage family 'policies'; it has: none"):
        make(drawn(1), backend=Backend("bare"))


@pytest.mark.parametrize(("name", "make"), MAKERS)
def test_numba_keeps_what_the_reference_keeps(name: str, make: Callable[..., Policy]) -> None:
    """On inputs whose scores are far apart, in float32 too."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    for seed in range(30):
        inputs = drawn(seed)
        B = max(CASES[name].floor, (inputs.n + 1) // 2)
        assert decided(make(inputs, backend="numba"), inputs, B) == decided(make(inputs), inputs, B)


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize("floats", [1, 200, 2**20])
def test_blocks_and_threads_say_nothing(monkeypatch: pytest.MonkeyPatch, floats: int) -> None:
    """A block of one query or of all; and the same bits from one thread as from three."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    from accelerated.numba_cpu import attention

    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(6, 150, 8)).astype(np.float32), rng.normal(size=(2, 170, 8)).astype(np.float32)
    want = received_attention(q, k, 0.35, None)
    monkeypatch.setattr(attention, "FLOATS", floats)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr("os.cpu_count", lambda threads=threads: threads)
        found.append(attention.received_attention(q, k, 0.35, None))
    assert np.array_equal(found[0], found[1])
    assert np.abs(found[0] - want).max() < 1e-5 * want.max()
