"""Answers of vLLM with eviction equal the answers of the masked model, and the sets are those of a session."""

from itertools import count
from typing import Any

import pytest

from conformance.server_suite.judge import check_size
from models_integration.pocket import load_pocket
from models_integration.policies.values import sentence_ends
from reference.policies import advance
from tests.models_integration.engines.vllm.engine import (
    NEEDS_VLLM,
    Engine,
    asking,
    check_answers,
    check_logprobs,
    check_masked,
    check_sets,
    cut,
    reading,
    row_of,
    stated,
)

pytestmark = [pytest.mark.law("eviction-equals-masking"), *NEEDS_VLLM]

PROMPTS = [(300, 0), (611, 50), (97, 13), (450, 200), (64, 7), (33, 1), (32, 5), (65, 9)]
EQUAL = (
    "snapkv", "keydiff", "knorm", "lagkv", "curdkv", "kvcrush", "chunkkv", "diverse-snapkv", "criticalkv",
    "expected-attention",
)


BREATHS: dict[str, Any] = {"decode": True, "T_breath": 16, "W_recent": 16}


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine whose steps process 64 tokens, so that prompts are read in chunks, with prefix caching."""
    return Engine({"on_unserved": "full"}, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def small() -> Engine:
    """Return an engine whose pool is too small for its requests."""
    return Engine({"on_unserved": "full"}, blocks=44, max_model_len=704, max_num_batched_tokens=256)


def test_a_batch_of_policies(engine: Engine) -> None:
    asked = [
        asking("streamingllm", budget=0.3), asking("snapkv", budget=0.3, W=16), asking("keydiff", budget=0.3),
        asking(None), asking("streamingllm", budget=0.5), asking("snapkv", budget=0.6, W=16),
        asking("tova", 24, budget=16), asking("knorm", budget=0.5),
    ]
    actual = check_answers(engine, [cut(*one) for one in PROMPTS], asked)
    assert [bool(one["evictions"]) for one in actual] == [True, True, True, False, True, True, True, True]
    assert actual[1]["policy"] == "snapkv(W=16)"
    assert actual[3] == {
        "witness": 1, "policy": "fullcache", "budget": "1.0", "positions": "kept", "evictions": [],
        "reason": "no policy was asked for",
    }


@pytest.mark.law("decided-as-the-reference")
def test_kept_sets_are_those_of_a_session(engine: Engine) -> None:
    prompts = [cut(*one) for one in PROMPTS[:3]]
    constants: dict[str, dict[str, Any]] = {name: {"W": 16} if "snapkv" in name else {} for name in EQUAL}
    asked = [asking(name, budget=0.3, **constants[name]) for name in EQUAL for _ in prompts]
    assert all(one["evictions"] for one in check_answers(engine, prompts * len(EQUAL), asked))


@pytest.mark.parametrize(("name", "constants"), [
    ("h2o", {}), ("tova", {}), ("morphkv", {}), ("rkv", {"every": 16}),
    pytest.param("diverse-tova", {}, marks=pytest.mark.nightly),
])
def test_tokens_are_evicted_while_the_answer_is_generated(
    engine: Engine, name: str, constants: dict[str, Any],
) -> None:
    prompts = [cut(200), cut(97, 13), cut(40, 3)]
    actual = check_answers(engine, prompts, [asking(name, 100, budget=64, **constants)] * 3)
    for prompt, one in zip(prompts, actual, strict=True):
        assert all(sum(b - a for a, b in ranges) <= 64 for step in one["evictions"] for ranges in step["sets"])
        assert len(one["evictions"]) >= (100 - max(0, 64 - len(prompt))) // constants.get("every", 1) - 2


@pytest.mark.law("as-it-is-described")
def test_crystalcache_has_the_sentence_ends_of_the_tokenizer(engine: Engine) -> None:
    prompts, ends = [cut(200), cut(97, 13)], sorted(sentence_ends(load_pocket()[1]))
    typed = check_answers(engine, prompts, [asking("crystalcache", 60, budget=64, sentence_ends=ends, **BREATHS)] * 2)
    outputs = engine.answer(prompts, [asking("CrystalCache", 60, budget=64, **BREATHS)] * 2)
    for prompt, output, typed_output in zip(prompts, outputs, typed, strict=True):
        check_masked(prompt, output)
        check_sets(prompt, output)
        assert stated(output) == {**typed_output, "policy": "crystalcache(T_breath=16, W_recent=16, decode=true)"}
        assert [one["seen"] - len(prompt) for one in typed_output["evictions"]] == [0, 16, 32, 48]


def test_a_shared_prefix_is_used_before_and_after_evictions(engine: Engine) -> None:
    prompt, hits = cut(611, 50), list[int]()
    original = engine.scheduler._get_local_prefix_cache_hit

    def hit(request: Any) -> Any:
        actual = original(request)
        hits.append(actual[1])
        return actual

    engine.scheduler._get_local_prefix_cache_hit = hit
    try:
        for policy in (asking("snapkv", budget=0.3, W=16), asking(None), asking("h2o-described", budget=0.4)):
            check_answers(engine, [prompt], [policy])
    finally:
        del engine.scheduler._get_local_prefix_cache_hit
    assert hits[1:] == [608, 0]


@pytest.mark.law("parts-equal-the-whole")
def test_a_seed_gives_the_same_answer_for_any_chunks(engine: Engine) -> None:
    """The first request is read in ten chunks and the second in one, because the prefix is cached."""
    prompt, drawn = cut(611, 80), asking("snapkv", 24, {"temperature": 1.0, "seed": 7}, budget=0.3, W=16)
    first, again = (engine.answer([prompt], [drawn])[0].outputs[0].token_ids for _ in range(2))
    assert first == again


def test_blocks_of_an_evicted_answer_are_not_shared(engine: Engine) -> None:
    prompt = cut(64, 700)
    (first,) = engine.answer([prompt], [asking("streamingllm", 200, budget=0.9)])
    check_answers(engine, [prompt + list(first.outputs[0].token_ids)[:-3]], [asking(None)])


def test_preempted_requests_keep_the_same_sets(small: Engine) -> None:
    policies = [
        asking("streamingllm", 100, budget=0.5), asking("snapkv", 100, budget=0.5, W=16),
        asking("crystalcache", 100, budget=99, sentence_ends=[5, 9], **BREATHS), asking("tova", 100, budget=100),
        asking("rkv", 100, budget=80, every=16),
        asking(None, 100),
    ]
    actual = check_answers(small, [cut(200 + 31 * at, 17 * (at // 2)) for at in range(12)], policies * 2)
    assert small.preempts.called
    assert sum(bool(one["evictions"]) for one in actual) == 10


def test_beam_search_without_a_policy_has_the_full_cache(engine: Engine) -> None:
    from vllm.sampling_params import BeamSearchParams

    prompt, asked = cut(64, 7), BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    (output,) = engine.llm.beam_search([{"prompt_token_ids": prompt}], asked)
    for beam in output.sequences:
        given = [{token: entry.logprob for token, entry in each.items()} for each in beam.logprobs]
        assert len(given) == len(beam.tokens) - len(prompt) == 6
        check_logprobs(row_of(beam.tokens), len(prompt) - 1, given)
    assert len(output.sequences) == 2
    engine.check_nothing_left()


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("policy", [
    "adakv/heads=even", "nestedkv/heads=even", "defensivekv/heads=even", "cake/layers=even", "pyramidkv/layers=even",
])
def test_forms_with_equal_counts_say_so_in_their_name(engine: Engine, policy: str) -> None:
    actual = check_answers(engine, [cut(150, 7)], [asking(policy, budget=0.3)])
    assert (actual[0]["policy"], len(actual[0]["evictions"])) == (policy, 1)


def test_what_is_not_served_is_stated(engine: Engine) -> None:
    outputs = engine.answer([cut(97), cut(1), cut(40)], [
        asking("adakv", budget=0.3), asking("snapkv", budget=0.3), asking("knorm", budget=1.0),
    ])
    assert [stated(one)["reason"] for one in outputs] == [
        "adakv keeps more tokens in some heads than in others, and a block of vLLM has equally many; type"
        " adakv/heads=even",
        "the prompt has one token", "the budget keeps all tokens",
    ]
    with pytest.raises(AssertionError, match="kept all 97 tokens of a budget of 32: adakv keeps more tokens in some"):
        check_size(reading(cut(97), outputs[0]))


def test_an_answer_that_ends_with_its_first_token_says_that_nothing_was_evicted(engine: Engine) -> None:
    """The token is the last one, ends the answer, has a stop string, or fills the longest text."""
    prompt = cut(96, 5)
    (whole,) = engine.answer([prompt], [asking("knorm", 8, budget=0.3)])
    first = whole.outputs[0]
    ends: list[Any] = [{"max_tokens": 1}, {"stop_token_ids": [first.token_ids[0]]}, {"stop": [first.text[0]]}, {}, {}]
    asked = [asking("knorm", 8, end, budget=0.3) for end in ends]
    actual = check_answers(engine, [prompt, prompt, prompt, cut(1023), prompt], asked)
    assert {one["reason"] for one in actual[:4]} == {"no token was processed after the decision"}
    assert [len(one["evictions"]) for one in actual] == [0, 0, 0, 0, 1]


def test_a_policy_that_fails_costs_only_its_eviction(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that the model does not have once stopped the engine with an IndexError of the worker."""
    from models_integration.engines.vllm import selection

    def fail(policy: Any, budget: Any, one: Any) -> Any:
        raise ArithmeticError("no scores")

    monkeypatch.setattr(selection, "retain", fail)
    asked = [
        asking("snapkv", budget=0.3, W=16), asking("tova", budget=32),
        asking("crystalcache", budget=0.3, sentence_ends=[5], observed_layer=7),
    ]
    actual = [one.get("reason", "") for one in check_answers(engine, [cut(97), cut(80, 3), cut(300)], asked)]
    assert actual[:2] == ["ArithmeticError: no scores", ""]
    assert "observed_layer = 7: must be from -3 to 2" in actual[2]


