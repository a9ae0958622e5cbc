"""What a policy is where nothing is said: the constants that its item gives, what it is shown, when it decides."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from conformance.assurance.strategies.policy_expected import triattention as calibrated_triattention
from conformance.strategies.policy_inputs import TEMPLATE, drawn
from reference.policies.adakv import adakv, with_adaptive_budgets
from reference.policies.budgets import Pyramid
from reference.policies.cake import cake
from reference.policies.caote import caote
from reference.policies.chunkkv import chunkkv, chunkkv_described
from reference.policies.criticalkv import critical_adakv, criticalkv, with_critical_selection
from reference.policies.defensivekv import defensivekv
from reference.policies.diversity import diverse, toward_mean_values
from reference.policies.epicache import epicache
from reference.policies.expected_attention import expected_attention
from reference.policies.full_cache import full_cache
from reference.policies.h2o import h2o, h2o_described
from reference.policies.keydiff import keydiff
from reference.policies.knorm import knorm
from reference.policies.kvcrush import kvcrush, with_representatives
from reference.policies.kvzip import kvzip, kvzip_plus, kvzip_uniform
from reference.policies.kvzip_heads import kvzip_heads
from reference.policies.lagkv import lagkv
from reference.policies.morphkv import morphkv
from reference.policies.nestedkv import nestedkv, nestedkv_without_both
from reference.policies.pyramidkv import pyramidkv, pyramidkv_described
from reference.policies.rkv import rkv
from reference.policies.snapkv import snapkv
from reference.policies.streaming_llm import streaming_llm
from reference.policies.tova import tova
from reference.policies.triattention import triattention
from reference.policies.vase import vase
from reference.policies.vatp import vatp, with_value_norms
from spec.parameters import NESTEDKV
from spec.policy import Cadence, Needs, Policy, Rehearsal
from spec.retention import Granularity

pytestmark = pytest.mark.usefixtures("reference_items")


def item(name: str) -> pytest.MarkDecorator:
    return pytest.mark.spec(name)


@pytest.mark.parametrize(
    ("policy", "constants"),
    [
        pytest.param(streaming_llm, {"N_sink": 4}, marks=item("PO-STREAMINGLLM")),
        pytest.param(snapkv, {"W": 32, "kernel": 7}, marks=item("PO-SNAPKV")),
        pytest.param(pyramidkv, {"W": 32, "kernel": 7, "beta": 20}, marks=item("PO-PYRAMIDKV")),
        pytest.param(pyramidkv_described, {"W": 128, "beta": 20}, marks=item("PO-PYRAMIDKV-DESCRIBED")),
        pytest.param(Pyramid, {"beta": 20}, marks=item("PO-PYRAMID-BUDGET")),
        pytest.param(adakv, {"W": 32, "kernel": 7, "safeguard": Fraction(1, 5)}, marks=item("PO-ADAKV")),
        pytest.param(with_adaptive_budgets, {"safeguard": Fraction(1, 5)}, marks=item("PO-ADAPTIVE-BUDGET")),
        pytest.param(chunkkv, {"c": 10, "W": 32, "N_reuse": 1}, marks=item("PO-CHUNKKV")),
        pytest.param(chunkkv_described, {"c": 10}, marks=item("PO-CHUNKKV-DESCRIBED")),
        pytest.param(h2o, {"backend": "numpy"}, marks=item("PO-H2O")),
        pytest.param(tova, {"backend": "numpy"}, marks=item("PO-TOVA")),
        pytest.param(h2o_described, {"W": 128, "backend": "numpy"}, marks=item("PO-H2O-DESCRIBED")),
        pytest.param(
            expected_attention, {"factor": 1.0, "N_sink": 4, "N_future": 512, "backend": "numpy"},
            marks=item("PO-EXPECTED-ATTENTION"),
        ),
        pytest.param(defensivekv, {"W": 32, "kernel": 5}, marks=item("PO-DEFENSIVEKV")),
        pytest.param(lagkv, {"N_sink": 4, "lag": 128}, marks=item("PO-LAGKV")),
        pytest.param(
            cake, {"W": 32, "kernel": 5, "gamma": 200.0, "tau1": 1.0, "tau2": 1.0}, marks=item("PO-CAKE")
        ),
        pytest.param(morphkv, {"W": 32, "fusion": "sum"}, marks=item("PO-MORPHKV")),
        pytest.param(
            vase, {"W": 64, "kernel": 5, "N_sink": 4, "share": Fraction(1, 4), "seed": 0}, marks=item("PO-VASE")
        ),
        pytest.param(vatp, {"N_sink": 4, "backend": "numpy"}, marks=item("PO-VATP")),
        pytest.param(with_value_norms, {"N_sink": 4}, marks=item("PO-VATP")),
        pytest.param(
            with_representatives, {"block": 16, "share": Fraction(1, 4), "anchor": "alternating"},
            marks=item("PO-KVCRUSH"),
        ),
        pytest.param(
            kvcrush, {"W": 32, "kernel": 7, "block": 16, "share": Fraction(1, 4), "anchor": "alternating"},
            marks=item("PO-KVCRUSH"),
        ),
        pytest.param(with_critical_selection, {"share": Fraction(1, 2)}, marks=item("PO-CRITICALKV")),
        pytest.param(criticalkv, {"W": 32, "kernel": 7}, marks=item("PO-CRITICALKV")),
        pytest.param(
            critical_adakv, {"W": 32, "kernel": 7, "safeguard": Fraction(1, 5)}, marks=item("PO-CRITICALKV")
        ),
        *(pytest.param(
            make, {"template": None, "N_sink": 4, "N_recent": 0, "chunk": 2000, "overlap": 8, "backend": "numpy"},
            marks=item(name),
        ) for make, name in ((kvzip, "PO-KVZIP"), (kvzip_uniform, "PO-KVZIP"), (kvzip_plus, "PO-KVZIP-PLUS"))),
        pytest.param(kvzip_heads, {"N_sink": 64, "N_recent": 256}, marks=item("PO-KVZIP-HEADS")),
        pytest.param(rkv, {"W": 8, "kernel": 7, "lam": 0.1, "every": 128}, marks=item("PO-RKV")),
        pytest.param(triattention, {"mode": "global", "pin_prompt": 0, "slack": 128}, marks=item("TA-POLICY")),
        pytest.param(diverse, {"lam": 0.5, "mode": "flat", "backend": "numpy"}, marks=item("DV-POLICY")),
        pytest.param(toward_mean_values, {"lam": 0.5, "mode": "flat"}, marks=item("DV-VARIANT-B")),
        pytest.param(nestedkv, {"parameters": NESTEDKV, "backend": "numpy"}, marks=item("NK-NESTEDKV")),
    ],
)
def test_the_constants_are_the_published_ones(policy: Callable[..., Any], constants: dict[str, Any]) -> None:
    """In the signature, so that a reader of a call without arguments knows what ran."""
    parameters = inspect.signature(policy).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == constants


EVERY_SEGMENT = Cadence()
MODEL, LAYER, HEAD = Granularity.MODEL, Granularity.LAYER, Granularity.HEAD


@pytest.mark.parametrize(
    ("named", "needs", "floor", "granularity", "cadence"),
    [
        pytest.param(lambda: full_cache(), Needs(), 0, MODEL, EVERY_SEGMENT),
        pytest.param(lambda: streaming_llm(3), Needs(), 3, MODEL, EVERY_SEGMENT, marks=item("PO-STREAMINGLLM")),
        pytest.param(lambda: streaming_llm(0), Needs(), 0, MODEL, EVERY_SEGMENT, marks=item("PO-STREAMINGLLM")),
        pytest.param(lambda: h2o(), Needs("all", None), 0, HEAD, Cadence(1), marks=item("PO-H2O")),
        pytest.param(
            lambda: h2o_described(5), Needs("all", None), 5, HEAD, EVERY_SEGMENT, marks=item("PO-H2O-DESCRIBED")
        ),
        pytest.param(lambda: snapkv(6, 5), Needs("all", 6), 6, HEAD, EVERY_SEGMENT, marks=item("PO-SNAPKV")),
        pytest.param(lambda: pyramidkv(6, 5), Needs("all", 6), 6, HEAD, EVERY_SEGMENT, marks=item("PO-PYRAMIDKV")),
        pytest.param(
            lambda: pyramidkv_described(6), Needs("all", None), 6, HEAD, EVERY_SEGMENT,
            marks=item("PO-PYRAMIDKV-DESCRIBED"),
        ),
        pytest.param(lambda: adakv(6, 5), Needs("all", 6), 6, HEAD, EVERY_SEGMENT, marks=item("PO-ADAKV")),
        pytest.param(lambda: chunkkv(10, 6), Needs("all", 6), 6, LAYER, EVERY_SEGMENT, marks=item("PO-CHUNKKV")),
        pytest.param(
            lambda: chunkkv_described(), Needs("all", None), 0, LAYER, EVERY_SEGMENT, marks=item("PO-CHUNKKV-DESCRIBED")
        ),
        pytest.param(lambda: tova(), Needs("all", 1), 0, LAYER, Cadence(1), marks=item("PO-TOVA")),
        pytest.param(lambda: keydiff(), Needs("all", 0), 0, HEAD, EVERY_SEGMENT, marks=item("PO-KEYDIFF")),
        pytest.param(lambda: knorm(), Needs("all", 0), 0, HEAD, EVERY_SEGMENT, marks=item("PO-KNORM")),
        pytest.param(lambda: morphkv(6), Needs("all", 6), 6, HEAD, Cadence(1), marks=item("PO-MORPHKV")),
        pytest.param(lambda: vase(6), Needs("all", 6, values=True), 10, HEAD, Cadence(6), marks=item("PO-VASE")),
        pytest.param(lambda: kvcrush(6, 5, 4), Needs("all", 6), 6, HEAD, EVERY_SEGMENT, marks=item("PO-KVCRUSH")),
        pytest.param(lambda: cake(6), Needs("all", 6), 6, HEAD, EVERY_SEGMENT, marks=item("PO-CAKE")),
        pytest.param(lambda: caote(), Needs("all", 1, values=True), 0, HEAD, Cadence(1), marks=item("PO-CAOTE")),
        pytest.param(lambda: epicache(), Needs("all", None), 0, HEAD, EVERY_SEGMENT, marks=item("PO-EPICACHE")),
        pytest.param(
            lambda: expected_attention(np.ones(1), N_sink=2), Needs("all", None, values=True), 2, HEAD, EVERY_SEGMENT,
            marks=item("PO-EXPECTED-ATTENTION"),
        ),
        pytest.param(
            lambda: defensivekv({}, 6), Needs("all", 6, values=True, budget=True), 6, HEAD, EVERY_SEGMENT,
            marks=item("PO-DEFENSIVEKV"),
        ),
        pytest.param(
            lambda: criticalkv({}, 6), Needs("all", 6, values=True), 6, HEAD, EVERY_SEGMENT, marks=item("PO-CRITICALKV")
        ),
        pytest.param(
            lambda: with_value_norms(snapkv(6), 0), Needs("all", 6, values=True), 6, HEAD, EVERY_SEGMENT,
            marks=item("PO-VATP"),
        ),
        pytest.param(
            lambda: lagkv(3, 5), Needs("all", 0, values=True), 3, HEAD, EVERY_SEGMENT, marks=item("PO-LAGKV")
        ),
        pytest.param(
            lambda: kvzip(TEMPLATE, 2, 3),
            Needs("all", 0, token_ids=True, rehearsal=Rehearsal(TEMPLATE, 2, 3, 2000, 8)), 5, HEAD, EVERY_SEGMENT,
            marks=item("PO-KVZIP"),
        ),
        pytest.param(lambda: rkv(6, 5, every=9), Needs("all", 6), 6, HEAD, Cadence(9), marks=item("PO-RKV")),
        pytest.param(
            lambda: calibrated_triattention(drawn(1), "global", slack=9), Needs("all", 0, budget=True), 0, MODEL,
            Cadence(1, 9),
            marks=item("TA-POLICY"),
        ),
        pytest.param(
            lambda: nestedkv(replace(NESTEDKV, N_sink=0)), Needs("all", 0), 0, HEAD, EVERY_SEGMENT,
            marks=item("NK-NESTEDKV"),
        ),
        pytest.param(
            lambda: nestedkv_without_both(), Needs("all", 0), 0, HEAD, EVERY_SEGMENT, marks=item("NK-ABLATIONS")
        ),
    ],
)
def test_a_policy_says_what_it_needs_and_when_it_decides(
    named: Callable[[], Policy], needs: Needs, floor: int, granularity: Granularity, cadence: Cadence,
) -> None:
    """No query row more than its scores read; a floor that is its protected tokens; its granularity and cadence."""
    policy = named()
    assert policy.scorer.needs == needs
    assert (policy.floor, policy.granularity, policy.cadence) == (floor, granularity, cadence)
    assert policy.protection(40).sum() == floor
