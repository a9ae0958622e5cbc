"""What a policy is where nothing is said: its published constants; it asks a model for what it reads, and no more."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from conformance.assurance.brute import Brute
from conformance.assurance.oracles import brutes
from conformance.assurance.policy_cases import CASES
from conformance.strategies.policy_inputs import Inputs, decided, drawn
from reference.policies.adakv import with_adaptive_budgets
from reference.policies.budgets import Pyramid
from reference.policies.criticalkv import with_critical_selection
from reference.policies.diversity import diverse, toward_mean_values
from reference.policies.kvcrush import with_representatives
from reference.policies.vatp import with_value_norms
from spec.policy import LayerView

pytestmark = pytest.mark.usefixtures("reference_items")


def item(name: str) -> pytest.MarkDecorator:
    return pytest.mark.spec(name)


def defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """The defaults in a signature, but for the backend's."""
    given = inspect.signature(make).parameters.values()
    return {one.name: one.default for one in given if one.default is not one.empty and one.default != "numpy"}


@pytest.mark.parametrize("brute", [pytest.param(one, id=one.name, marks=item(one.item)) for one in brutes()])
def test_the_constants_are_the_published_ones(brute: Brute) -> None:
    """In the signature, so that a reader of a call without arguments knows what ran."""
    assert defaults(brute.make) == brute.published


@pytest.mark.parametrize(
    ("compose", "constants"),
    [
        pytest.param(Pyramid, {"beta": 20}, marks=item("PO-PYRAMID-BUDGET")),
        pytest.param(with_adaptive_budgets, {"safeguard": Fraction(1, 5)}, marks=item("PO-ADAPTIVE-BUDGET")),
        pytest.param(with_value_norms, {"N_sink": 4}, marks=item("PO-VATP")),
        pytest.param(
            with_representatives, {"block": 16, "share": Fraction(1, 4), "anchor": "alternating"},
            marks=item("PO-KVCRUSH"),
        ),
        pytest.param(with_critical_selection, {"share": Fraction(1, 2)}, marks=item("PO-CRITICALKV")),
        pytest.param(diverse, {"lam": 0.5, "mode": "flat"}, marks=item("DV-POLICY")),
        pytest.param(toward_mean_values, {"lam": 0.5, "mode": "flat"}, marks=item("DV-VARIANT-B")),
    ],
)
def test_a_composition_has_the_published_constants(compose: Callable[..., Any], constants: dict[str, Any]) -> None:
    assert defaults(compose) == constants


cases = pytest.mark.parametrize("name", [pytest.param(name, marks=item(case.item)) for name, case in CASES.items()])


@cases
def test_a_floor_holds_the_protected_tokens(name: str) -> None:
    policy = CASES[name].policy(drawn(1))
    assert policy.protection(40).sum() <= policy.floor == CASES[name].floor


def other_query(view: LayerView, row: int) -> LayerView:
    q = view.q.copy()
    q[:, row] *= -3
    return replace(view, q=q)


def other_value(view: LayerView, row: int) -> LayerView:
    v = view.v.copy()  # type: ignore[union-attr]
    v[0, row] *= -9
    return replace(view, v=v)


def matters(name: str, change: Callable[[LayerView, int], LayerView], row: Callable[[Inputs], int]) -> bool:
    """Whether the kept sets of some input follow what changes in its layers."""
    for seed in range(200):
        inputs = drawn(seed, n=24)
        policy, B = CASES[name].policy(inputs), 6 + seed % 16
        other = replace(inputs, layers=[change(view, row(inputs)) for view in inputs.layers])
        if decided(policy, inputs, B) != decided(policy, other, B):
            return True
    return False


@cases
def test_a_policy_asks_for_no_more_than_it_reads(name: str) -> None:
    """The oldest query that it is shown, and the values, count."""
    needs = CASES[name].policy(drawn(1)).scorer.needs
    rows = needs.query_rows
    if needs.layers != "none" and rows != 0:
        assert matters(name, other_query, lambda inputs: 12 if rows is None else inputs.n - rows)
    if needs.values:
        assert matters(name, other_value, lambda inputs: 12)
