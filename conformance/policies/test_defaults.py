"""What a policy is where nothing is said: the constants of its paper, or of its authors' code where the page says so."""

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from reference.policies.adakv import adakv, with_adaptive_budgets
from reference.policies.chunkkv import chunkkv, chunkkv_described
from reference.policies.defensivekv import defensivekv
from reference.policies.expected_attention import expected_attention
from reference.policies.h2o import h2o_described
from reference.policies.pyramidkv import pyramidkv, pyramidkv_described
from reference.policies.rkv import rkv
from reference.policies.snapkv import snapkv
from reference.policies.streaming_llm import streaming_llm

pytestmark = pytest.mark.usefixtures("reference_items")


def item(name: str) -> pytest.MarkDecorator:
    return pytest.mark.spec(id=name)


@pytest.mark.parametrize(
    ("policy", "constants"),
    [
        pytest.param(streaming_llm, {"N_sink": 4}, marks=item("PO-STREAMINGLLM")),
        pytest.param(snapkv, {"W": 32, "kernel": 7}, marks=item("PO-SNAPKV")),
        pytest.param(pyramidkv, {"W": 32, "kernel": 7, "beta": 20}, marks=item("PO-PYRAMIDKV")),
        pytest.param(pyramidkv_described, {"W": 128, "beta": 20}, marks=item("PO-PYRAMIDKV-DESCRIBED")),
        pytest.param(adakv, {"W": 32, "kernel": 7, "safeguard": Fraction(1, 5)}, marks=item("PO-ADAKV")),
        pytest.param(with_adaptive_budgets, {"safeguard": Fraction(1, 5)}, marks=item("PO-ADAPTIVE-BUDGET")),
        pytest.param(chunkkv, {"c": 10, "W": 32, "N_reuse": 1}, marks=item("PO-CHUNKKV")),
        pytest.param(chunkkv_described, {"c": 10}, marks=item("PO-CHUNKKV-DESCRIBED")),
        pytest.param(h2o_described, {"W": 128}, marks=item("PO-H2O-DESCRIBED")),
        pytest.param(
            expected_attention, {"factor": 1.0, "N_sink": 4, "N_future": 512}, marks=item("PO-EXPECTED-ATTENTION")
        ),
        pytest.param(defensivekv, {"W": 32, "kernel": 5}, marks=item("PO-DEFENSIVEKV")),
        pytest.param(rkv, {"W": 8, "kernel": 7, "lam": 0.1, "every": 128}, marks=item("PO-RKV")),
    ],
)
def test_the_constants_are_the_published_ones(policy: Callable[..., Any], constants: dict[str, Any]) -> None:
    """In the signature, so that a reader of a call without arguments knows what ran."""
    parameters = inspect.signature(policy).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == constants
