"""Policies with a scorer for the prompt and a scorer for decode steps and later segments."""

from dataclasses import replace
from typing import Any

import pytest

from conformance.methods.method import method_of
from conformance.oracles.choices import fits
from conformance.strategies.policy_inputs import decided, drawn, of_model
from reference.policies import policy_from_text
from reference.policies.later import FirstAndLater, with_later_scores
from reference.policies.layers import is_layerwise
from reference.policies.names import make_policy
from reference.policies.parts import equal_parts
from reference.policies.rkv import QueryCache
from reference.policies.scorers import LayerScorer
from reference.policies.texts import text_of
from spec.errors import SpecError
from spec.policy import LayerView, Needs

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-LATER-SCORES")]

N, STEPS = 23, 8
TEXTS = (
    "snapkv:W=3/steps=keydiff/every=2", "knorm/steps=h2o", "keydiff/recent=3/steps=snapkv:W=3:kernel=1/every=3",
    "expected-attention:N_sink=1:N_future=5/steps=knorm/every=2:excess=2",
    "random-tokens/steps=rkv:W=2:kernel=1/recent=2/every=1",
    "h2o/steps=keydiff", "snapkv:W=2/steps=morphkv:W=2/values=1", "snapkv:W=2/steps=h2o/block=3",
    "snapkv:W=3/steps=keydiff/every=2/diverse=0.5:signature=head",
)


@pytest.mark.parametrize("text", TEXTS)
def test_kept_sets_are_those_of_the_oracle_of_parts(text: str) -> None:
    method = method_of(text)
    assert method.decodes
    for seed in range(3):
        inputs = replace(drawn(seed, N, 2, (2, 2)), steps=STEPS)
        policy = method.reference(inputs)
        wanted = method.brute.kept(inputs, 8, **method.constants, **method.readings)
        assert all(map(fits, decided(policy, inputs, 8), wanted)), seed
    data = of_model(text, inputs)
    assert equal_parts(policy_from_text(text_of(policy, data), data), policy)
    assert f"/steps={text.partition('/steps=')[2].partition('/')[0].partition(':')[0]}" in policy.name


@pytest.mark.parametrize("text", TEXTS[:4])
def test_the_prompt_is_that_of_the_first_policy(text: str) -> None:
    first = text.partition("/steps=")[0]
    inputs = drawn(5, N, 2, (2, 2))
    policy, host = (make_policy(name, of_model(first, inputs)) for name in (text, first))
    assert decided(policy, inputs, 9) == decided(host, inputs, 9)


@pytest.mark.parametrize(("text", "later"), [("knorm/steps=knorm/every=2", "knorm/every=2"), (
    "h2o/steps=h2o", "h2o"), ("snapkv:W=3/steps=snapkv:W=3/every=2", "snapkv:W=3/every=2")])
def test_one_scorer_twice_is_the_scorer_with_a_cadence(text: str, later: str) -> None:
    inputs = replace(drawn(6, N, 2, (2, 2)), steps=STEPS)
    assert decided(make_policy(text, {}), inputs, 9) == decided(make_policy(later, {}), inputs, 9)


def test_steps_need_what_both_scorers_need() -> None:
    policy = make_policy("snapkv:W=5/steps=keydiff/every=4", {})
    assert isinstance(policy.scorer, FirstAndLater)
    assert policy.scorer.needs.query_rows == 5
    assert make_policy("snapkv:W=5/steps=h2o", {}).scorer.needs.query_rows is None
    assert make_policy("snapkv:W=5/steps=h2o", {}).cadence.every == 1
    assert make_policy("snapkv:W=5/steps=h2o/every=7", {}).cadence.every == 7
    assert is_layerwise(policy)
    window = make_policy("keydiff/recent=8/steps=snapkv:W=8/every=4", {}).scorer
    assert isinstance(window, FirstAndLater)
    assert isinstance(window.later, QueryCache)


def test_each_scorer_sees_the_queries_that_it_needs() -> None:
    rows = list[int]()

    def score(view: LayerView) -> Any:
        rows.append(view.q.shape[1])
        return view.k[:, :, 0]

    h2o = make_policy("h2o", {})
    scorer = with_later_scores(LayerScorer(Needs("all", 3), score), h2o.scorer, "h2o")
    decided(replace(h2o, scorer=scorer), drawn(2, N, 2, (2, 2)), 9)
    assert rows == [3, 3]


@pytest.mark.parametrize(("text", "way_out"), [
    ("snapkv/steps=keydiff", "add every=64"), ("snapkv/steps=tova", "for each layer and KV head"),
    ("snapkv/steps=nothing", "the name of a scorer"), ("snapkv/steps=crystalcache", "the name of a scorer"),
    ("snapkv/steps=triattention", "the name of a scorer"), ("keydiff/steps=snapkv:W=8/every=4", "SinkAndRecent(0, 8)"),
    ("keydiff/steps=h2o-described/every=4", "scorer of h2o"), ("chunkkv/steps=h2o", "two scorers of single tokens"),
    ("snapkv/heads=adaptive/steps=h2o", "use even"), ("kvzip/steps=h2o", "read the prompt once"),
    ("snapkv/steps=keydiff:W=3/every=4", "not a constant"), ("snapkv/steps=keydiff/every=4/pieces=64", "leave pieces="),
])
def test_a_part_that_does_not_fit_is_refused_when_the_policy_is_made(text: str, way_out: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_policy(text, of_model(text, drawn(0, 9)))
    assert way_out in refused.value.bound
