"""Tests of each property that the policy promises, on drawn inputs. Other properties are skipped with a reason."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from conformance.abstentions import State, abstain
from conformance.checks.failing_input import note_code
from conformance.checks.promises import PROPERTIES, promised
from conformance.checks.refusals import boundary
from conformance.strategies.model_shapes import LARGE_LOGITS, SHAPES
from conformance.strategies.policy_inputs import Inputs, altered, decided, drawn
from spec.errors import SpecError
from spec.policy import Policy

pytestmark = pytest.mark.spec("PO-RETAIN")

LONG = 1 << 16
"""Number of tokens for which sinks and windows have their full size."""
MANY = 100
"""Number of tokens from which a message counts the kept tokens instead of listing them."""
SHORT, TIMES = 26, 8
"""Largest number of tokens beside the protected ones, and largest multiple of the protected number that is added.

An error in a share of the budget shows only in inputs that are longer than the protected tokens.
"""

OF_MODELS = {str(one): one for one in (SHAPES[0], LARGE_LOGITS)}
"""Inputs with the sizes of models, by description."""


class Draw(NamedTuple):
    """Sizes of an input: `tokens` plus `times` the protected tokens, with `more_layers` additional layers.

    `keys`, `values` and `queries` name a kind: normally distributed, or such that tokens or heads tie or nearly tie.
    With a `shape`, the input has the sizes of a model instead.
    """

    tokens: int
    times: int
    more_layers: int
    kv_heads: int
    group: int
    budget: int
    seed: int
    keys: str = "normal"
    values: str = "normal"
    queries: str = "normal"
    shape: str = ""

    def __repr__(self) -> str:
        """Return the call that makes the draw, without arguments that have the default value."""
        default = self._field_defaults
        words = [f"{name}={value!r}" for name, value in self._asdict().items() if value != default.get(name)]
        return f"Draw({', '.join(words)})"

    def inputs(self, protected: int, layers: int) -> Inputs:
        if self.shape:
            return OF_MODELS[self.shape]._replace(layers=layers).inputs()
        n = self.tokens + self.times * protected
        normal = drawn(self.seed, n, layers + self.more_layers, (self.kv_heads, self.group))
        return altered(normal, self.keys, self.seed, self.values, self.queries)


DRAWN_SHAPES = st.sampled_from(["", "", "", str(SHAPES[0])])
"""Shapes of random inputs. Hypothesis also draws arguments with a default, so the share of large inputs is set here."""
TYING = ("few values", "nearly equal", "same keys")
DRAWS = st.builds(
    Draw, tokens=st.integers(2, SHORT), times=st.integers(0, TIMES), more_layers=st.integers(0, 2),
    kv_heads=st.integers(1, 3), group=st.integers(1, 2), budget=st.integers(0, LONG), seed=st.integers(0, 2**32 - 2),
    keys=st.sampled_from(["normal", *TYING]), values=st.sampled_from(["normal", *TYING, "equal"]),
    queries=st.sampled_from(["normal", *TYING]), shape=DRAWN_SHAPES,
)

# If several examples fail, Hypothesis reports the one with the shortest text, which is a small input if possible.
TIES = [
    Draw(one.tokens, 0, 0, one.kv_heads, one.group, 120, 1, shape=name) for name, one in OF_MODELS.items()
]
TIES += [
    Draw(3 + seed % 4, 0, 0, 2 + seed % 2, 1, seed, seed, keys)
    for keys in TYING for seed in range(8)
]
TIES += [
    Draw(5 + seed, 0, 0, 2, 1, seed, seed, keys, values, queries) for seed in range(4) for keys, values, queries in [
        ("normal", "equal", "normal"), ("normal", "few values", "normal"), ("normal", "normal", "few values"),
        ("few values", "few values", "few values"),
    ]
]
TIES += [Draw(9, 0, 0, 2, 1, 0, seed, "long") for seed in range(8)]  # The budget is the floor, and scores exceed 2 048.


def with_examples(draws: Sequence[Draw]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs a test on these inputs, the last first, before the drawn inputs."""
    return lambda test: reduce(lambda result, draw: example(draw=draw)(result), draws, test)


@dataclass(frozen=True)
class Subject:
    """Policy under test. The protected tokens are those of the policy's protection for any inputs."""

    policy: Callable[[Inputs], Policy]

    @cached_property
    def example(self) -> Policy:
        """The policy for some input."""
        return self.policy(drawn(0))

    @property
    def floor(self) -> int:
        return self.example.floor

    def guaranteed(self, n: int, B: int) -> set[int]:
        return set(np.flatnonzero(self.example.protection(n)).tolist())

    @property
    def fewest_layers(self) -> int:
        """Smallest number of layers of a model that has the observed layer."""
        needs = self.example.scorer.needs
        return 1 if needs.layers != "observed" else max(needs.observed + 1, -needs.observed)


@pytest.mark.parametrize("column", [pytest.param(name, marks=pytest.mark.row(name)) for name in PROPERTIES])
@with_examples(TIES)
@given(draw=DRAWS)
def test_a_promise_holds(column: str, judged_policy: Callable[[Inputs], Policy], draw: Draw) -> None:
    case = Subject(judged_policy)
    with boundary("the policy"):
        promise, protected = promised(case.example, column), len(case.guaranteed(LONG, LONG))
    if promise != "yes":
        state: State = "N/A" if promise == "N/A" else "not promised"
        abstain(state, f"{column}: {state}")
    if column == "protection holds" and not protected:
        abstain("N/A", f"{column}: N/A, for no token is protected")
    inputs = draw.inputs(protected, case.fewest_layers)
    B = 1 + draw.budget % (inputs.n + 4)
    code = f"{draw}.inputs(protected={protected}, layers={case.fewest_layers}), {B}"
    with note_code(f"from conformance.policy_suite.test_promises import Draw\ninputs, B = {code}"):
        check(case, column, inputs, B, draw.seed)


def check(case: Subject, column: str, inputs: Inputs, B: int, seed: int) -> None:
    """Check a property on one input. A smaller budget is raised to the number of protected tokens.

    The input does not count if the policy refuses a budget below the number of tokens.
    """
    try:
        with boundary("the policy"):
            B = max(B, len(case.guaranteed(inputs.n, B)))
            problem = PROPERTIES[column].problem(case, inputs, B, seed)
            kept = decided(case.policy(inputs), inputs, B)
    except SpecError as refused:
        if refused.argument != "budget" or inputs.n <= B:
            raise
        reject()
    if problem:
        shown = kept if inputs.n < MANY else f"{', '.join(str(len(tokens)) for tokens in kept)} tokens"
        raise AssertionError(
            f"{column}: not so with {inputs.n} tokens, B = {B}, layers x KV heads = {len(inputs.layers)} x"
            f" {inputs.H_kv}: {problem}\n{case.example.name} keeps {shown}"
        )
