"""Tests of common spellings of names, and of likely mistakes in Python: the error contains the correct input."""

import re
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import kvspec
from conformance.paths import SPEC
from models_integration import NamedPolicy, RetainedCache
from models_integration.policies.methods import parse_policy
from reference.policies import snapkv
from reference.policies.describe import describe_policy
from reference.policies.names import LEFT_OUT, NAMES, check_name
from spec.errors import SpecError
from tests.models_integration.session.families import build, prompt

WORDS = {"<unk>": 0, "word": 1, ".": 2, "\n": 3, " ": 4}


def tokenizer() -> Any:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(WORDS, unk_token="<unk>")), unk_token="<unk>",
    )


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("written", "name"), [
    ("SnapKV", "snapkv"), ("AdaKV", "adakv"), ("ada-kv", "adakv"), ("Ada_KV", "adakv"), ("r-kv", "rkv"),
    ("R-KV", "rkv"), ("full", "fullcache"), ("Full Cache", "fullcache"), ("1d", "triattention"),
    ("1d_div", "diverse-triattention"), ("H2O", "h2o"), ("Streaming-LLM", "streamingllm"), ("SnapKVPress", "snapkv"),
    ("Expected_Attention", "expected-attention"), ("NestedKV", "nestedkv"), ("CrystalCache", "crystalcache"),
    *((name, name) for name in NAMES),
])
def test_names_are_those_that_people_write(written: str, name: str) -> None:
    assert check_name(written) == name
    assert describe_policy(written).name == name


@pytest.mark.law("as-it-is-described")
def test_a_policy_by_another_spelling_is_the_policy() -> None:
    policy = kvspec.policy_from_name("SnapKV", 0.3, window=16)
    assert isinstance(policy, NamedPolicy)
    assert (policy.name, policy.constants["W"]) == ("snapkv", 16)
    assert parse_policy("Snap-KV(window=16)") == ("snapkv", {"W": 16})
    assert isinstance(kvspec.policy_from_name("full"), kvspec.FullCache)
    with pytest.raises(SpecError, match=r"W = 8: is the constant W, which is also given"):
        kvspec.policy_from_name("snapkv", 0.3, window=16, W=8)
    own = kvspec.policy_from_name("curdkv", 0.3, window=7)
    assert isinstance(own, NamedPolicy)
    assert own.constants["window"] == 7


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_method_that_is_left_out_has_its_reason(name: str) -> None:
    page = (SPEC / "policies.md").read_text(encoding="utf-8")
    section = page.split("## What is not specified")[1].split("\n## ")[0]
    assert name in section.lower()
    for written in (name, name.upper()):
        with pytest.raises(SpecError, match=re.escape(LEFT_OUT[name])):
            kvspec.policy_from_name(written, 0.3)


@pytest.mark.law("refused-before-anything-changes")
def test_suggestions_are_similar_names() -> None:
    with pytest.raises(SpecError) as caught:
        kvspec.policy_from_name("random", 0.3)
    assert "knorm" not in str(caught.value)
    with pytest.raises(SpecError, match="did you mean snapkv"):
        kvspec.policy_from_name("snapkw", 0.3)


