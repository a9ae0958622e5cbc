"""Black-box test with text: verdicts on servers that evict, that do not, and that cannot be tested."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedModel

from conformance.server_suite.reading import WEIGHT_NOISE, with_noise
from conformance.server_suite.text import Question, evicts, main, questions
from conformance.witness.client import Server
from models_integration import policy_from_name
from models_integration.pocket import load_pocket
from tests.conformance.test_other_servers import replying

POLICIES = ("streamingllm", "snapkv", "knorm", "chunkkv", "adakv", "keydiff", "tova")
"""Policies of servers at night. The last four are not among those that choose the prompts."""
SEEDS, ROUNDINGS = 3, 10


@pytest.fixture(scope="module")
def pocket() -> tuple[PreTrainedModel, Any]:
    return load_pocket()


@pytest.fixture(scope="module")
def asked(pocket: tuple[PreTrainedModel, Any]) -> list[Question]:
    return questions(*pocket, count=2)


def answer(model: PreTrainedModel, tokenizer: Any, policy: tuple[str, float], text: str, tokens: int) -> str:
    """Return the greedy answer of a session."""
    given = tokenizer(text, return_tensors="pt")
    with policy_from_name(*policy)(model):
        output = model.generate(**given, max_new_tokens=tokens, do_sample=False)  # type: ignore[operator]
    result: str = tokenizer.decode(output[0, given.input_ids.shape[1] :])
    return result


def test_a_full_cache_does_not_evict(pocket: tuple[PreTrainedModel, Any], asked: list[Question]) -> None:
    model, tokenizer = pocket
    rounded = with_noise(model, WEIGHT_NOISE["float32"], 0)
    assert evicts(asked, partial(answer, rounded, tokenizer, ("fullcache", 1.0)))[0] is False


@pytest.mark.parametrize("policy", [("snapkv", 0.6), ("adakv", 0.3)])
def test_a_policy_evicts(
    pocket: tuple[PreTrainedModel, Any], asked: list[Question], policy: tuple[str, float],
) -> None:
    verdict, reason = evicts(asked, partial(answer, *pocket, policy))
    assert verdict is True
    assert reason == "2 of 2 answers differ from those of the full cache"


FULL = Question("a b a", "b c", "b")


@pytest.mark.parametrize(("asked", "reply", "words"), [
    ([FULL], lambda text: "b c", "1 prompts have an answer"),
    ([FULL] * 2, lambda text: "x y", "an answer begins with 'x y', not with 'b': different weights"),
    ([FULL, Question("b a b", "b d", "b")], lambda text: "b c", "1 of 2 answers differ"),
])
def test_what_is_undecided(asked: list[Question], reply: Callable[[str], str], words: str) -> None:
    verdict, reason = evicts(asked, lambda text, tokens: reply(text))
    assert verdict is None
    assert words in reason


def test_text_is_sent_without_options_of_vllm() -> None:
    sent = []

    def reply(request: Any) -> tuple[int, object]:
        sent.append(request)
        return 200, {"choices": [{"text": " b c"}]}

    with replying(reply) as url:
        assert Server(url, "tiny").complete_text("a b a", 7) == " b c"
    assert sent == [{"model": "tiny", "prompt": "a b a", "max_tokens": 7, "temperature": 0}]


def test_a_server_that_does_not_answer_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server", "http://127.0.0.1:1", "--model", "pocket"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.nightly
def test_errors_of_both_kinds_are_rare(pocket: tuple[PreTrainedModel, Any]) -> None:
    """No server with a full cache evicts, and at most 1 in 20 that evict is missed. The others can be undecided."""
    model, tokenizer = pocket
    full, evicting = Counter[bool | None](), dict[tuple[str, float], Counter[bool | None]]()
    for seed in range(SEEDS):
        asked = questions(model, tokenizer, seed=seed)
        for noise in range(ROUNDINGS):
            rounded = with_noise(model, WEIGHT_NOISE["float32"], noise)
            full[evicts(asked, partial(answer, rounded, tokenizer, ("fullcache", 1.0)))[0]] += 1
        for name in POLICIES:
            for budget in (0.3, 0.6):
                verdict, _ = evicts(asked, partial(answer, model, tokenizer, (name, budget)))
                evicting.setdefault((name, budget), Counter())[verdict] += 1
    print(full, evicting)
    assert full == {False: SEEDS * ROUNDINGS}
    missed = sum(counts[False] for counts in evicting.values())
    assert missed <= SEEDS * len(evicting) / 20, evicting
