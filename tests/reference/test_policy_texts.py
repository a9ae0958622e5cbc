"""Tests of the texts of policies: each named policy has a text, each text one meaning, and errors name the part."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import policies as oracle
from conformance.strategies.policy_inputs import decided, drawn, model_constants
from reference.policies import names
from reference.policies.budgets import Adaptive, Competition, LayersThenHeads, Pyramid, even
from reference.policies.describe import describe_parts, describe_policy, example_policy, list_policies
from reference.policies.grammar import Composition, format_value, parse_composition, parse_value
from reference.policies.names import NAMES, POLICIES, make_policy
from reference.policies.parts import equal_parts, split_transforms
from reference.policies.rkv import QueryCache
from reference.policies.scorers import LayerScorer
from reference.policies.texts import find_name, policy_from_text, text_of
from spec.errors import SpecError
from spec.policy import SEGMENT_END, Policy, Scores

pytestmark = pytest.mark.spec("PO-COMPOSE")

INPUTS = drawn(4, 40, 2, (2, 2))
SMALL: Mapping[str, Any] = {"W": 5, "kernel": 3, "c": 3, "lag": 4, "chunk": 9, "safeguard": Fraction(1, 3), "beta": 4}
BY_NAME = {"crystalcache", "kvzip-heads", "simlayerkv", "nestedkv-without-both", "diverse-nestedkv-without-both"}
"""Policies whose text is the name. Parts of the first three have no text. The others equal a different policy."""


@cache
def data(name: str) -> dict[str, Any]:
    return model_constants(name, INPUTS)


def with_data(name: str, **constants: Any) -> Policy:
    return make_policy(name, data(name) | constants)


def from_text(text: str, name: str) -> Policy:
    return policy_from_text(parse_composition(text), data(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_name_makes_the_record_of_the_name(name: str) -> None:
    policy = with_data(name)
    text = text_of(policy, data(name))
    again = from_text(text, name)
    for one in fields(Policy):
        assert equal_parts(getattr(again, one.name), getattr(policy, one.name)), one.name
    assert text_of(again, data(name)) == text
    assert (text.partition(":")[0] == name) == (name in BY_NAME)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_NAME])
def test_constants_of_a_name_are_in_its_text(name: str) -> None:
    options = {key: SMALL[key] for key in SMALL.keys() & POLICIES[name.removeprefix("diverse-")].constants}
    if "parameters" in POLICIES[name.removeprefix("diverse-")].constants:
        options = {"N_sink": 3, "alpha_s": Fraction(1, 3)} if name.endswith("nestedkv") else {}
    policy = with_data(name, **options)
    again = from_text(text_of(policy, data(name)), name)
    assert equal_parts(again, policy)
    assert decided(again, INPUTS, 40) == decided(policy, INPUTS, 40)
    if "snapkv" in name or "rkv" in name:
        assert decided(again, INPUTS, 9) == decided(policy, INPUTS, 9)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "h2o", "pyramidkv", "triattention", "vatp", "criticalkv"])
def test_blocks_of_a_name_are_in_its_text(name: str) -> None:
    policy = with_data(name, block=4)
    text = text_of(policy, data(name))
    assert text.endswith("/block=4")
    assert equal_parts(replace(from_text(text, name), promises=policy.promises), policy)


TEXTS = (
    "snapkv:W=5/layers=pyramid:beta=4/heads=adaptive:safeguard=0.2", "snapkv:W=5/every=4", "adakv:W=5/layers=pyramid",
    "snapkv:W=5/diverse=0.5:signature=head/every=4", "keydiff/sink=2/recent=4/every=8", "snapkv:W=5/threshold=0.01",
    "cake:W=5/heads=quota:safeguard=1of3", "snapkv:W=5/values=4/every=4", "score=snapkv:W=5/layers=global/block=4",
    "tova/every=none/sink=4", "snapkv:W=5/sink=4/floor=20", "knorm/crush=0.5:block=4/recent=4",
    "cake:W=5:gamma=3/layers=even", "nestedkv/sink=8",
    "expected-attention/heads=adaptive/layers=pyramid:beta=3", "vase:W=5/sink=4/every=16:excess=2",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_a_record_and_a_text_again(text: str) -> None:
    name = names.home_of(names.check_name(text))
    policy = from_text(text, name)
    assert policy.name not in NAMES
    assert text_of(policy, data(name)) == policy.name
    assert equal_parts(from_text(policy.name, name), policy)
    assert all(map(len, decided(policy, INPUTS, 24)))


@pytest.mark.parametrize(("text", "again"), [
    ("crystalcache:parameters=essay", "crystalcache:parameters=essay"),
    ("crystalcache:parameters=paper", "crystalcache"),
    ("crystalcache:alpha=2.0:parameters=essay", "crystalcache:parameters=essay:alpha=2.0"),
    ("crystalcache:breath_protection=sink-and-recent", "crystalcache:breath_protection=sink-and-recent"),
    ("nestedkv:w0=0.5_0.3_0.2", None),
])
def test_values_with_a_name_of_several_words_or_a_list_have_a_text(text: str, again: str | None) -> None:
    name = names.home_of(names.check_name(text))
    policy = from_text(text, name)
    written = text_of(policy, data(name))
    assert equal_parts(policy, with_data(name)) is (again == name)
    assert again in (None, written)
    assert equal_parts(from_text(written, name), policy)


def test_a_score_with_a_window_keeps_its_queries_between_decode_steps() -> None:
    policy = from_text("snapkv:W=5/every=4", "snapkv")
    assert isinstance(policy.scorer, QueryCache)
    assert policy.scorer.W == 5
    host = with_data("snapkv", W=5).scorer
    assert isinstance(host, LayerScorer)
    assert equal_parts(policy.scorer.score, host.score)


def shares(text: str, values: Any, H: int, B: int) -> list[int]:
    actual = policy_from_text(parse_composition(text)).budgets
    n = values.shape[1]
    return actual(B * len(values), Scores(values, np.arange(n + 1), heads=H)).tolist()


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(2, 14), st.integers(2, 12),
    st.integers(1, 5), st.sampled_from(["adaptive", "quota"]), st.fractions(0, 1, max_denominator=5),
)
def test_layers_then_heads_equals_the_rules_of_the_papers_one_after_the_other(
    seed: int, L: int, H: int, n: int, B: int, beta: int, rule: str, safeguard: Fraction,
) -> None:
    values = np.random.default_rng(seed).integers(0, 4, (L * H, n)).astype(float)
    values[:, -2:] = np.nan
    text = f"snapkv:W=2/layers=pyramid:beta={beta}/heads={rule}:safeguard={format_value(safeguard)}"
    rows = [[None if np.isnan(x) else x for x in row] for row in values]
    of_layers = oracle.pyramid_shares(Fraction(B), 2, L, n, beta)
    divide = oracle.adaptive_shares if rule == "adaptive" else oracle.competition_shares
    parts = [divide(rows[at * H : at * H + H], share, safeguard) for at, share in enumerate(of_layers)]
    assert shares(text, values, H, B) == [share for part in parts for share in part]


@pytest.mark.parametrize(("text", "part", "way_out"), [
    ("snapkv/layer=pyramid", "'layer'", "sink, recent, select, layers"),
    ("snapkv/layers=piramid", "/layers=piramid", "even, full, global, pyramid"),
    ("snapkv/layers=pyramid:gamma=2", "/layers=pyramid:gamma=2", "the constants are beta"),
    ("snapkv/layers=pyramid/every=64", "/every=64", "use even, or leave the cadence out"),
    ("snapkv/layers=full/heads=adaptive", "/layers=full", "leave out layers or heads"),
    ("h2o/layers=pyramid", "/layers=pyramid", "equal shares"), ("tova/heads=adaptive", "/heads=adaptive", "no effect"),
    ("snapkv/recent=8", "/recent=8", "SinkAndRecent(0, 32)"), ("snapkv/sets=layer", "/sets=layer", "KV head"),
    ("h2o-described/every=16", "/every=16", "scorer of h2o"), ("kvzip/every=16", "/every=16", "leave the cadence out"),
    ("snapkv/every=x", "/every=x", "a value such as 64"), ("snapkv/every=0", "/every=0", "at least 1"),
    ("snapkv/crush=0.25/every=8", "/crush=0.25", "end of segments"), ("snapkv/diverse=-1", "/diverse=-1", "negative"),
    ("chunkkv/block=4", "/block=4", "single tokens"), ("chunkkv/select=half", "/select=half", "leave the part out"),
    ("crystalcache/sink=8", "crystalcache accepts no parts", "N_sink"), ("snapkv/sink=-1", "/sink=-1", "at least 0"),
    ("snapkv/heads=adaptive:safeguard=2", "/heads=adaptive:safeguard=2", "[0, 1]"),
    ("knorm/steps=h2o:backend=numpy/every=64", "/steps=h2o:backend=numpy", "leave it out"),
    ("snapkv/threshold=high", "/threshold=high", "0.5"),
    ("snapkv/threshold=nan", "/threshold=nan", "no score is above NaN"),
    ("snapkv/layers=pyramid/threshold=1", "/layers=pyramid", "leave out one of the two parts"),
    ("snapkv/heads=adaptive/threshold=1", "/heads=adaptive", "leave out one of the two parts"),
    ("snapkv/diverse=0.5:diversity=0.9", "/diverse=0.5:diversity=0.9", "leave out diversity"),
    ("snapkv/block=4:block=8", "/block=4:block=8", "is also the value block=4"),
    ("rkv:every=3/every=4", "/every=4", "replaces every=3: leave out one of the two"),
    ("score=rkv:every=3/every=4", "/every=4", "replaces every=3: leave out one of the two"),
    ("knorm/steps=rkv:every=3/recent=8/every=4", "/every=4", "replaces every=3 of steps=rkv: leave out one of the two"),
    ("knorm/steps=curdkv:N_sink=3/every=4", "/steps=curdkv:N_sink=3", "does not use N_sink=3: leave N_sink out"),
    ("h2o-described:W=64/recent=32", "/recent=32", "replaces W=64: leave out one of the two"),
    ("streamingllm:N_sink=8/sink=4", "/sink=4", "replaces N_sink=8: leave out one of the two"),
    ("snapkv:kernel=3/steps=keydiff/every=4/threshold=2:x=1", "/threshold=2:x=1", "is not a constant with text"),
    ("adakv:safeguard=0.5/heads=even", "/heads=even", "replaces safeguard=0.5"),
    ("nestedkv:alpha_s=0.5/heads=even", "/heads=even", "replaces alpha_s=0.5"),
    ("nestedkv:alpha_s=0.5/threshold=1", "/threshold=1", "replaces alpha_s=0.5"),
    ("score=cake:tau1=0.5", "score = 'cake'", "leave tau1 out, or leave out 'score='"),
    ("score=simlayerkv:N_sink=2", "score = 'simlayerkv'", "leave N_sink out, or leave out 'score='"),
    ("cake:tau2=2/layers=pyramid", "/layers=pyramid", "replaces tau2=2"),
    ("cake:tau2=2/threshold=1", "/threshold=1", "replaces tau2=2"),
    ("score=nestedkv:alpha_s=0.5", "score = 'nestedkv'", "leave alpha_s out, or leave out 'score='"),
    ("score=nestedkv:alpha_s=0.5/heads=quota", "score = 'nestedkv'", "leave alpha_s out, or leave out 'score='"),
    ("pyramidkv:beta=3/layers=pyramid", "/layers=pyramid", "replaces beta=3"),
    ("pyramidkv:beta=3/threshold=1", "/threshold=1", "replaces beta=3"),
    ("kvcrush:share=0.5/crush=0.4", "/crush=0.4", "replaces share=0.5"),
    ("kvcrush:block=3/crush=0.4:block=4", "/crush=0.4:block=4", "replaces block=3"),
    ("diverse-snapkv:diversity=0.3/diverse=0.5", "/diverse=0.5", "replaces diversity=0.3"),
    ("knorm/recent=99999999", "/recent=99999999", "at most 16777216"),
    ("knorm/block=99999999", "/block=99999999", "at most 16777216"),
])
def test_an_error_names_the_part_and_what_to_type(text: str, part: str, way_out: str) -> None:
    name = names.home_of(names.check_name(text))
    with pytest.raises(SpecError) as refused:
        from_text(text, name)
    assert refused.value.argument == "policy"
    assert refused.value.value == text
    assert part in refused.value.bound
    assert way_out in refused.value.bound


@pytest.mark.parametrize(("text", "shown"), [
    ("snapkv/layers=pyramid,x=3", "','"), ("snapkv/layers=", "'layers='"), ("snapkv/=4", "'=4'"),
    ("snapkv/every=4/every=8", "'every' is given twice"), ("snapkv:W=4:W=8", "'W' in 'snapkv:W=4:W=8'"),
    ("crystalcache:parameters=esay", "must be 'paper' or 'essay'"), ("nestedkv:w0=high", "such as 0.4_0.4_0.2"),
    ("score=", "no name"), ("score=nothing", "nothing"), ("snapkv:V=3", "W, backend, kernel"), ("snapkv:W=x", "32"),
    ("snapkv:W=1_6", "32"), ("adakv:safeguard=1_000", "must be a value"),
    ("snapkv/every=8:", "''"), ("snapkv|every=8", "known names"),
])
def test_a_text_of_a_wrong_form_is_an_error(text: str, shown: str) -> None:
    with pytest.raises(SpecError) as refused:
        names.check_name(text)
    assert shown in str(refused.value)


def test_a_text_needs_no_quotes() -> None:
    text = TEXTS[0]
    assert shlex.split(f"kvspec compare --policies {text}")[-1] == text
    assert subprocess.run(["sh", "-c", f"printf %s {text}"], capture_output=True, text=True, check=True).stdout == text
    assert tomllib.loads(f'policy = "{text}"')["policy"] == text
    assert parse_qs(f"policy={text}")["policy"] == [text]
    assert json.loads(f'"{text}"') == text
    assert str(parse_composition(text)) == text


_words = st.from_regex(re.compile(r"[a-z][a-z0-9_.-]{0,6}"), fullmatch=True)
_constants = st.dictionaries(_words, _words, max_size=3)


@given(_words, st.booleans(), _constants, st.dictionaries(_words, st.tuples(_words, _constants), max_size=4))
def test_a_composition_is_its_text(name: str, scorer_only: bool, constants: Any, parts: Any) -> None:
    composition = Composition(name, scorer_only, constants, parts)
    assert parse_composition(str(composition)) == composition


@given(st.one_of(st.fractions(-9, 9, max_denominator=97), st.floats(allow_nan=False), st.integers(), st.booleans()))
def test_a_value_is_its_text(value: Any) -> None:
    actual = parse_value(format_value(value), value)
    assert actual == value
    assert type(actual) is type(value)


def test_a_constant_beside_a_text_is_not_replaced_by_a_part() -> None:
    with pytest.raises(SpecError, match="the part /every=4: every replaces every=3: leave out one of the two"):
        names.make_policy("rkv/every=4", {"every": 3})
    ((_, crush),) = split_transforms(names.make_policy("kvcrush:block=3/crush=0.4", {}))[1]
    assert (crush["block"], crush["share"]) == (3, Fraction(2, 5))
    assert names.make_policy("nestedkv:beta=2/layers=pyramid/heads=even", {}).budgets == Pyramid(4, 20)


def test_rules_are_joined_once() -> None:
    assert with_data("snapkv").budgets is even
    both = from_text("adakv:W=5/layers=pyramid", "adakv").budgets
    assert both == LayersThenHeads(Pyramid(5, 20), Adaptive(Fraction(1, 5)))
    assert from_text("adakv:W=5/heads=even", "adakv").budgets is even
    assert from_text("adakv:W=5/heads=quota", "adakv").budgets == Competition(Fraction(1, 5))


def test_a_policy_of_a_user_has_no_text() -> None:
    score = names.make_policy("knorm", {}).scorer
    changed = replace(with_data("knorm"), scorer=replace(score, score=lambda view: view.k[:, :, 0]))  # type: ignore[type-var]
    assert find_name(changed) is None
    with pytest.raises(SpecError, match="only scorers of named policies have a text"):
        text_of(changed)


@pytest.mark.parametrize("text", ["snapkv/layers=global", "keydiff/recent=4/every=8", "snapkv/diverse=0.5/every=4"])
def test_the_name_of_a_policy_is_found_among_policies_with_the_same_kind_of_scorer(
    text: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that one call creates few policies. Creating all 65 policies with all constants took 0.2 s."""
    policy, records = make_policy(text, {}), list[Policy]()
    find_name(policy)  # the kinds of the scorers of all names are computed once
    monkeypatch.setattr("spec.policy.check_parts", records.append)
    assert find_name(policy) is None
    assert 0 < len(records) <= 40