def slips() -> dict[str, tuple[Any, str]]:
    """Return calls with mistakes and the words of their errors, by name."""
    model: Any = build("llama")
    policy: Any = kvspec.StreamingLLM(0.5)
    call: Any = kvspec
    observed = kvspec.observe(model, prompt(20))
    decision = kvspec.decide(policy, observed)

    def entered() -> None:
        with policy:
            pass

    def generating(given: Any) -> Any:
        def run() -> None:
            with policy(model):
                model.generate(given, max_new_tokens=2)

        return run

    return {
        "no model": (entered, r"type `with policy\(model\) as run:`"),
        "budget first": (lambda: call.policy_from_name(0.3, "snapkv"), r"name = 0.3: must be text; the name comes"),
        "a Policy": (lambda: call.policy_from_name(snapkv(), 0.3), r"type kvspec.CustomPolicy\(policy, 0.3\)"),
        "decide, swapped": (lambda: call.decide(observed, policy), r"type kvspec.decide\(policy, observed\)"),
        "decide, no prompt": (lambda: call.decide(policy.on(model), model), r"type kvspec.decide\(policy, observed\)"),
        "decide, no budget": (lambda: call.decide(snapkv(), observed), r"type kvspec.CustomPolicy\(policy, 0.3\)"),
        "compact, swapped": (lambda: call.compact(decision, observed.cache), r"type kvspec.compact\(observed.cache"),
        "observe, swapped": (lambda: call.observe(prompt(20), model), "model = 'Tensor': must be a transformers"),
        "observe, text": (lambda: call.observe(model, "text"), r"input_ids = 'text': .*return_tensors"),
        "prefill, swapped": (lambda: call.prefill(policy, model, prompt(9)), r"type kvspec.prefill\(model, "),
        "save, swapped": (lambda: call.save_cache("f", observed.cache, model), r"type kvspec.save_cache\(run.cache, "),
        "save, no prompt": (lambda: call.save_cache(None, model, "f"), "cache = None: is empty before a prompt"),
        "load, swapped": (lambda: call.load_cache(model, "f"), r"type kvspec.load_cache\(path, model\)"),
        **{f"a tokenizer as ends, by {way}": (partial(make, sentence_ends=tokenizer()), (
            r"^sentence_ends = .*Tokenizer.*: must be a set of token ids; .*sentence_ends\(tokenizer\) makes the set$"
        )) for way, make in {
            "class": partial(call.CrystalCache, 0.5), "name": partial(call.policy_from_name, "crystalcache", 0.5),
        }.items()},
        "generate text": (generating("text"), r"inputs = 'text': .*model.generate\(\*\*tokenizer\(text, return_ten"),
        "generate a dict": (generating({"input_ids": prompt(9)}), r"inputs = 'dict': .*model.generate\(\*\*"),
        "generate a list": (generating([1, 2, 3]), r"inputs = 'list': .*model.generate\(\*\*"),
    }


@pytest.mark.law("refused-before-anything-changes")
def test_likely_slips_say_what_to_type() -> None:
    for name, (call, words) in slips().items():
        with pytest.raises(SpecError, match=words):
            call()
            pytest.fail(name)


@pytest.mark.law("decided-as-the-reference")
def test_decide_takes_a_policy_as_people_hold_it() -> None:
    model: Any = build("llama")
    observed = kvspec.observe(model, prompt(40))
    for name in ("snapkv", "criticalkv"):
        policy = kvspec.policy_from_name(name, 0.5, W=8)
        direct, prepared = (kvspec.decide(one, observed) for one in (policy, policy.on(model)))
        for ours, theirs in zip(direct.retentions, prepared.retentions, strict=True):
            assert ours.positions.tolist() == theirs.positions.tolist()


@pytest.mark.law("as-it-is-described")
def test_the_documented_call_of_save_cache_has_types() -> None:
    """`run.cache` is None before a prompt, so save_cache must accept its type."""
    assert get_type_hints(kvspec.save_cache)["cache"] == RetainedCache | None


@pytest.mark.law("decided-as-the-reference")
def test_one_tokenizer_serves_every_policy() -> None:
    model: Any = build("llama")
    ends, template = kvspec.sentence_ends(tokenizer()), kvspec.repeat_template(tokenizer())
    for name, constants in (("crystalcache", {"sentence_ends": ends}), ("kvzip", {"template": template}), ("h2o", {})):
        kept = []
        for given in ({"tokenizer": tokenizer()}, constants):
            with kvspec.policy_from_name(name, 0.5, **given)(model) as run, torch.no_grad():
                model(input_ids=prompt(40))
            kept.append([one.positions.tolist() for one in run.retentions])
        assert kept[0] == kept[1]
    seven = frozenset({7})
    policy: Any = kvspec.policy_from_name("crystalcache", 0.5, tokenizer=tokenizer(), sentence_ends=seven)
    assert policy.on(model).sentence_ends == seven


@pytest.mark.law("refused-before-anything-changes")
def test_a_session_of_a_missing_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"sentence_ends = None: .*tokenizer="):
        kvspec.policy_from_name("crystalcache", 0.5)
    with pytest.raises(SpecError, match=r"template = None: .*tokenizer="):
        kvspec.policy_from_name("kvzip", 0.5)
