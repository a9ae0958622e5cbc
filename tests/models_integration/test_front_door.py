"""Public names and arguments, slips that the error corrects, and the numbers that sessions and commands report."""

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvspec
import models_integration
import reference
from conformance.paths import SPEC
from experiments.studies.papers.injection_tables import CACHEBLEND
from experiments.studies.report import summary_tables
from kvspec.cli.app import app
from models_integration import (
    CrystalCache,
    NamedPolicy,
    RetainedCache,
    RetentionPolicy,
    StreamingLLM,
    policy_from_name,
    prefill,
)
from models_integration.pocket import load_pocket
from models_integration.policies.methods import CustomPolicy, parse_policy
from models_integration.policies.values import sentence_ends
from reference.policies import kvcrush, snapkv, vase
from reference.policies.budgets import tokens_of
from reference.policies.describe import describe_policy, list_policies
from reference.policies.names import LEFT_OUT, NAMES, POLICIES, TEXTS_OF_PRESSES, check_name
from reference.policies.scored import LinearScores
from spec.backend import Backend
from spec.budget import Budget, parse_budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import PAPER, TINY, NestedKVParameters
from spec.records import CrystalRetention
from tests.models_integration.session.families import ENDS, METHODS, at_once, build, greedy, prompt, relative
from tests.models_integration.session.sessions import batch, published, read_prompt, sets

pytestmark = pytest.mark.law("as-it-is-described")


def make_policy(name: str, budget: float = 20) -> RetentionPolicy:
    if name == "crystalcache":
        return kvspec.CrystalCache(budget, ENDS, TINY, backend="numpy")
    return kvspec.FullCache() if name == "fullcache" else published(name, build("llama"), budget)


def test_every_name_is_there_and_none_loads_torch_before_it_is_used() -> None:
    for module, more in ((kvspec, ""), (models_integration, ""), (reference, "; it has .*crystalcache")):
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert set(module.__all__) <= set(dir(module))
        with pytest.raises(AttributeError, match=f"has no attribute 'nothing'{more}"):
            module.nothing  # noqa: B018
    assert sorted(kvspec.__all__) == dir(kvspec)
    code = (
        "import sys, models_integration\n"
        "assert not {'torch', 'transformers', 'reference'} & set(sys.modules)\n"
        "import kvspec, reference\n"
        "kvspec.list_policies(), reference.nestedkv\n"
        "assert 'torch' not in sys.modules\n"
        "from models_integration import *\n"
        "assert callable(sentence_ends) and callable(CrystalCache) and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", POLICIES)
def test_a_description_is_true_of_a_session(name: str) -> None:
    one, model = describe_policy(name), build("llama")
    assert one.keeps
    policy = make_policy(name)
    decided = policy.on(model).policy
    with policy(model) as run, torch.no_grad():
        model(input_ids=prompt(64))
        assert run.cache is not None
        first = live = run.cache.mean_length
        for at in range(3):
            at_once(model, prompt(1, seed=at), run.cache)
            live, B = live + 1, tokens_of(decided, parse_budget(20), 65 + at)
            live = B if decided.cadence.due(65 + at, int(live), B) else live
            assert run.cache.mean_length == live
        assert one.decode_time or live == first + 3
        # In this model, no layer is lazy for SimLayerKV, so all layers keep the same tokens.
        if name == "fullcache" or one.later_turns or not run.cache.layers_differ:
            at_once(model, prompt(12, seed=9), run.cache)
        else:
            with pytest.raises(SpecError):
                at_once(model, prompt(12, seed=9), run.cache)


