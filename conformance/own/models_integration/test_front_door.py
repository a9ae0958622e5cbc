"""`import kvspec` and `kvspec policies`: light, typed, and true of what a session does."""

import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="the facade's names drive transformers models")

import numpy as np
import torch
from typer.testing import CliRunner

import kvspec
import reference
from conformance.own.models_integration.session.families import ENDS, at_once, build, greedy, prompt
from conformance.own.models_integration.session.ragged_checks import lengths
from conformance.own.models_integration.session.test_batches import batch
from conformance.own.models_integration.session.test_ragged_turns import published
from models_integration import RetentionPolicy
from models_integration.cli.app import app
from reference.policies.describe import describe_policy, list_policies
from reference.policies.names import POLICIES
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.parameters import TINY, NestedKVParameters
from spec.retention import Retention

pytestmark = pytest.mark.law("as-it-is-described")


def made(name: str, budget: float = 20) -> RetentionPolicy:
    if name == "crystalcache":
        return kvspec.CrystalCache(budget, ENDS, TINY, backend="numpy")
    return kvspec.FullCache() if name == "fullcache" else published(name, build("llama"), budget)


def test_every_name_is_there_and_none_loads_torch_before_it_is_used() -> None:
    assert all(getattr(kvspec, name) is not None for name in kvspec.__all__)
    assert sorted(kvspec.__all__) == dir(kvspec)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        kvspec.nothing  # noqa: B018
    code = "import sys, kvspec, reference; kvspec.list_policies(); reference.nestedkv; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reference_offers_its_modules() -> None:
    assert reference.crystalcache.prefill is not None
    assert reference.nestedkv.gap is not None
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'; it has .*crystalcache"):
        reference.nothing  # noqa: B018


@pytest.mark.parametrize("name", POLICIES)
def test_a_description_is_true_of_a_session(name: str) -> None:
    one, model = describe_policy(name), build("llama")
    assert one.keeps
    policy = made(name)
    decided = policy.on(model).policy
    with policy(model) as run, torch.no_grad():
        model(input_ids=prompt(64))
        assert run.cache is not None
        after = lengths(decided, parse_budget(20), 3, run.cache.mean_length)
        for at in range(3):
            at_once(model, prompt(1, seed=at), run.cache)
        assert run.cache.mean_length == after[-1]
        assert one.decode_time or after[-1] == after[0] + 3
        if name == "fullcache" or one.later_turns:
            at_once(model, prompt(12, seed=9), run.cache)
        else:
            with pytest.raises(SpecError):
                at_once(model, prompt(12, seed=9), run.cache)
    ids, mask = batch([prompt(40), prompt(64)])
    with made(name)(model), torch.no_grad():
        if one.padded_batches:
            model(input_ids=ids, attention_mask=mask)
        else:
            with pytest.raises(SpecError):
                model(input_ids=ids, attention_mask=mask)
                at_once(model, torch.zeros(2, 1, dtype=torch.long), run.cache)


def test_constants_are_given_by_name_and_the_defaults_are_the_makers() -> None:
    model, kept = build("llama"), []
    for constants in ({}, {"beta": 0.0}, {"parameters": NestedKVParameters(beta=0.0)}):
        with kvspec.policy_from_name("nestedkv", 0.3, backend="numpy", **constants)(model) as run, torch.no_grad():
            model(input_ids=prompt(300))
        assert isinstance(run.retention, Retention)
        kept.append(run.retention.positions.tolist())
    assert kept[0] != kept[1] == kept[2]
    assert describe_policy("nestedkv").constants["beta"] == 3.0
    assert describe_policy("snapkv").constants == {"W": 32, "kernel": 7}
    assert describe_policy("kvzip").required == ("template",)
    assert describe_policy("diverse-snapkv").constants["diversity"] == 0.5
    with pytest.raises(SpecError, match=r"gamma = 1: nestedkv has the constants .*beta"):
        kvspec.policy_from_name("nestedkv", 0.3, gamma=1)


def test_the_command_lists_all_and_explains_one() -> None:
    listed = CliRunner().invoke(app, ["policies"]).stdout
    for one in list_policies():
        assert f"\n{one.name}: {one.keeps}\n" in "\n" + listed
    shown = CliRunner().invoke(app, ["policies", "kvzip"]).stdout
    template, sinks = "template (required): token ids", "N_sink = 4: number of first"
    for words in ("arXiv 2505.23416", "the prompt twice", "evicts from later turns: no", template, sinks):
        assert words in shown
    refused = CliRunner().invoke(app, ["policies", "snapkvv"])
    assert "did you mean snapkv" in str(refused.exception)


def test_the_attributes_of_a_session_are_documented_and_agree_with_what_it_prints() -> None:
    model = build("llama")
    with kvspec.policy_from_name("snapkv", 0.5, W=4)(model) as run:
        greedy(model, prompt(40), 6)
    said = (kvspec.Session.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    documented = set(re.findall(r"^        (\w+): ", said, re.MULTILINE))
    public = {name for name in (*vars(run), *vars(kvspec.Session)) if not name.startswith("_")}
    assert documented == public - {"prompt", "reading"}
    assert (run.seen, run.stored) == (40 + 5, 20 + 5)  # nothing has read the last generated token
    assert "seen=45, stored=25, " in repr(run)
    with pytest.raises(SpecError, match=r"kept sets': each layer and KV head has its own: type retention\.group\(i\)"):
        _ = run.kept


def test_a_policy_is_written_with_the_names_of_kvspec_and_every_constant_is_explained() -> None:
    needs, protection = kvspec.Needs("all"), kvspec.SinkAndRecent(1, 1)
    policy = kvspec.policy_from_score(lambda seen: np.zeros((6, seen.seen)), needs=needs, protection=protection)
    assert policy.protection(4).tolist() == [True, False, False, True]
    assert [(one.name, key) for one in list_policies() for key, said in one.meanings.items() if not said] == []
    assert describe_policy("pyramidkv").meanings["beta"] != describe_policy("nestedkv").meanings["beta"]
    shown = CliRunner().invoke(app, ["policies", "crystalcache"]).stdout
    assert "hebb = additive: Update of W at a breath" in shown
    assert "(additive, static)" in shown
    kept = [one.keeps for one in list_policies()]
    assert len(set(kept)) == len(kept)
