"""Tests of compositions against oracles of their parts: kept sets of random accepted texts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from conformance.methods.method import METHODS, Method, method_of
from conformance.oracles.choices import fits
from conformance.plugin import fewer_examples
from conformance.strategies.policy_inputs import Inputs, Kept, altered, decided, drawn
from reference.policies.grammar import parse_composition
from reference.policies.names import check_name
from spec.errors import SpecError
from spec.policy import Policy
from tests.conformance.random_texts import HOSTS, TABLE, accepted, any_text, policy_texts

pytestmark = pytest.mark.spec("PO-COMPOSE")

N, STEPS, SEED = 24, 7, 62


@pytest.fixture(scope="module", params=[len(HOSTS), pytest.param(300, marks=pytest.mark.nightly)])
def texts(request: pytest.FixtureRequest) -> list[str]:
    """Return random texts: one for each scorer, or 300 at night."""
    return list(islice(policy_texts(SEED), request.param))


def cases(texts: list[str]) -> Iterator[tuple[Method, Policy, Inputs, int]]:
    """Yield each text with inputs and a budget."""
    yield from map(case, count(), texts)


def case(at: int, text: str) -> tuple[Method, Policy, Inputs, int]:
    """Return a text with inputs and a budget. A third of the inputs has equal scores."""
    method = method_of(text)
    layers = 3 if TABLE in text else 1 + at % 3
    inputs = drawn(at, N, layers, (1 + at // 3 % 2, 1 + at // 2 % 2))
    # Rounding decides equal scores of TA-RANKING, and equal sums of blocks.
    tying = at % 3 == 0 and "triattention" not in method.home and not _in_blocks(method.name)
    inputs = altered(inputs, "axes" if tying else "normal", at)
    inputs = replace(inputs, steps=STEPS if method.decodes else 0)
    policy = method.reference(inputs)
    least = max(1, policy.floor, int(policy.protection(N).sum()))
    return method, policy, inputs, least + at * 7 % (N - least + 1)


def _in_blocks(text: str) -> bool:
    return bool({"block", "crush", "chunks"} & parse_composition(text).parts.keys())


def kept(policy: Policy, inputs: Inputs, B: int) -> Any:
    """Return the kept sets, or None if a score is below 0 and a part multiplies scores by norms."""
    try:
        return decided(policy, inputs, B)
    except SpecError as error:
        if error.argument == "host" and "must have scores of at least 0" in error.bound:
            return None
        raise


def check_oracle(method: Method, inputs: Inputs, B: int, actual: Kept) -> None:
    """Check kept sets against the oracle of parts."""
    wanted = method.brute.kept(inputs, B, **method.constants, **method.readings)
    assert len(actual) == len(wanted), str(method)
    for g, pair in enumerate(zip(actual, wanted, strict=True)):
        assert fits(*pair), f"{method}, B = {B}, set {g}: {pair[0]} instead of {pair[1]}"


def test_kept_sets_of_accepted_texts_are_those_of_the_oracle_of_parts(texts: list[str]) -> None:
    compared = 0
    for method, policy, inputs, B in cases(texts):
        if (actual := kept(policy, inputs, B)) is not None:
            check_oracle(method, inputs, B, actual)
            compared += 1
    assert compared > 0.8 * len(texts)


@fewer_examples
@given(seed=st.integers(0, 2**32 - 1), at=st.integers(0, 99))
def test_a_drawn_text_has_its_budget_and_its_protected_tokens(seed: int, at: int) -> None:
    method, policy, inputs, B = case(at, next(policy_texts(seed)))
    if (actual := kept(policy, inputs, B)) is None:
        return
    check_oracle(method, inputs, B, actual)
    if policy.promises.budget_exact == "yes" and not inputs.steps:
        assert sum(map(len, actual)) == B * len(actual), str(method)
    held = set(np.flatnonzero(policy.protection(N)).tolist())
    assert all(held <= set(positions) for positions in actual), str(method)


def test_a_full_budget_keeps_all_tokens(texts: list[str]) -> None:
    """Check that a budget of all tokens keeps all tokens, except for policies with a threshold."""
    for method, policy, inputs, _ in cases(texts):
        composed = parse_composition(method.name).parts
        if "threshold" not in composed and (actual := kept(policy, inputs, N)) is not None:
            assert actual == [list(range(N))] * len(actual), str(method)


@given(seed=st.integers(0, 2**32 - 1))
def test_any_text_makes_a_policy_or_is_refused(seed: int) -> None:
    accepted(any_text(Random(seed)), drawn(4, N, 2, (2, 2)))  # an exception other than SpecError is not caught


@pytest.mark.parametrize("text", [
    "snapkv(W=16)", "SnapKV:W=5/layers=pyramid:beta=4", "score=nestedkv:N_sink=2/heads=adaptive", "rkv:every=3/sink=2",
    "adakv:pooling=average:W=4/layers=pyramid", "kvcrush:share=1of3/sink=2", "h2o/values=2", "rkv:every=5/recent=9",
])
def test_a_method_from_text_is_its_text(text: str) -> None:
    method = method_of(text)
    again = method_of(str(method))
    assert str(again) == str(method)
    assert (again.constants, again.readings) == (method.constants, method.readings)
    assert again.name == method.name


@pytest.mark.parametrize(("text", "shown"), [
    ("snapkv:x=3/sink=2", "not a constant or reading of snapkv"), ("snapkv:W=x/sink=2", "wrong type"),
    ("snapkv/every=3/heads=adaptive", "the part /every=3"), ("nothing/sink=2", "nothing"),
    ("adakv:pooling=middle/layers=pyramid", "max, average"),
])
def test_a_wrong_text_is_refused_before_any_test(text: str, shown: str) -> None:
    with pytest.raises(SpecError, match=shown):
        method_of(text)


def test_verify_compares_a_policy_with_a_text(tmp_path: Path) -> None:
    pyramid = "snapkv:W=3/layers=pyramid:beta=4"
    wrong = kvspec.verify(policy=f"{pyramid}/heads=quota", method=f"{pyramid}/heads=adaptive", quick=True,
                          fail_fast=True, out=str(tmp_path / "wrong"))
    assert (wrong.passed, wrong.failing) == (False, ("PO-COMPOSE",))
    with pytest.raises(SpecError, match="is not a method that an engine offers"):
        kvspec.verify(command="cat", method=pyramid, out=str(tmp_path / "engine"))


@pytest.mark.nightly
def test_verify_accepts_a_policy_with_the_parts_of_a_text_in_a_different_order(tmp_path: Path) -> None:
    right = kvspec.verify(
        policy="snapkv:W=3/heads=adaptive/layers=pyramid:beta=4",
        method="snapkv:W=3/layers=pyramid:beta=4/heads=adaptive", quick=True, out=str(tmp_path / "right"),
    )
    assert (right.passed, right.failing) == (True, ())


@pytest.mark.parametrize(("text", "plain"), [
    ("snapkv:W=3/diverse=0/every=4", "snapkv:W=3/every=4"), ("adakv:W=3/block=1/sink=2", "adakv:W=3/sink=2"),
    ("snapkv:W=3/heads=adaptive:safeguard=1/sink=1", "snapkv:W=3/sink=1"), ("cake:W=3/every=none/floor=3", "cake:W=3"),
    ("keydiff/recent=3/diverse=0:rule=variant_b", "keydiff/recent=3"), ("h2o/block=1/every=2", "h2o/every=2"),
    ("snapkv:W=3/layers=pyramid:beta=1/select=top/sink=1", "snapkv:W=3/sink=1"),
])
def test_a_part_without_effect_keeps_the_same_tokens(text: str, plain: str) -> None:
    one, other = method_of(text), method_of(plain)
    for seed in range(4):
        inputs = replace(drawn(seed, N, 2, (2, 2)), steps=STEPS if one.decodes else 0)
        assert decided(one.reference(inputs), inputs, 9) == decided(other.reference(inputs), inputs, 9)


@pytest.mark.parametrize("text", [
    "snapkv:W=3/heads=adaptive:safeguard=0.5/block=24", "keydiff/recent=2/layers=pyramid/block=24",
])
def test_one_block_is_the_whole_prompt(text: str) -> None:
    inputs = drawn(5, N, 2, (2, 2))
    policy = method_of(text).reference(inputs)
    assert decided(policy, inputs, 1) == [list(range(N))] * 4
    assert decided(policy, replace(inputs, layers=[replace(x, q=x.q[:, :23], k=x.k[:, :23], v=np.asarray(x.v)[:, :23])
                                                   for x in inputs.layers]), 23) == [list(range(23))] * 4


def test_each_scorer_of_a_text_has_an_oracle() -> None:
    """Check that only these policies have no oracle of parts: they have no parts, or score and select in one step."""
    without = {name for name in METHODS if name not in HOSTS}
    assert without == {"crystalcache", "kvzip-heads", "simlayerkv", "vase"}
    for name in without:
        with pytest.raises(SpecError, match="changes parts of"):
            method_of(f"{name}/sink=3")
    assert method_of(check_name("SnapKV:W=16")).name == "snapkv"