@pytest.mark.parametrize("name", POLICIES)
def test_a_padded_batch_equals_its_rows_or_is_refused(name: str) -> None:
    """Check a left-padded batch and four generated tokens: each row keeps the tokens of its own run."""
    model, texts, steps = build("llama"), [prompt(40), prompt(64)], [prompt(1, seed=at) for at in range(4)]
    ids, mask = batch(texts)

    def answered(ids: Tensor, **options: Tensor) -> tuple[Tensor, list[list[int]]]:
        with make_policy(name)(model) as run:
            logits = [at_once(model, ids, None, **options)[:, -1:]]
            logits += [at_once(model, step.expand(len(ids), -1), run.cache) for step in steps]
            return torch.cat(logits, dim=1), sets(run)

    if not describe_policy(name).padded_batches:
        with pytest.raises(SpecError, match="must be all ones, because the policy repeats the prompts"):
            answered(ids, attention_mask=mask)
        return
    actual, kept = answered(ids, attention_mask=mask)
    alone = [answered(text) for text in texts]
    assert relative(actual, torch.cat([logits for logits, _ in alone])) < 1e-5
    assert kept == [rows for _, (rows,) in alone]


def test_constants_are_given_by_name_and_the_defaults_are_the_makers() -> None:
    model, kept = build("llama"), []
    for constants in ({}, {"beta": 0.0}, {"parameters": NestedKVParameters(beta=0.0)}):
        run, _ = read_prompt(model, kvspec.policy_from_name("nestedkv", 0.3, backend="numpy", **constants), 300)
        kept.append(run.retentions[0].positions.tolist())
    assert kept[0] != kept[1] == kept[2]
    assert describe_policy("nestedkv").constants["beta"] == 3.0
    assert describe_policy("snapkv").constants == {"W": 32, "kernel": 7}
    assert describe_policy("kvzip").required == ("template",)
    assert describe_policy("snapkv").tensors == ("queries", "keys")
    assert describe_policy("knorm").tensors == ("keys",)
    assert describe_policy("kvzap").tensors == ("keys", "hidden states")
    assert describe_policy("streamingllm").tensors == ()
    assert [one.name for one in list_policies() if one.positions == "renumbered"] == [
        "streamingllm", "finch",
    ]
    assert describe_policy("diverse-snapkv").constants["diversity"] == 0.5
    with pytest.raises(SpecError, match=r"gamma = 1: nestedkv has the constants .*beta"):
        kvspec.policy_from_name("nestedkv", 0.3, gamma=1)
    with pytest.raises(SpecError, match=r"the arguments are budget, tokenizer; did you mean budget\?"):
        kvspec.policy_from_name("snapkv", bugdet=0.3)


def test_the_described_constants_of_crystalcache_are_those_of_the_policy() -> None:
    given = describe_policy("crystalcache").constants
    policy = kvspec.policy_from_name("crystalcache", 0.5, sentence_ends=ENDS)
    method: Any = policy.on(build("llama"))
    parameters = vars(method.parameters)
    assert given["breath_protection"] == "sink+recent"
    assert {key: given[key] for key in parameters} == parameters


def test_the_command_lists_all_and_explains_one() -> None:
    listed = CliRunner().invoke(app, ["policies"]).stdout
    for one in list_policies():
        assert f"\n{one.name}: {one.keeps}\n" in "\n" + listed
    shown = CliRunner().invoke(app, ["policies", "kvzip"]).stdout
    template, sinks = "template (required): token ids", "N_sink = 4: number of first"
    for words in ("arXiv 2505.23416", "the prompt twice", "evicts from later turns: no", template, sinks):
        assert words in shown
    shown = CliRunner().invoke(app, ["policies", 'snapkv(positions="renumbered", W=8)']).stdout
    for words in ("positions = renumbered: rotary", "--policies 'snapkv(positions=\"renumbered\", W=8)' --budgets",
                  "policy_from_name('snapkv(positions=\"renumbered\", W=8)', budget=0.3)"):
        assert words in shown
    refused = CliRunner().invoke(app, ["policies", "snapkvv"])
    assert "did you mean snapkv" in str(refused.exception)