@pytest.mark.parametrize("steps", [1, 2, 3, 24])
def test_a_preempted_request_repeats_its_evictions(
    engine: Engine, steps: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preempt before, at and after the decision of a prompt, and after an error of the policy.

    After the error, the preempted request once had its full cache again, in contrast to its statement.
    """
    from models_integration.engines.vllm import selection

    def fail(policy: Any, budget: Any, before: Any, one: Any) -> Any:
        if one.seen == 117:
            raise ArithmeticError("no scores")
        return advance(policy, budget, before, one)

    monkeypatch.setattr(selection, "advance", fail)
    core, prompt, outputs = engine.llm.llm_engine, cut(97, 13), list[Any]()
    core.add_request("preempted", {"prompt_token_ids": prompt}, asking("rkv", 40, budget=40, every=16, W=8))
    for at in count():
        if not core.has_unfinished_requests():
            break
        if at == steps:
            engine.scheduler._preempt_last()
        outputs = core.step()
    check_masked(prompt, outputs[0])
    body = stated(outputs[0])
    assert ([one["seen"] for one in body["evictions"]], body["reason"]) == ([97, 112], "ArithmeticError: no scores")
    engine.check_nothing_left()


@pytest.mark.law("refused-before-anything-changes")
def test_a_bad_policy_is_refused_before_the_engine(engine: Engine) -> None:
    """Check the error.

    vLLM's server answers HTTP 400 both to a ValueError and to the VLLMValidationError of the newest version.
    """
    from vllm.exceptions import VLLMValidationError

    with pytest.raises((ValueError, VLLMValidationError), match="kvspec: policy = 'nosuch': must be a built-in policy"):
        engine.llm.generate({"prompt_token_ids": cut(20)}, asking("nosuch", budget=0.3), use_tqdm=False)
    engine.check_nothing_left()


@pytest.mark.law("refused-before-anything-changes")
def test_a_bug_is_no_bad_request(engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A bug was once HTTP 400 without a traceback. vLLM answers 400 to a ValueError or TypeError, and 500 to others."""
    from models_integration.engines.vllm import front_end

    def fail(given: Any, settings: Any) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(front_end, "parse_request", fail)
    with pytest.raises(RuntimeError, match="kvspec: a bug; the log of the server has the traceback"):
        engine.llm.generate({"prompt_token_ids": cut(20)}, asking("knorm", budget=0.3), use_tqdm=False)
    assert "Traceback" in caplog.text
    engine.check_nothing_left()


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_nothing_is_left_of_an_aborted_request(engine: Engine) -> None:
    """Abort before, at and after the decision of a prompt."""
    core, prompt = engine.llm.llm_engine, cut(97, 13)
    for steps in (1, 2, 3, 8):
        core.add_request("gone", {"prompt_token_ids": prompt}, asking("snapkv", 400, budget=0.3, W=16))
        for _ in range(steps):
            core.step()
        core.abort_request(["gone"])
        check_answers(engine, [prompt], [asking("knorm", budget=0.3)])
