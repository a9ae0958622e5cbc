"""Tests of one policy over several segments: a later turn of a sequence, and two sequences that decode in turn."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from conformance.checks.failing_input import note_code
from conformance.checks.refusals import boundary
from conformance.methods.method import Method, method_of, rounded, span_of
from conformance.oracles.box import DOUBLE, Undecided
from conformance.oracles.choices import Answer
from conformance.policy_suite.test_method import difference, on_shape
from conformance.strategies.model_shapes import DECODED, of_turn
from conformance.strategies.policy_inputs import Inputs, another, decided, decided_in_turn, decoding, drawn
from spec.policy import Policy

PROMPT = 60
"""Number of tokens of the prompt, in addition to the longest window."""
BATCH = DECODED._replace(tokens=180, steps=140, share=0.2)
"""Sizes of two sequences. At 128 tokens, a policy decides that does so once in 128 tokens."""
Array = np.ndarray[Any, Any]


class Turn(NamedTuple):
    """Sizes of a later turn. `evicted` tokens of the text, in addition to half of the prompt, are not stored."""

    layers: int
    kv_heads: int
    group: int
    tokens: int
    evicted: int = 0


TURNS = (Turn(2, 2, 2, 24), Turn(2, 1, 4, 24), Turn(1, 2, 1, 24, evicted=2**16 - 80), Turn(1, 8, 1, 9))
"""Turns of one window and a few more tokens. In the third turn, the last positions exceed 16 bits."""


def on_turn(method: Method | str, at: int) -> tuple[Inputs, Array, int, int]:
    """Return the stored tokens at the end of a turn, their positions in the text, the length of the text, and B."""
    method = method_of(method) if isinstance(method, str) else method
    span, turn = span_of(method), TURNS[at]
    inputs = rounded(drawn(at, PROMPT + turn.tokens + 2 * span, turn.layers, (turn.kv_heads, turn.group)))
    first, floor = inputs.n - turn.tokens - span, method.floor(inputs)
    old = np.flatnonzero((np.random.default_rng(at).random(first) < 0.5) | (np.arange(first) < floor))
    live = np.concatenate([old, np.arange(first, inputs.n)])
    stored = of_turn(inputs, live, first)
    positions = live + turn.evicted * (np.arange(len(live)) >= floor)
    return replace(stored, positions=positions), positions, inputs.n + turn.evicted, max(floor, len(live) // 2)


def test_the_kept_sets_after_a_later_turn_are_those_of_the_method(
    method: Method, judged_policy: Callable[[Inputs], Policy], explained: dict[str, list[str]],
) -> None:
    """Check that the scorer reads the stored tokens as one sequence (PO-TURN).

    Protection depends on the positions of the tokens in the text. If the policy is already wrong at the end of a
    prompt, the failure has the reasons that were found there.
    """
    reasons = explained.get(str(method), [])
    for at in range(len(TURNS)):
        code = f"inputs, live, seen, B = on_turn({str(method)!r}, {at})"
        with note_code(f"from conformance.policy_suite.test_turn import on_turn\n{code}"):
            compare(method, judged_policy, *on_turn(method, at), reasons=reasons)


def test_sequences_that_decode_in_turn_do_not_share_data(
    method: Method, judged_policy: Callable[[Inputs], Policy],
) -> None:
    """Check that a policy keeps the same tokens of a sequence if it also decides for another sequence in between.

    One policy object serves all rows of a batch, and all sessions.
    """
    inputs, B = on_shape(method, BATCH)
    policy, rows = judged_policy(inputs), (inputs, another(inputs, 1))
    with boundary("the policy"):
        alone = [decided(policy, row, B) for row in rows]
        *_, together = zip(*(decoding(policy, row, B) for row in rows), strict=True)
    for row, (kept, wanted) in enumerate(zip(together, alone, strict=True)):
        if message := difference(kept, [Answer(tokens) for tokens in wanted], len(inputs.layers)):
            raise AssertionError(
                f"{method}: two sequences that decode in turn share data of the policy. For sequence {row}, {message}; "
                "keep no data of a sequence in the policy, but in the records that `step` and `keep` return"
            )


def compare(
    method: Method, policy: Callable[[Inputs], Policy], stored: Inputs, live: Array, seen: int, B: int,
    reasons: Sequence[str] = (),
) -> None:
    """Compare the kept sets of a policy with the method, unless rounding decides the kept sets.

    Raises:
        AssertionError: if the policy keeps different tokens.
    """
    with boundary("the policy"):
        kept = decided_in_turn(policy(stored), stored, live, seen, B)
    try:
        wanted = method.wanted(stored, B, DOUBLE)
    except Undecided:
        return
    slots = np.full(seen, -1)
    slots[live] = np.arange(len(live))
    if message := difference([slots[tokens].tolist() for tokens in kept], wanted, len(stored.layers)):
        left = f"{len(live)} tokens left of {seen}, numbered from 0"
        advised = "".join(f"\n{reason}" for reason in reasons)
        raise AssertionError(f"not {method} at the end of a later turn, with {left}, B = {B}: {message}{advised}")
