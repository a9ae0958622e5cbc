"""The methods' own arguments, the choice of a backend, and a package that is cheap to import."""

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

import models_integration
from conformance.own.models_integration.session.families import ENDS, METHODS, build, greedy, prompt
from models_integration import CrystalCache, FullCache, StreamingLLM, policy_from_name, prefill
from models_integration.policies import methods
from models_integration.policies.methods import sentence_ends
from reference.backend import BACKEND
from reference.crystalcache import prefill as reference_prefill
from spec.backend import Backend
from spec.budget import Budget
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import PAPER, TINY
from spec.policy import Needs
from spec.records import CrystalRetention
from spec.retention import Retention

pytestmark = pytest.mark.law("as-it-is-described")


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
    StreamingLLM(1.0), StreamingLLM(Budget(count=1)), StreamingLLM(2)


@pytest.mark.law("refused-before-anything-changes")
def test_missing_sentence_ends_say_how_to_make_them() -> None:
    for ends in (None, frozenset[int]()):
        with pytest.raises(SpecError, match=r"models_integration\.sentence_ends\(tokenizer\) makes the set"):
            CrystalCache(0.5, ends)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sentence_ends": {1.5}}, "sentence_ends = 1.5"),
        ({"sentence_ends": {-1}}, "sentence_ends = -1"),
        ({"sentence_ends": {True}}, "sentence_ends = True"),
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


def test_auto_takes_the_fastest_backend_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def found(name: str | Backend) -> Backend:
        assert isinstance(name, str)
        tried.append(name)
        if name == "numba":
            raise BackendUnavailable("no numba here")
        return BACKEND

    monkeypatch.setattr(methods, "BUILT_IN", {"numpy": "", "numba": "", "triton": ""})
    monkeypatch.setattr(methods, "resolve", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CrystalCache(0.5, ENDS).backend == "numpy"
    assert tried == ["numba", "numpy"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert CrystalCache(0.5, ENDS).backend == "numpy"
    assert tried == ["numba", "numpy", "triton"]
    monkeypatch.setattr(methods, "BUILT_IN", {})
    with pytest.raises(BackendUnavailable, match="none of the backends"):
        CrystalCache(0.5, ENDS)


def test_auto_is_numba_where_there_is_no_cuda_and_the_reference_does_not_know_it() -> None:
    if not torch.cuda.is_available():
        assert CrystalCache(0.5, ENDS).backend == "numba"
    q = np.ones((1, 4, 2))
    with pytest.raises(SpecError, match="backend = 'auto': must be one of numpy"):
        reference_prefill(q, q, np.arange(4), ENDS, backend="auto")


@pytest.mark.law("figures-are-counted-right")
def test_a_run_says_which_backend_decided() -> None:
    model = build("llama")
    with CrystalCache(0.5, ENDS, TINY, backend="numpy")(model) as run:
        greedy(model, prompt(40), 2)
    assert run.backend == "numpy"
    with CrystalCache(0.5, ENDS, TINY, backend=Backend("mine", BACKEND.crystal))(model) as run:
        greedy(model, prompt(40), 2)
    assert run.backend == "mine"


@pytest.mark.law("decided-as-the-reference")
def test_a_run_keeps_what_the_reference_keeps() -> None:
    model, ids = build("gemma2"), prompt(60)
    from conformance.own.models_integration.session.test_capture import shown

    with METHODS["crystalcache"]()(model) as run:
        greedy(model, ids, 2)
    (view,) = shown(model, Needs("observed", None), 60).layers.values()
    expected = reference_prefill(
        view.q, view.k, ids[0].numpy(), ENDS, 0.5, TINY, scaling=view.scaling, softcap=view.softcap
    )
    assert isinstance(run.retention, CrystalRetention)
    np.testing.assert_array_equal(run.retention.kept, expected.kept)
    np.testing.assert_array_equal(run.retention.scores, expected.scores)
    np.testing.assert_array_equal(run.kept, expected.kept)


@pytest.mark.law("figures-are-counted-right")
def test_before_a_prompt_there_is_nothing_to_tell() -> None:
    with METHODS["crystalcache"]()(build("llama")) as run:
        assert (run.retention, run.kept, run.cache) == (None, None, None)
        assert (run.timings, run.bytes_freed, run.over_budget) == ({}, 0, 0)


@pytest.mark.law("figures-are-counted-right")
def test_what_protection_keeps_beyond_the_budget_is_told() -> None:
    model = build("llama")
    over = prefill(model, CrystalCache(Budget(count=1), frozenset({130}), PAPER, backend="numpy"), prompt(200)).run
    assert isinstance(over.retention, CrystalRetention)
    assert over.kept is not None
    assert over.over_budget == over.retention.over_budget == len(over.kept) - 132
    assert over.over_budget > 0
    within = prefill(model, StreamingLLM(10), prompt(60)).run
    assert isinstance(within.retention, Retention)
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
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="A"))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)  # type: ignore[no-untyped-call]


def test_sentence_ends_follow_the_text_of_each_token() -> None:
    found = sentence_ends(tokenizer(WORDS, {"pad_token": "[PAD]", "eos_token": "</s>."}))
    assert {WORDS[end] for end in found} == {".", "!", "?", "Ġend.", "Ċ", "ĠĊ", "...", "?Ġ", "wow!!"}


def test_a_special_token_is_not_text() -> None:
    words = [".", "A", "<stop>."]
    assert sentence_ends(tokenizer(words, {})) == {0, 2}
    assert sentence_ends(tokenizer(words, {"eos_token": "<stop>."})) == {0}


def test_an_added_token_is_text_unless_it_is_special() -> None:
    made = tokenizer([".", "A"], {})
    made.add_tokens(["stop!"])
    made.add_special_tokens({"additional_special_tokens": ["<halt>!"]})
    assert sentence_ends(made) == {0, made.convert_tokens_to_ids("stop!")}


@pytest.mark.law("refused-before-anything-changes")
def test_a_tokenizer_without_ends_is_refused() -> None:
    with pytest.raises(SpecError, match="none of its 2 text tokens ends a sentence"):
        sentence_ends(tokenizer(["A", "B"], {}))
    with pytest.raises(SpecError, match="must be a tokenizer of transformers"):
        sentence_ends(["."])  # type: ignore[arg-type]


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, models_integration\n"
        "assert not {'torch', 'transformers', 'reference'} & set(sys.modules)\n"
        "from models_integration import *\n"
        "assert callable(sentence_ends) and callable(CrystalCache) and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    for name in models_integration.__all__:
        assert getattr(models_integration, name) is not None
    assert set(dir(models_integration)) >= set(models_integration.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        models_integration.nonesuch  # noqa: B018
