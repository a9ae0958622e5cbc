"""Public functions and constants of policies with arguments of a wrong kind: one sentence, and no error of Python."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import kvspec
from models_integration.pocket import SHIPPED, load_pocket_tokenizer
from reference.policies import snapkv
from reference.statistics import draws, mcnemar, mcnemar_power, stratified_draws, wilson
from spec.errors import BackendUnavailable, SpecError
from tests.models_integration.session.families import build, prompt

pytestmark = pytest.mark.law("refused-before-anything-changes")

READS = kvspec.Needs("all")
REFUSALS = (SpecError, BackendUnavailable, FileNotFoundError)


@cache
def tokenizer() -> Any:
    return load_pocket_tokenizer(SHIPPED["pocket"])


def wrong_values() -> Mapping[str, Any]:
    return {
        "None": None, "a text": "text", "an empty text": "", "3": 3, "-1": -1, "0.5": 0.5, "NaN": float("nan"),
        "a list": [1, 2], "a dict": {"a": 1}, "True": True, "an object": object(), "a model": build("llama"),
        "a tokenizer": tokenizer(), "an encoding": tokenizer()("the river", return_tensors="pt"),
        "a policy": kvspec.StreamingLLM(0.5), "floats": torch.rand(1, 4), "ids without rows": prompt(9)[0],
        "no ids": prompt(9)[:, :0], "ids of NumPy": prompt(9).numpy(), "a row of NumPy": np.zeros(3),
    }


def documented(folder: str) -> Mapping[str, tuple[Callable[..., object], dict[str, Any]]]:
    """Return the documented call of each function, by name."""
    model, ids, policy = build("llama"), prompt(300), kvspec.policy_from_name("snapkv", 0.5)
    observed = kvspec.observe(model, ids)
    cache = kvspec.prefill(model, kvspec.StreamingLLM(0.5), ids).cache
    kvspec.save_cache(cache, model, f"{folder}/saved.cache")
    dialogue = [ids[0, at : at + 40].tolist() for at in range(0, 160, 40)]
    episodes = {"model": model, "dialogue": dialogue, "budget": 64, "block": 128, "window": 2, "episodes": 2}
    crystal = {"budget": 0.3, "sentence_ends": {5}, "backend": "numpy", "breath_protection": "none"}
    return {
        "calibrate": (kvspec.calibrate, {"model": model, "input_ids": ids}),
        "compact": (kvspec.compact, {"cache": observed.cache, "decision": kvspec.decide(policy, observed)}),
        "crop": (cache.crop, {"tokens_to_remove": -1}),
        "CrystalCache": (kvspec.CrystalCache, {**crystal, "decode": False, "stream": False, "positions": "kept"}),
        "CustomPolicy": (kvspec.CustomPolicy, {"policy": snapkv(), "budget": 0.3, "positions": "kept"}),
        "decide": (kvspec.decide, {"policy": policy, "observed": observed}),
        "describe_policy": (kvspec.describe_policy, {"name": "snapkv"}),
        "layer_similarities": (kvspec.layer_similarities, {"model": model, "input_ids": ids, "window": 64}),
        "load_cache": (kvspec.load_cache, {"path": f"{folder}/saved.cache", "model": model}),
        "NamedPolicy": (kvspec.NamedPolicy, {"name": "snapkv", "budget": 0.3, "positions": "kept"}),
        "observe": (kvspec.observe, {"model": model, "input_ids": ids, "attention_mask": None, "needs": READS}),
        "policy_from_name": (kvspec.policy_from_name, {"name": "kvzip", "budget": 0.3, "tokenizer": tokenizer()}),
        "prefill": (kvspec.prefill, {"model": model, "policy": policy, "input_ids": ids, "block": 128}),
        "prefill_episodes": (kvspec.prefill_episodes, episodes),
        "repeat_template": (kvspec.repeat_template, {"tokenizer": tokenizer()}),
        "save_cache": (kvspec.save_cache, {"cache": cache, "model": model, "path": f"{folder}/second.cache"}),
        "sentence_ends": (kvspec.sentence_ends, {"tokenizer": tokenizer()}),
        "session": (policy, {"model": model}),
        "SinkAndRecent": (kvspec.SinkAndRecent, {"sink": 4, "recent": 8}),
        "StreamingLLM": (kvspec.StreamingLLM, {"budget": 0.3, "N_sink": 4, "block": 16, "positions": "kept"}),
    }


def check_wrong_values(name: str, function: Callable[..., object], right: Mapping[str, Any], argument: str) -> None:
    """Check that each wrong value is refused in one line, or accepted."""
    for kind, value in wrong_values().items():
        refusal = ""
        try:
            function(**{**right, argument: value})
        except REFUSALS as error:
            refusal = str(error)
        except Exception as error:
            pytest.fail(f"{name}({argument}={kind}): {error!r}")
        assert "\n" not in refusal, f"{name}({argument}={kind})"


@pytest.mark.filterwarnings("ignore")
def test_an_argument_of_a_wrong_kind_is_one_sentence(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (function, right) in documented(str(tmp_path)).items():
        function(**right)
        for argument in right:
            check_wrong_values(name, function, right, argument)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [one.name for one in kvspec.list_policies()])
def test_a_constant_of_a_wrong_kind_is_one_sentence(name: str) -> None:
    given = {"name": name, "budget": 0.3, "tokenizer": tokenizer()}
    for constant in kvspec.describe_policy(name).constants:
        check_wrong_values(name, kvspec.policy_from_name, given, constant)


@pytest.mark.parametrize(("argument", "value"), [
    ("needs", "all"), ("granularity", "model"), ("protection", 4), ("threshold", "0.3"), ("threshold", True),
    ("separable", 1), ("score", 0.5),
])
def test_an_argument_of_an_own_policy_is_refused_with_its_name(argument: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        kvspec.policy_from_score(**{"score": lambda seen: seen, argument: value})
    assert (caught.value.argument, caught.value.value) == (argument, value)


def test_beams_of_a_prefix_outside_the_context_say_how_to_repeat_it() -> None:
    """Check a decode step too. Before, the cache raised the error of `torch.cat`, and one layer had the new tokens."""
    model, ids = build("llama"), prompt(40)
    cache = kvspec.prefill(model, kvspec.StreamingLLM(0.5), ids).cache
    stored = cache.mean_length
    for more in (prompt(3, seed=1), prompt(1, seed=1)):
        with torch.no_grad(), pytest.raises(SpecError, match=r"first type cache.batch_repeat_interleave\(3\)"):
            model(input_ids=more.repeat(3, 1), past_key_values=cache)
        assert cache.mean_length == stored
    cache.batch_repeat_interleave(3)
    with torch.no_grad():
        assert model(input_ids=prompt(1).repeat(3, 1), past_key_values=cache).logits.shape[0] == 3


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int16, np.int64, np.uint64])
def test_counts_of_numpy_are_whole_numbers_without_a_largest_value(integer: Any) -> None:
    """`2 ** (b + c)` of np.int64 was 0 from 64 pairs on, and n * n of np.uint8 overflowed."""
    assert mcnemar(integer(35), integer(61)) == mcnemar(35, 61)
    assert wilson(integer(90), integer(120)) == wilson(90, 120)
    assert mcnemar_power(integer(127), 0.2, 0.1) == mcnemar_power(127, 0.2, 0.1)
    assert np.array_equal(draws(integer(7), integer(3), integer(127)), draws(7, 3, 127))
    strata = np.array([0, 1, 1, 0])
    assert np.array_equal(stratified_draws(strata, integer(3), integer(127)), stratified_draws(strata, 3, 127))


@pytest.mark.parametrize("wrong", [3.0, True, "3", None, np.float64(3)])
def test_counts_of_statistics_are_whole_numbers(wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: mcnemar(wrong, 2), lambda: mcnemar(2, wrong), lambda: wilson(wrong, 5), lambda: wilson(1, wrong),
        lambda: mcnemar_power(wrong, 0.2, 0.1), lambda: draws(wrong, 3, 1), lambda: draws(3, wrong, 1),
        lambda: draws(3, 3, wrong), lambda: stratified_draws(np.array([0, 1]), 3, wrong),
    ]
    for call in calls:
        with pytest.raises(SpecError, match="must be a whole number of at least"):
            call()