@pytest.mark.law("as-it-is-described")
def test_the_text_of_a_policy_is_one_short_line() -> None:
    """The text of CrystalCache once had thousands of characters: each sentence end, and each object of the backend."""
    model, ends = build("llama"), set(range(500))
    gates = kvspec.policy_from_score(LinearScores(np.ones((4, 64)), np.ones((4, 64)), np.ones(4)))
    crystal = kvspec.CrystalCache(0.3, ends, decode=True, backend="numpy", parameters=replace(PAPER, alpha=0.5))
    words = "'crystalcache', budget=0.3, backend='numpy', sentence_ends=<frozenset of 500>"
    assert repr(crystal).startswith(f"CrystalCache({words}, alpha=0.5, ")
    assert repr(crystal).endswith("decode=True)")
    named = kvspec.policy_from_name("kvzip", 0.3, template=[list(range(400)), [1], [2]], positions="renumbered")
    assert repr(named) == "NamedPolicy('kvzip', budget=0.3, template=<list of 3>, positions='renumbered')"
    assert repr(kvspec.StreamingLLM(512)) == "StreamingLLM('streamingllm', budget=512, backend='numpy')"
    for one in (crystal, named, kvspec.CustomPolicy(gates, 0.3)):
        method = one.on(model)
        for shown in (repr(one), repr(method), repr(method.policy)):
            assert len(shown) < 300, shown
            assert "\n" not in shown


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("budget", [0, 0.0, 1.5, float("nan"), "half", True, -3, None, "0%", "150%"])
def test_a_budget_is_read_when_the_method_is_made(budget: object) -> None:
    with pytest.raises(SpecError, match="budget"):
        CrystalCache(budget, ENDS)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="budget"):
        StreamingLLM(budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1, "1", np.int64(1)])
def test_a_budget_of_one_token_asks_for_the_whole_prompt(budget: int | str) -> None:
    for make in (StreamingLLM, lambda one: policy_from_name("snapkv", one), lambda one: CrystalCache(one, ENDS, TINY)):
        with pytest.warns(UserWarning, match=r"keeps one token; write budget=1.0 to keep the whole prompt"):
            make(budget)
    StreamingLLM(1.0), StreamingLLM(Budget(count=1)), StreamingLLM(4)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sentence_ends": None}, r"kvspec\.sentence_ends\(tokenizer\) makes the set"),
        ({"sentence_ends": frozenset[int]()}, r"kvspec\.sentence_ends\(tokenizer\) makes the set"),
        *(({"sentence_ends": {one}}, f"sentence_ends = {one}") for one in (1.5, -1, True)),
        ({"sentence_ends": ENDS, "parameters": {"C": 8}}, "must be CrystalCacheParameters"),
        ({"sentence_ends": ENDS, "backend": "nonesuch"}, "'nonesuch': must be one of numpy"),
    ],
)
def test_other_arguments_are_checked_when_the_method_is_made(options: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        CrystalCache(0.5, **options)  # type: ignore[arg-type]


@pytest.mark.law("refused-before-anything-changes")
def test_a_backend_without_the_stages_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match="no stage family 'crystal'"):
        CrystalCache(0.5, ENDS, backend=Backend("bare"))


@pytest.mark.law("figures-are-counted-right")
def test_before_a_prompt_there_is_nothing_to_tell() -> None:
    with METHODS["crystalcache"]()(build("llama")) as run:
        assert (run.retentions, run.kept, run.cache) == ((), None, None)
        assert (run.timings, run.bytes_freed, run.over_budget) == ({}, 0, 0)


WORDS = ["[PAD]", "</s>.", "A", ".", "!", "?", "Ġend.", "Ġno", "Ċ", "ĠĊ", "...", ".)", "e.g", "?Ġ", "Ġ", "ĉ.ĉ", "wow!!"]


def tokenizer(words: list[str], special: dict[str, str]) -> PreTrainedTokenizerFast:
    created = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="A"))
    created.pre_tokenizer = ByteLevel(add_prefix_space=False)
    created.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=created, **special)  # type: ignore[no-untyped-call]


