"""Bad input of the policies through a session: a named error, and a cache that says that it is unusable."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conformance.own.models_integration.session.families import build, prompt
from conformance.own.models_integration.session.oracle_checks import PROMPT
from models_integration import CrystalCache, Published, RetainedCache, calibrate, policy_from_name
from spec.errors import SpecError


def without_keys(model: PreTrainedModel) -> PreTrainedModel:
    """The first KV head of layer 1 has keys of length 0."""
    model.model.layers[1].self_attn.k_proj.weight.data[:12] = 0.0
    return model


def as_it_is(model: PreTrainedModel) -> PreTrainedModel:
    return model


Change = Callable[[PreTrainedModel], PreTrainedModel]
# Name, budget, constants, what is done to the model, words of the error.
WRONG: dict[str, tuple[str, int, dict[str, Any], Change, str]] = {
    "zero keys, NestedKV": ("nestedkv", 20, {}, without_keys, "k = "),
    "zero keys, KeyDiff": ("keydiff", 20, {}, without_keys, "k = "),
    "a pinned prompt above the budget": (
        "triattention", 20, {"pin_prompt": 21}, as_it_is, "pin_prompt = 21: the pinned prompt exceeds the budget of 20",
    ),
    "sinks above the budget": ("nestedkv", 3, {}, as_it_is, "budget = "),
    "sinks above the budget, even shares": ("nestedkv-without-adaptive", 3, {}, as_it_is, "budget = 3"),
    "a NaN among the values": (
        "diverse-keydiff", 20, {}, lambda model: with_value(model, float("nan")), "V = ",
    ),
}


def with_value(model: PreTrainedModel, value: float) -> PreTrainedModel:
    model.model.layers[2].self_attn.v_proj.weight.data[0, 0] = value
    return model


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("name", WRONG)
def test_it_is_named_and_the_cache_is_unusable(name: str) -> None:
    policy, budget, constants, change, words = WRONG[name]
    model = change(build("llama"))
    if policy == "triattention":
        constants = {**constants, "calibration": calibrate(model, prompt(PROMPT))}
    cache = RetainedCache(model.config)
    with Published(policy, budget, **constants)(model) as run, torch.no_grad():
        with pytest.raises(SpecError, match=words):
            model(input_ids=prompt(PROMPT), past_key_values=cache)
        assert run.retention is None
        with pytest.raises(SpecError, match="an unusable cache"):
            model(input_ids=prompt(1), past_key_values=cache)
    with pytest.raises(SpecError, match="an unusable cache"):
        cache.get_seq_length()


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("lam", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["diverse-keydiff", "diverse-expected-attention"])
def test_a_penalty_is_refused_before_there_is_a_model(name: str, lam: float) -> None:
    with pytest.raises(SpecError, match="must be finite and not negative") as caught:
        Published(name, 20, diversity=lam)
    assert caught.value.argument == "diversity"


@pytest.mark.law("as-it-is-described")
@pytest.mark.parametrize("name", ["diverse-keydiff", "adakv", "nestedkv", "triattention"])
def test_more_tokens_than_there_are_keep_all(name: str) -> None:
    """k > n is refused by the selection; a session's budget above the prompt evicts nothing."""
    model = build("llama")
    constants = {"calibration": calibrate(model, prompt(PROMPT))} if name == "triattention" else {}
    with Published(name, PROMPT + 1, **constants)(model) as run, torch.no_grad():
        model(input_ids=prompt(PROMPT))
    assert run.cache is not None
    assert run.cache.mean_length == PROMPT


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("policy", ["class", "name"])
def test_a_tokenizer_in_the_place_of_sentence_ends_is_told_what_to_type(policy: str) -> None:
    """Its repr, which lists a vocabulary, is not printed."""
    words_of = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words_of)  # type: ignore[no-untyped-call]
    words = r"^sentence_ends = '\w*Tokenizer\w*': must be a set of token ids; .*sentence_ends\(tokenizer\) makes it$"
    with pytest.raises(SpecError, match=words):
        CrystalCache(0.5, tokenizer) if policy == "class" else policy_from_name(
            "crystalcache", 0.5, sentence_ends=tokenizer
        )
