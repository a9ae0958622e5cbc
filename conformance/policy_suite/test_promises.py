"""Each column that the policy promises, on drawn inputs; the others are skipped by name."""

from dataclasses import dataclass

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from conformance.checks.promises import PROPERTIES, promised
from conformance.strategies.policy_inputs import Inputs, decided, drawn
from spec.errors import SpecError
from spec.policy import Policy

pytestmark = pytest.mark.spec("PO-RETAIN")

LONG = 1 << 16
"""Tokens at which sinks and windows are whole."""
SHORT, TIMES = 26, 8
"""Tokens of the longest input beside what is protected, and how many times that: shares of a budget show beyond it."""


@dataclass(frozen=True)
class Own:
    """A policy that depends on nothing but what it is shown, and protects what its protection says."""

    own: Policy

    def policy(self, inputs: Inputs) -> Policy:
        return self.own

    @property
    def floor(self) -> int:
        return self.own.floor

    def guaranteed(self, n: int, B: int) -> set[int]:
        return {position for position, held in enumerate(self.own.protection(n).tolist()) if held}


def fewest_layers(policy: Policy) -> int:
    """The model must have the layer that is observed."""
    needs = policy.scorer.needs
    return 1 if needs.layers != "observed" else max(needs.observed + 1, -needs.observed)


@pytest.mark.parametrize("column", PROPERTIES)
def test_a_promise_holds(column: str, judged_policy: Policy) -> None:
    if promised(judged_policy, column) != "yes":
        pytest.skip(f"{column}: {'N/A' if promised(judged_policy, column) == 'N/A' else 'not promised'}")
    case, fewest = Own(judged_policy), fewest_layers(judged_policy)
    most = SHORT + TIMES * len(case.guaranteed(LONG, LONG))

    @given(
        n=st.integers(2, most), layers=st.integers(fewest, fewest + 2), kv_heads=st.integers(1, 3),
        group=st.integers(1, 2), B=st.integers(1, most + 4), seed=st.integers(0, 2**32 - 2),
    )
    def holds(n: int, layers: int, kv_heads: int, group: int, B: int, seed: int) -> None:
        check(case, column, drawn(seed, n, layers, (kv_heads, group)), B, seed)

    holds()


def check(case: Own, column: str, inputs: Inputs, B: int, seed: int) -> None:
    """One input: no budget below what is protected, and none that the policy refuses."""
    B = max(B, len(case.guaranteed(inputs.n, B)))
    try:
        holds = PROPERTIES[column].holds(case, inputs, B, seed)
        kept = decided(case.own, inputs, B)
    except SpecError as refused:
        if refused.argument != "budget":
            raise
        reject()
    assert holds, (
        f"{column}: not so with {inputs.n} tokens, B = {B}, layers x KV heads = {len(inputs.layers)} x {inputs.H_kv},"
        f" where {case.own.name} keeps {kept}; promised is that {PROPERTIES[column].says}"
    )