def test_sentence_ends_follow_the_text_of_each_token() -> None:
    actual = sentence_ends(tokenizer(WORDS, {"pad_token": "[PAD]", "eos_token": "</s>."}))
    assert {WORDS[end] for end in actual} == {".", "!", "?", "Ġend.", "Ċ", "ĠĊ", "...", "?Ġ", "wow!!"}


MARKS = {
    "Chinese": "河。", "Japanese": "か？", "Arabic": "ماء؟", "Urdu": "پانی۔", "Hindi": "जल।", "Armenian": "ջուր։",
    "Burmese": "ရေ။",
}


@pytest.mark.spec("CC-SENTENCES")
def test_sentences_of_all_scripts_end() -> None:
    """ASCII marks are unchanged. A comma and a quotation mark of a different script end no sentence."""
    words = [*MARKS.values(), "河，", "か」", "river", ";", *map(chr, range(33, 127))]
    created = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="river")),
    )
    actual = {created.decode([end]) for end in sentence_ends(created)}
    assert actual == {*MARKS.values(), ".", "!", "?"}


def test_a_special_token_is_not_text() -> None:
    words = [".", "A", "<stop>."]
    assert sentence_ends(tokenizer(words, {})) == {0, 2}
    assert sentence_ends(tokenizer(words, {"eos_token": "<stop>."})) == {0}


def test_an_added_token_is_text_unless_it_is_special() -> None:
    created = tokenizer([".", "A"], {})
    created.add_tokens(["stop!"])
    created.add_special_tokens({"additional_special_tokens": ["<halt>!"]})
    assert sentence_ends(created) == {0, created.convert_tokens_to_ids("stop!")}


@pytest.mark.law("refused-before-anything-changes")
def test_a_tokenizer_without_ends_is_refused() -> None:
    with pytest.raises(SpecError, match="none of the 2 text tokens does"):
        sentence_ends(tokenizer(["A", "B"], {}))
    with pytest.raises(SpecError, match="must be a tokenizer of transformers"):
        sentence_ends(["."])  # type: ignore[arg-type]


FEW_WORDS = {"<unk>": 0, "word": 1, ".": 2, "\n": 3, " ": 4}


