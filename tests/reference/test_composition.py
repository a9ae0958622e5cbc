"""Tests of compositions: a combination of parts is refused when it is built, or keeps the declared counts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from conformance.strategies.policy_inputs import Inputs, decided, drawn, model_constants, observation
from reference.policies import in_blocks, snapkv, with_representatives
from reference.policies.budgets import Above, Adaptive, Competition, Pyramid, across_layers, even, everything
from reference.policies.cake import Preferred
from reference.policies.composition import promises_of_parts
from reference.policies.criticalkv import two_stages
from reference.policies.diversity import Diverse, TowardMean
from reference.policies.kvzip_heads import FullHeads
from reference.policies.names import NAMES, POLICIES, constants_of, make_policy
from reference.policies.protections import ProtectedPositions, SinkAndRecent
from reference.policies.retain import chosen, shown_to
from reference.policies.selectors import fill_units, recent_half, top_tokens, top_units
from reference.policies.vase import ranges_first
from spec.backend import resolve
from spec.composition import required_by
from spec.errors import SpecError
from spec.policy import NOTHING_PROMISED, Cadence, Policy, Scores
from spec.promises import promises_of
from spec.retention import Granularity

SMALL: Mapping[str, Any] = {
    "W": 3, "N_sink": 2, "N_recent": 2, "c": 3, "lag": 4, "block": 3, "kernel": 3, "chunk": 5, "pin_prompt": 1,
}
B = 12
INPUTS = drawn(4, 24, 2, (2, 2))


def small(name: str, inputs: Inputs = INPUTS) -> Policy:
    """Return a named policy with constants that suit 24 tokens."""
    chosen_names = constants_of(name) & SMALL.keys() - {"block"} if name != "kvcrush" else {"W", "kernel", "block"}
    small_ones = {key: SMALL[key] for key in chosen_names}
    return make_policy(name, model_constants(name, inputs) | small_ones)


@cache
def scores_of(name: str) -> Scores:
    policy = small(name)
    shown = replace(shown_to(policy.scorer.needs, observation(policy, INPUTS)), B=B)
    return policy.scorer(shown, policy.protection(INPUTS.n))


SELECTORS: Mapping[str, Any] = {
    "top_units": top_units, "top_tokens": top_tokens, "fill_units": fill_units, "recent_half": recent_half,
    "two_stages": partial(two_stages, share=Fraction(1, 2)),
    "ranges_first": partial(ranges_first, share=Fraction(1, 4), N_sink=2),
    "dissolve": small("crystalcache").selector, "blocks": in_blocks(snapkv(3), 3).selector,
    "crush": with_representatives(snapkv(3), 3).selector,
    "diverse": Diverse(resolve("numpy").require_diversity(), 0.5), "toward_mean": TowardMean(0.5),
}
BUDGETS: Mapping[str, Any] = {
    "even": even, "everything": everything, "adaptive": Adaptive(Fraction(1, 5)),
    "competition": Competition(Fraction(1, 5)), "pyramid": Pyramid(3, 4), "pyramid of 5": Pyramid(5, 4),
    "across_layers": across_layers, "above": Above(0.1), "preferred": Preferred(3),
    "full heads": FullHeads(np.arange(4.0), 5),
}
PROTECTIONS: tuple[Any, ...] = (
    SinkAndRecent(0, 0), SinkAndRecent(2, 3), SinkAndRecent(0, 3), SinkAndRecent(2, 0),
    ProtectedPositions(SinkAndRecent(2, 3), (9,)),
)
CADENCES = (Cadence(), Cadence(every=16))


def combinations() -> Iterator[tuple[str, Policy | SpecError]]:
    """Yield each combination of a scorer with the other parts: the policy, or the error from building the policy."""
    for name in (*POLICIES, "diverse-snapkv", "diverse-tova", "diverse-triattention"):
        host = small(name)
        for budgets, selector, protection, cadence in product(
            BUDGETS.values(), SELECTORS.values(), PROTECTIONS, CADENCES
        ):
            try:
                yield name, replace(
                    host, name="mixed", budgets=budgets, selector=selector, protection=protection, cadence=cadence
                )
            except SpecError as error:
                yield name, error


def check_count(policy: Policy, kept: np.ndarray[Any, Any], n: int) -> None:
    """Check the numbers of kept tokens against the declarations of the budgets and the selector."""
    budgets, selector = required_by(policy.budgets), required_by(policy.selector)
    assert budgets is not None
    assert selector is not None
    groups = len(kept)
    if budgets.shares == "everything":
        assert (kept == n).all()
    elif budgets.exact and selector.exact:
        whole = policy.selector in (top_units,) and "chunks" in _units(policy)
        assert kept.sum() <= B * groups if whole else kept.sum() == B * groups
    elif selector.exact:
        assert (kept <= B).all()


def _units(policy: Policy) -> set[str]:
    return {policy.scorer.provided.units}  # type: ignore[attr-defined]


@pytest.mark.spec("PO-COMPOSE")
def test_every_combination_is_refused_when_it_is_built_or_keeps_what_its_parts_declare() -> None:
    accepted = 0
    for name, policy in combinations():
        if isinstance(policy, SpecError):
            continue
        accepted += 1
        scores, protected = scores_of(name), policy.protection(INPUTS.n)
        try:
            selection = chosen(policy, B, scores, protected)
        except SpecError as error:
            raise AssertionError(f"{name}, {policy.budgets}, {policy.selector}: {error}") from error
        sizes = np.diff(selection.offsets)
        assert _units(policy) != {"tokens"} or not np.isnan(scores.values[:, ~protected]).any(), name
        held = np.flatnonzero(protected)
        kept = np.split(selection.positions, selection.offsets[1:-1])
        assert all(np.isin(held, part).all() for part in kept)
        check_count(policy, sizes, INPUTS.n)
    assert accepted > 1000


@pytest.mark.spec("PO-COMPOSE")
@pytest.mark.parametrize(("change", "argument", "way_out"), [
    ({"cadence": Cadence(every=16)}, "cadence", "QueryCache(3, score)"),
    ({"protection": SinkAndRecent(4, 0)}, "protection", "SinkAndRecent(0, 3)"),
    ({"granularity": Granularity.LAYER}, "granularity", "layer and KV head"),
    ({"budgets": Preferred(3)}, "budgets", "Pyramid"),
    ({"budgets": Pyramid(5, 4)}, "budgets", "use the window 3"),
    ({"budgets": Pyramid(2, 4)}, "budgets", "use the window 3"),
    ({"selector": SELECTORS["two_stages"]}, "selector", "use top_units"),
    ({"selector": SELECTORS["diverse"]}, "selector", "diverse(host)"),
    ({"selector": fill_units}, "selector", "use top_units"),
    ({"selector": 3}, "selector", "must be callable"), ({"scorer": even}, "scorer", "needs"),
    ({"cadence": 16}, "cadence", "Cadence(every=64)"), ({"granularity": "head"}, "granularity", "Granularity.MODEL"),
    ({"protection": np.ones}, "protection", "SinkAndRecent(sink, recent)"), ({"least": -1}, "least", "at least 0"),
])
def test_a_part_that_does_not_fit_is_named_with_one_that_does(
    change: dict[str, Any], argument: str, way_out: str,
) -> None:
    with pytest.raises(SpecError) as refused:
        replace(small("snapkv"), **change)
    assert refused.value.argument == argument
    assert way_out in str(refused.value)


@pytest.mark.spec("PO-COMPOSE")
@pytest.mark.parametrize(("name", "change", "argument"), [
    ("tova", {"budgets": Adaptive(0)}, "budgets"), ("tova", {"budgets": across_layers, "cadence": Cadence()}, None),
    ("adakv", {"scorer": small("morphkv").scorer, "cadence": Cadence(every=1)}, "cadence"),
    ("h2o-described", {"cadence": Cadence(every=1)}, "cadence"), ("kvzip", {"cadence": Cadence(every=1)}, "cadence"),
    ("streamingllm", {"budgets": across_layers}, "budgets"), ("chunkkv", {"budgets": Adaptive(0)}, "budgets"),
    ("vase", {"selector": top_units}, "selector"), ("criticalkv", {"selector": top_units}, "selector"),
    ("crystalcache", {"selector": recent_half}, "selector"), ("keydiff", {"cadence": Cadence(every=64)}, None),
])
def test_no_part_is_ignored_in_silence(name: str, change: dict[str, Any], argument: str | None) -> None:
    host = small(name)
    if argument is None:
        assert replace(host, **change) != host
        return
    with pytest.raises(SpecError) as refused:
        replace(host, **change)
    assert refused.value.argument == argument


@pytest.mark.spec("PO-COMPOSE", "PO-STEP")
def test_every_accepted_cadence_evicts_in_decode_steps() -> None:
    """Build each scorer with each selector, each protection and a cadence. Accepted policies keep B tokens."""
    inputs, accepted = replace(INPUTS, steps=6), 0
    for name in (*POLICIES, "diverse-knorm", "diverse-rkv"):
        host = small(name)
        for selector, protection in product(SELECTORS.values(), PROTECTIONS[:4]):
            try:
                policy = replace(
                    host, name="mixed", budgets=even, selector=selector, protection=protection,
                    cadence=Cadence(every=3),
                )
            except SpecError:
                continue
            accepted += 1
            kept = decided(policy, inputs, B)
            exact = required_by(policy.selector)
            assert exact is not None
            assert not exact.exact or {len(positions) for positions in kept} == {B}, name
    assert accepted > 50


@pytest.mark.spec("PO-COMPOSE")
@pytest.mark.parametrize("name", [name for name in NAMES if promises_of(name) != NOTHING_PROMISED])
def test_promises_from_parts_are_those_of_the_table(name: str) -> None:
    """Compare promises that follow from the parts with the table of policies.md, which other tests check."""
    derived, table = promises_of_parts(small(name)), promises_of(name)
    assert derived.row_independence == table.row_independence == "yes"
    assert derived.no_op_at_full_budget == table.no_op_at_full_budget
    assert derived.budget_exact == table.budget_exact
    assert (derived.protection_holds, table.protection_holds) != ("yes", "no")