@pytest.mark.parametrize(("text", "shown"), [
    ("SnapKV:W=16/layers=pyramid/critical=0.5", {
        "name": "snapkv:W=16/layers=pyramid/critical=0.5", "model_constants": ("W_o",), "decode_time": False,
        "layer_by_layer": True, "constants": {"W": 16, "kernel": 7}, "later_turns": False,
    }),
    ("score=keydiff/every=8", {"decode_time": True, "padded_batches": True, "granularity": "layer and KV head"}),
    ("diverse-snapkv:diversity=0.3/recent=40", {"layer_by_layer": False}),
    ("kvzip/heads=quota", {"passes": 2, "padded_batches": False}),
])
def test_a_text_has_a_description(text: str, shown: Mapping[str, object]) -> None:
    one = describe_policy(text)
    assert {key: getattr(one, key) for key in shown} == shown
    assert "parts of" in one.keeps or "scorer of" in one.keeps
    assert describe_parts(text).startswith("score=")
    assert describe_parts(describe_parts(text)) == describe_parts(text)


@pytest.mark.parametrize("name", [one.name for one in list_policies() if one.decode_time])
def test_the_suffix_of_studies_is_refused_with_a_text_that_means_the_same(name: str) -> None:
    for written in (f"{name}@prompt", f"{name}/every=64@prompt"):
        with pytest.raises(SpecError, match=f"only in kvspec compare.*: type {name}/every=none") as caught:
            describe_policy(written)
        assert example_policy(caught.value.bound.rpartition(" ")[2]).cadence == SEGMENT_END


@pytest.mark.parametrize(("text", "shown"), [
    ("snapkv:W=16:positions=renumbered", {"W": 16, "positions": "renumbered"}),
    ('snapkv(positions="renumbered")', {"W": 32, "positions": "renumbered"}),
    ("crystalcache:decode=true", {"decode": True, "stream": False}), ("crystalcache", {"decode": False}),
    ("crystalcache(decode=true, stream=true)", {"decode": True, "stream": True, "breath_protection": "sink+recent"}),
])
def test_a_text_with_constants_of_a_session_has_a_description(text: str, shown: Mapping[str, object]) -> None:
    one = describe_policy(text)
    assert {key: one.constants[key] for key in shown} == shown
    assert all(one.meanings[key] for key in shown)
    assert one.decode_time is bool(one.constants.get("decode"))
    assert describe_parts(text) == describe_parts(one.name)


@pytest.mark.parametrize("text", [
    "snapkv:decode=true", "snapkv(decode=true)", "fullcache:positions=kept", 'snapkv(positions="near")',
    "crystalcache(stream=1)",
])
def test_wrong_constants_of_a_session_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"decode = True|positions = '(kept|near)'|stream = '1'"):
        describe_policy(text)