def small_tokenizer() -> Any:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(FEW_WORDS, unk_token="<unk>")), unk_token="<unk>",
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
    written = kvspec.policy_from_name("SnapKVPress", 0.3, window_size=64, kernel_size=5)
    assert isinstance(written, NamedPolicy)
    assert written.constants == {"W": 64, "kernel": 5}
    assert parse_policy("snapkv:window_size=64:kernel_size=5") == ("snapkv", {"W": 64, "kernel": 5})
    assert isinstance(kvspec.policy_from_name("full"), kvspec.FullCache)
    with pytest.raises(SpecError, match=r"W = 8: is the constant W, which is also given"):
        kvspec.policy_from_name("snapkv", 0.3, window=16, W=8)
    customised = kvspec.policy_from_name("curdkv", 0.3, window=7)
    assert isinstance(customised, NamedPolicy)
    assert customised.constants["window"] == 7


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_method_that_is_left_out_has_its_reason(name: str) -> None:
    page = (SPEC / "policies.md").read_text(encoding="utf-8")
    section = page.split("## What is not specified")[1].split("\n## ")[0]
    assert name in re.sub(r"[-_ ]", "", section).lower()
    for written in (name, name.upper()):
        with pytest.raises(SpecError, match=re.escape(LEFT_OUT[name])):
            kvspec.policy_from_name(written, 0.3)


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize("name", [*LEFT_OUT, *TEXTS_OF_PRESSES, "BasePress", "ComposedPress"])
def test_an_error_about_a_name_ends_with_what_to_type(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        kvspec.policy_from_name(name, 0.3)
    end = re.search(r"(?:type '([^']+)'|call ([a-z_.]+))$", str(caught.value))
    assert end, caught.value
    text, call = end.groups()
    if call:
        module, _, function = call.rpartition(".")
        assert callable(getattr(import_module(module), function))
    elif text.startswith("kvspec "):
        assert text == f"kvspec paper injection --part {CACHEBLEND}"
    else:
        assert describe_policy(parse_policy(text)[0])


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
        "decide, swapped": (lambda: call.decide(observed, policy), r"^observed = '.*': .*decide\(policy, observed\)"),
        "decide, no prompt": (lambda: call.decide(policy.on(model), model), r"type kvspec.decide\(policy, observed\)"),
        "decide, no budget": (lambda: call.decide(snapkv(), observed), r"type kvspec.CustomPolicy\(policy, 0.3\)"),
        "compact, swapped": (lambda: call.compact(decision, observed.cache), r"type kvspec.compact\(observed.cache"),
        "observe, swapped": (lambda: call.observe(prompt(20), model), "model = 'Tensor': must be a transformers"),
        "observe, text": (lambda: call.observe(model, "text"), r"input_ids = 'text': .*return_tensors"),
        "prefill, swapped": (lambda: call.prefill(policy, model, prompt(9)), r"type kvspec.prefill\(model, "),
        "save, swapped": (lambda: call.save_cache("f", observed.cache, model), r"type kvspec.save_cache\(run.cache, "),
        "save, no prompt": (lambda: call.save_cache(None, model, "f"), "cache = None: is empty before a prompt"),
        "load, swapped": (lambda: call.load_cache(model, "f"), (
            r"^path = 'LlamaForCausalLM': must be of type str or Path; type kvspec.load_cache\(path, model\)$"
        )),
        "load, no model": (lambda: call.load_cache("f", "smollm2"), "^model = 'smollm2': must be of type Module; type"),
        "load, no file": (lambda: call.load_cache("absent.cache", model), "^path = 'absent.cache': does not exist; "),
        **{f"a tokenizer as ends, by {way}": (partial(make, sentence_ends=small_tokenizer()), (
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
    ends, template = kvspec.sentence_ends(small_tokenizer()), kvspec.repeat_template(small_tokenizer())
    for name, constants in (("crystalcache", {"sentence_ends": ends}), ("kvzip", {"template": template}), ("h2o", {})):
        kept = []
        for given in ({"tokenizer": small_tokenizer()}, constants):
            run, _ = read_prompt(model, kvspec.policy_from_name(name, 0.5, **given), 40)
            kept.append([one.positions.tolist() for one in run.retentions])
        assert kept[0] == kept[1]
    seven = frozenset({7})
    policy: Any = kvspec.policy_from_name("crystalcache", 0.5, tokenizer=small_tokenizer(), sentence_ends=seven)
    assert policy.on(model).sentence_ends == seven


@pytest.mark.law("refused-before-anything-changes")
def test_a_session_of_a_missing_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"sentence_ends = None: .*tokenizer="):
        kvspec.policy_from_name("crystalcache", 0.5)
    with pytest.raises(SpecError, match=r"template = None: .*tokenizer="):
        kvspec.policy_from_name("kvzip", 0.5)


TWENTY = Budget(count=20)
TEXT = "The river runs past the old mill, and the miller counts sacks. " * 40


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(("policy", "kept", "reason"), [
    (CustomPolicy(snapkv(), TWENTY), 32, "snapkv always keeps the last 32 tokens"),
    (CustomPolicy(vase(), TWENTY), 68, "vase always keeps the first 4 and the last 64 tokens"),
    (CustomPolicy(kvcrush(), TWENTY), 36,
     "kvcrush always keeps the last 32 tokens, and does not promise an exact budget"),
])
def test_the_budget_is_the_one_that_was_asked(policy: CustomPolicy, kept: int, reason: str) -> None:
    model = build("llama")
    with policy(model) as run, torch.no_grad():
        model(input_ids=torch.cat([prompt(100, seed=1), prompt(100, seed=2)]))
    sizes = [len(one.group(at)) for one in run.retentions for at in range(one.groups)]
    assert set(sizes) == {kept}
    assert run.over_budget == kept - 20
    assert [str(one) for one in run.kept_tokens] == [f"{kept} of 100 tokens, budget 20: {reason}"] * 2
    assert f"kept='{run.kept_tokens[0]}'" in repr(run)


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("budget", [50, 1.0])
def test_a_budget_above_the_prompt_evicts_nothing(budget: int | float) -> None:
    run, cache = read_prompt(build("llama"), policy_from_name("snapkv", budget), 5)
    assert (cache.mean_length, run.over_budget) == (5, 0)


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(("policy", "kept"), [
    (CrystalCache(Budget(count=1), frozenset({130}), backend="numpy"), None),
    (StreamingLLM(10), [0, 1, 2, 3, *range(194, 200)]), (kvspec.FullCache(), [*range(200)]),
])
def test_tokens_beyond_the_budget_are_counted(policy: RetentionPolicy, kept: list[int] | None) -> None:
    """Check the next token too. With a budget of one token, CrystalCache keeps the trunks of 132 tokens."""
    model, ids = build("llama"), prompt(200)
    logits, _, run = prefill(model, policy, ids)
    assert run.kept is not None
    if kept is None:
        (retention,) = run.retentions
        assert isinstance(retention, CrystalRetention)
        assert run.over_budget == len(run.kept) - 1 == retention.over_budget + 131
        assert retention.over_budget > 0
    else:
        assert (run.over_budget, run.kept.tolist()) == (0, kept)
    assert logits.shape[:2] == (1, 1)
    assert int(logits.argmax()) == int(greedy(model, ids, 1))
    assert not logits.requires_grad


@pytest.mark.law("figures-are-counted-right")
def test_unequal_sets_count_by_their_mean() -> None:
    model = build("llama")
    run, _ = read_prompt(model, policy_from_name("adakv", 0.3, W=4), 60)
    sizes = [len(run.retentions[0].group(at)) for at in range(run.retentions[0].groups)]
    (counts,) = run.kept_tokens
    assert (counts.least, counts.most, counts.mean) == (min(sizes), max(sizes), sum(sizes) / len(sizes))
    assert counts.least < counts.most
    assert run.over_budget == counts.over_budget == max(0, ceil(counts.mean) - 18)
    assert str(counts) == f"{counts.least} to {counts.most} (mean {counts.mean:.1f}) of 60 tokens, budget 18"


@pytest.mark.law("figures-are-counted-right")
def test_crystalcache_says_that_whole_trunks_are_kept(tmp_path: Path) -> None:
    """Check the reason for keeping more than 132 tokens: whole trunks at the border of the window."""
    model, tokenizer = load_pocket()
    (tmp_path / "text.txt").write_text("a b c d " * 90, encoding="utf-8")
    ids = tokenizer("a b c d " * 90, return_tensors="pt").input_ids
    policy = CrystalCache(0.3, kvspec.sentence_ends(tokenizer), backend="numpy")
    run = prefill(model, policy, ids).run
    (retention,), (counts,) = run.retentions, run.kept_tokens
    assert isinstance(retention, CrystalRetention)
    asked = policy.method.budget.tokens(ids.shape[1])
    assert counts.budget == asked
    assert counts.floor == sum(retention.trunks.sizes[retention.protected]) >= 132
    assert run.over_budget == max(0, len(retention.kept) - asked)
    if run.over_budget:
        assert f"whole trunks of the first 4 and the last 128 tokens, here {counts.floor} tokens" in str(counts)
    line = ["keep", str(tmp_path / "text.txt"), "--budget", "0.3", "--backend", "numpy"]
    output = CliRunner().invoke(app, [*line, "--format", "json"])
    shown = json.loads(output.stdout)
    assert (shown["kept"], shown["budget"], shown["over_budget"]) == (len(retention.kept), asked, run.over_budget)
    assert CliRunner().invoke(app, line).stderr == f"kept {counts}\n"


@pytest.mark.law("figures-are-counted-right")
def test_tables_show_what_is_kept_beside_the_budget() -> None:
    row = {
        "policy": "crystalcache", "task": "needle", "length": 1024, "budget_requested": "0.15", "budget": 154,
        "placement": "after", "n": 10, "seed": 42, "control": False, "model": "m@0", "backend": "numpy",
        "spec_version": "0.4.1", "correct": 5, "accuracy": 0.5, "mean_kept": 165.2, "mean_cache": 170.0,
        "peak_cache": 200, "over_budget": 36,
    }
    for width in (120, 60, 34):
        (table,) = summary_tables([row], width)
        assert any(re.search(r"165 of 154", str(cell)) for column in table.columns for cell in column.cells), width


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize(("name", "budget", "message"), [
    ("snapkv", 30, r"budget=30 is a number of tokens, but snapkv always keeps the last 32 tokens; write budget=0\.3 "),
    ("snapkv", "30", r"budget='30' is a number of tokens"),
    ("kvcrush", 20, r"kvcrush always keeps the last 32 tokens; write budget=0\.2 to keep 20 % of the prompt"),
    ("criticalkv", 30, r"criticalkv always keeps the last 32 tokens"),
    ("streamingllm", 2, r"streamingllm always keeps the first 4 tokens"),
    ("crystalcache", 130, r"crystalcache always keeps the first 4 and the last 128 tokens$"),
    ("snapkv", 1, r"budget=1 keeps one token; write budget=1\.0"),
])
def test_a_number_below_what_is_always_kept_is_warned_of(name: str, budget: int | str, message: str) -> None:
    model, constants = build("llama"), {"sentence_ends": frozenset({130})} if name == "crystalcache" else {}
    with pytest.warns(UserWarning, match=message):
        policy_from_name(name, budget, **constants)(model)


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("budget", [0.01, "1%", 32, Budget(count=3)])
def test_a_fraction_and_a_plain_budget_are_not_warned_of(budget: float | str | Budget) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy_from_name("snapkv", budget)
        StreamingLLM(Budget(count=2))


@pytest.mark.law("as-it-is-described")
def test_a_text_beyond_the_positions_is_warned_of_once() -> None:
    """Check a prompt, steps and a later turn. Up to the last position, there is no warning."""
    model = build("llama")
    model.config.max_position_embeddings = 48
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with StreamingLLM(20)(model), torch.no_grad():
            greedy(model, prompt(40), 9)
    with warnings.catch_warnings(record=True) as caught, StreamingLLM(20)(model) as run:
        warnings.simplefilter("always")
        answer = greedy(model, prompt(40), 20)
        greedy(model, torch.cat([prompt(40), answer, prompt(30)], dim=1), 3, past_key_values=run.cache)
    ours = [str(one.message) for one in caught if "eviction does not renumber" in str(one.message)]
    assert len(ours) == 1
    assert re.match(r"the text has 49 tokens, but LlamaForCausalLM was trained for 48 positions", ours[0])
    assert "rope_parameters" in ours[0]
    model.config.rope_parameters = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 48}
    with warnings.catch_warnings(), StreamingLLM(20)(model), torch.no_grad():
        warnings.simplefilter("error")
        model(input_ids=prompt(100))


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("text", "tokens", "argument"), [("hi", 4096, "TEXT"), (TEXT, 100, "tokens")])
def test_a_text_that_is_too_short_calibrates_nothing(text: str, tokens: int, argument: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    line = ["calibrate", str(tmp_path / "text.txt"), "--tokens", str(tokens), "--out", str(tmp_path / "c.npz")]
    error = CliRunner().invoke(app, line).exception
    assert f"{argument} = " in str(error)
    assert "must be at least 256 tokens, because" in str(error)
    assert not (tmp_path / "c.npz").exists()
