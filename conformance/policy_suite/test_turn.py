"""Test of the kept sets of a policy at the end of a later turn, over the tokens that the cache still stores."""

from collections.abc import Callable

import numpy as np

from conformance.checks.refusals import boundary
from conformance.methods.method import Method, rounded, span_of
from conformance.oracles.box import DOUBLE, Undecided
from conformance.policy_suite.test_method import difference
from conformance.strategies.model_shapes import of_turn
from conformance.strategies.policy_inputs import Inputs, decided_in_turn, drawn
from spec.policy import Policy

PROMPT, TURN = 60, 24
"""Numbers of tokens of the prompt and of the turn, in addition to the longest window."""


def test_the_kept_sets_after_a_later_turn_are_those_of_the_method(
    method: Method, judged_policy: Callable[[Inputs], Policy],
) -> None:
    """Check that the scorer reads the stored tokens as one sequence (PO-TURN).

    Protection depends on the positions of the tokens in the text.
    """
    span = span_of(method)
    for seed, heads in enumerate([(2, 2), (1, 4)]):
        inputs = rounded(drawn(seed, PROMPT + TURN + 2 * span, 2, heads))
        first, floor = inputs.n - TURN - span, method.floor(inputs)
        old = np.flatnonzero((np.random.default_rng(seed).random(first) < 0.5) | (np.arange(first) < floor))
        live = np.concatenate([old, np.arange(first, inputs.n)])
        B = max(floor, len(live) // 2)
        stored = of_turn(inputs, live, first)
        with boundary("the policy"):
            kept = decided_in_turn(judged_policy(stored), stored, live, inputs.n, B)
        try:
            wanted = method.wanted(stored, B, DOUBLE)
        except Undecided:
            continue
        slots = np.full(inputs.n, -1)
        slots[live] = np.arange(len(live))
        if message := difference([slots[tokens].tolist() for tokens in kept], wanted, len(inputs.layers)):
            left = f"{len(live)} tokens left of {inputs.n}"
            raise AssertionError(f"not {method} at the end of a later turn, with {left}, B = {B}: {message}")
