"""Public names, arguments and descriptions of policies: fast to import, checked on creation, correct for a session."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvspec
import models_integration
import reference
from kvspec.cli.app import app
from models_integration import (
    CrystalCache,
    FullCache,
    RetentionPolicy,
    StreamingLLM,
    policy_from_name,
    prefill,
)
from models_integration.policies.values import sentence_ends
from reference.policies.budgets import tokens_of
from reference.policies.describe import describe_policy, list_policies
from reference.policies.names import POLICIES
from spec.backend import Backend
from spec.budget import Budget, parse_budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import PAPER, TINY, NestedKVParameters
from spec.records import CrystalRetention
from tests.models_integration.session.families import ENDS, METHODS, at_once, build, greedy, prompt
from tests.models_integration.session.sessions import batch, published

pytestmark = pytest.mark.law("as-it-is-described")


def made(name: str, budget: float = 20) -> RetentionPolicy:
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
    policy = made(name)
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


@pytest.mark.law("figures-are-counted-right")
def test_what_protection_keeps_beyond_the_budget_is_told() -> None:
    model = build("llama")
    over = prefill(model, CrystalCache(Budget(count=1), frozenset({130}), PAPER, backend="numpy"), prompt(200)).run
    (retention,) = over.retentions
    assert isinstance(retention, CrystalRetention)
    assert over.kept is not None
    assert over.over_budget == len(over.kept) - 1 == retention.over_budget + 131
    assert retention.over_budget > 0
    within = prefill(model, StreamingLLM(10), prompt(60)).run
    assert not isinstance(within.retentions[0], CrystalRetention)
    assert within.over_budget == 0
    assert within.kept is not None
    assert within.kept.tolist() == [0, 1, 2, 3, *range(54, 60)]
    assert prefill(model, FullCache(), prompt(60)).run.over_budget == 0


def test_the_plain_function_gives_the_next_token_s_logits() -> None:
    model, ids = build("llama"), prompt(60)
    prefilled = prefill(model, METHODS["crystalcache"](), ids)
    assert prefilled.logits.shape[:2] == (1, 1)
    assert int(prefilled.logits.argmax()) == int(greedy(model, ids, 1))
    assert not prefilled.logits.requires_grad


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

