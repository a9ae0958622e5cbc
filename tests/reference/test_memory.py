"""The memory of a reference policy for a prompt grows linearly with the length of the prompt, not quadratically."""

import tracemalloc

import pytest

from conformance.strategies.policy_inputs import decided, drawn
from lab.policy_cases import CASES

SHORT, LONG = 768, 1_536
LINEAR = 2.8
"""Largest growth of the peak from SHORT to LONG tokens: 2 if it is linear, 4 if it is quadratic."""


def peak(name: str, n: int) -> int:
    """Return the peak bytes of a decision about n tokens, minus the bytes in use before."""
    inputs = drawn(1, n=n)
    policy = CASES[name].policy(inputs)
    decided(policy, inputs, max(CASES[name].floor, n // 2))
    tracemalloc.start()
    decided(policy, inputs, max(CASES[name].floor, n // 2))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_memory_of_a_decision_is_linear_in_the_tokens(name: str) -> None:
    short, long = peak(name, SHORT), peak(name, LONG)
    assert long <= LINEAR * short, f"{short / 1e6:.1f} MB at {SHORT} tokens, {long / 1e6:.1f} MB at {LONG}"
