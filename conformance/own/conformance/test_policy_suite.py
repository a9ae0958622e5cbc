"""The suite of policies: true promises hold, each false one dies by its column with a small input."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from conformance.checks.promises import FAR, PROPERTIES
from conformance.own.conformance.test_plugin import run
from conformance.policy_suite import test_promises
from conformance.strategies.policy_inputs import drawn
from reference.policies import knorm, policy_from_score, snapkv, with_adaptive_budgets
from reference.policies.budgets import even
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import top_units
from spec.errors import SpecError
from spec.policy import NOTHING_PROMISED, Needs, Observation, Policy, Promises
from spec.retention import Granularity

pytestmark = [
    pytest.mark.spec("PO-RETAIN"), pytest.mark.law("the-proof-has-teeth"), pytest.mark.usefixtures("reference_items"),
]

Array = np.ndarray[Any, Any]
ALL = Promises(*["yes"] * len(PROPERTIES))  # type: ignore[arg-type]


def value_norm(seen: Observation) -> Array:
    return np.concatenate([np.linalg.norm(np.asarray(view.v), axis=2) for view in seen.layers.values()])


def rarest(seen: Observation) -> Array:
    """Of the layer before the last one, and the ids; one row."""
    (view,) = seen.layers.values()
    assert seen.token_ids is not None
    norms: Array = np.linalg.norm(view.k, axis=2).sum(axis=0, keepdims=True)
    return norms / np.bincount(seen.token_ids)[seen.token_ids]


MINE = policy_from_score(value_norm, needs=Needs("all", values=True), protection=SinkAndRecent(1, 2))
TRUE = {
    "head": MINE, "snapkv": snapkv(), "pure positions": policy_from_score(
        lambda seen: -np.arange(float(seen.seen))[None], needs=Needs(), granularity=Granularity.MODEL
    ),
    "one layer": policy_from_score(
        rarest, needs=Needs("observed", observed=-2, token_ids=True), granularity=Granularity.MODEL
    ),
}


def judge(column: str, policy: Policy) -> None:
    test_promises.test_a_promise_holds(column, lambda inputs: policy)


@pytest.fixture
def sparing() -> Iterator[None]:
    """Few examples: that nothing true is accused shows in any of them."""
    before = settings.default
    settings.load_profile("few")
    yield
    settings.register_profile("before", before)
    settings.load_profile("before")


@pytest.mark.usefixtures("sparing")
@pytest.mark.parametrize("name", TRUE)
@pytest.mark.parametrize("column", PROPERTIES)
def test_a_true_promise_holds(name: str, column: str) -> None:
    judge(column, replace(TRUE[name], promises=ALL))


def scored(change: Any) -> Policy:
    return policy_from_score(lambda seen: change(seen, value_norm(seen)))


def false_promises() -> Iterator[tuple[str, Policy]]:
    """A policy that breaks each column."""
    turns = cycle((1, 1, -1, 1))  # the other sequence comes second, and a last call says what was kept

    def blind(scores: Any, budgets: Any, protected: Any, /) -> Any:
        return top_units(replace(scores, values=np.nan_to_num(scores.values)), budgets, protected & False)

    def worst(scores: Any, budgets: Any, protected: Any, /) -> Any:
        return top_units(replace(scores, values=-scores.values), budgets, protected)

    def fewer(total: int, scores: Any, /) -> Any:
        return even(total, scores) - 1

    def by_head(seen: Observation, found: Array) -> Array:
        return found * np.where(np.arange(len(found)) % 2, 1, -1)[:, None]

    def by_group(seen: Observation, found: Array) -> Array:
        view = seen.layers[0]
        return found if len(view.q) == len(view.k) else -found

    def moved(total: int, scores: Any, /) -> Any:
        shares = even(total, scores)
        if len(shares) > 1 and np.nanmin(scores.values) > FAR and 0 < shares[0] < scores.values.shape[1]:
            shares[:2] += [1, -1]
        return shares

    def far(seen: Observation, found: Array) -> Array:
        view = seen.layers[0]
        return found + 2 * FAR * (len(view.q) > len(view.k))

    yield "budget exact", replace(MINE, budgets=fewer, protection=SinkAndRecent(0, 0))
    yield "protection holds", replace(MINE, selector=blind)
    yield "no-op at full budget", replace(MINE, budgets=fewer, protection=SinkAndRecent(0, 0))
    yield "higher score never loses", replace(MINE, selector=worst)
    yield "row independence", scored(lambda seen, found: next(turns) * found)
    yield "head permutation", scored(by_head)
    yield "GQA", scored(by_group)
    yield "GQA", replace(scored(far), budgets=moved)


@pytest.mark.parametrize(("column", "policy"), list(false_promises()))
def test_a_false_promise_dies_by_its_column_with_a_small_input(column: str, policy: Policy) -> None:
    with pytest.raises(AssertionError, match=rf"^{column}: not so with \d tokens, B = \d, layers x KV") as died:
        judge(column, replace(policy, promises=ALL))
    layers, heads = re.findall(r"= (\d) x (\d)", str(died.value))[0]
    assert int(layers) * int(heads) <= 3


@pytest.mark.parametrize("largest", [1.0, 2.0**20, 2.0**-30])
@pytest.mark.parametrize(("units", "holds"), [(64, True), (65, False)])
def test_repeated_query_heads_exchange_tokens_of_one_score_up_to_rounding(
    largest: float, units: int, holds: bool,
) -> None:
    """Two scores are so many units in the last place apart, and change places when heads are repeated."""
    def near(seen: Observation) -> Array:
        (view,) = seen.layers.values()
        apart = units * np.finfo(np.float64).eps * largest
        found = np.full((1, seen.seen), largest - 2 * apart)
        found[0, :2] = (largest, largest - apart)[:: 1 if len(view.q) == len(view.k) else -1]
        return found

    case = test_promises.Own(lambda inputs: policy_from_score(near))
    assert PROPERTIES["GQA"].holds(case, drawn(1, 5, 1, (1, 1)), 1, 0) == holds


@pytest.mark.parametrize("column", PROPERTIES)
def test_what_is_not_promised_is_said(column: str) -> None:
    """Hypothesis adds the example to what is matched."""
    with pytest.raises(pytest.skip.Exception, match=rf"^{column}: not promised(\n|$)"):
        judge(column, knorm())
    with pytest.raises(pytest.skip.Exception, match=rf"^{column}: N/A(\n|$)"):
        judge(column, replace(knorm(), promises=Promises(*["N/A"] * len(PROPERTIES))))  # type: ignore[arg-type]


def test_to_protect_nothing_is_no_protection_that_holds() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"^protection holds: N/A, for no token is protected(\n|$)"):
        judge("protection holds", replace(knorm(), promises=ALL))


def test_a_policy_that_fails_otherwise_does_not_pass() -> None:
    with pytest.raises(SpecError, match="needs do not ask"):
        judge("GQA", replace(policy_from_score(value_norm, needs=Needs("all")), promises=ALL))


def test_a_promise_is_of_one_composition() -> None:
    assert MINE.promises.higher_score_never_loses == "yes"
    assert with_adaptive_budgets(MINE).promises == NOTHING_PROMISED
    with pytest.raises(SpecError, match="gqa = 'perhaps': must be one of yes, no, N/A"):
        Promises(gqa="perhaps")  # type: ignore[arg-type]


def test_the_suite_runs_from_outside_the_tree(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from conformance.own.conformance.test_policy_suite import MINE\n", "utf-8")
    suite = ["--pyargs", "conformance.policy_suite"]
    result = run(tmp_path, *suite, "--kvspec-policy", "mine:MINE")
    assert "4 passed, 3 skipped" in result.stdout, result.stdout
    assert "GQA: not promised" in result.stdout
    assert "no tests ran" in run(tmp_path, *suite).stdout
