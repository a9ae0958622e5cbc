"""The suite of caches: ours holds, a plain one holds where it serves, and each known mistake is found."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from conformance.cache_suite.conftest import found_model
from conformance.cache_suite.judge import KINDS, check, save_tiny
from conformance.own.conformance.test_plugin import run as run_pytest
from models_integration.session.eviction import after_eviction

pytestmark = [pytest.mark.law("the-proof-has-teeth"), pytest.mark.usefixtures("one_thread")]

Kept = dict[int, list[list[int]]]
EQUAL, RAGGED = "a set for each KV head", "a set of its own length for each KV head"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


def loaded(folder: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


def stored(tensor: Tensor, sets: list[list[int]], longest: int) -> Tensor:
    """What the heads keep of (1, H_kv, n, d), with zeros up to the longest."""
    rows = [tensor[0, head, own] for head, own in enumerate(sets)]
    return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])[None]


def plain(
    prompt: list[int], kept: Kept, following: list[int], folder: str, shift: int = 0, padded: bool = False,
    of_head: Callable[[list[list[int]]], list[list[int]]] = lambda sets: sets,
) -> Tensor:
    """Compacted tensors in a cache of transformers; with the mistakes that such a cache invites."""
    model, full, compacted = loaded(folder), DynamicCache(), DynamicCache()
    longest = max(len(own) for sets in kept.values() for own in sets)
    if not padded and any(len(own) < longest for sets in kept.values() for own in sets):
        raise NotImplementedError("sets of different lengths")
    with torch.no_grad():
        model(torch.tensor([prompt]), past_key_values=full)
        for layer, sets in kept.items():
            whole: Any = full.layers[layer]
            keys, values = (stored(tensor, of_head(sets), longest) for tensor in (whole.keys, whole.values))
            compacted.update(keys, values, layer)
        first = len(prompt) - shift * (len(prompt) - longest)
        positions = torch.arange(first, first + len(following))[None]
        logits: Tensor = model(torch.tensor([following]), past_key_values=compacted, position_ids=positions).logits
    return logits[0]


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize("kind", KINDS)
def test_our_cache_holds(kind: str, folder: str) -> None:
    check(after_eviction, folder, kind, 5)
    check(lambda *given: after_eviction(*given).log_softmax(-1).tolist(), folder, kind, 1)


def test_a_plain_cache_holds_where_it_serves(folder: str) -> None:
    for kind in KINDS:
        if kind != RAGGED:
            check(plain, folder, kind, 5)
    with pytest.raises(pytest.skip.Exception, match=rf"^{RAGGED}: not served \(sets of different lengths\)$"):
        check(plain, folder, RAGGED, 5)


MISTAKES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "shifted positions": (partial(plain, shift=1), "one set for all", "away from"),
    "padding is attended to": (partial(plain, padded=True), RAGGED, "away from"),
    "one head's set is ignored": (partial(plain, of_head=lambda sets: [sets[0], sets[0]]), EQUAL, "away from"),
    "heads change places": (partial(plain, of_head=lambda sets: sets[::-1]), EQUAL, "away from"),
    "nothing is evicted": (
        lambda prompt, kept, *rest: plain(prompt, {layer: [list(range(len(prompt)))] * 2 for layer in kept}, *rest),
        EQUAL, "as if nothing were evicted",
    ),
    "the last token alone": (lambda *given: plain(*given)[-1:], EQUAL, r"logits are \(1, 256\)"),
    "no numbers": (lambda *given: plain(*given) * float("nan"), EQUAL, "inf of the largest"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake: str, folder: str) -> None:
    engine, kind, words = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=words):
        check(engine, folder, kind, 5)


ENGINE = """
import torch
from transformers import AutoModelForCausalLM

def RUN(prompt, kept, following, model):
    if any(len(own) < len(prompt) for sets in kept.values() for own in sets):
        raise NotImplementedError("eviction")
    ids = torch.tensor([prompt + following])
    return AutoModelForCausalLM.from_pretrained(model)(ids).logits[0, len(prompt):]
"""


def test_the_suite_runs_from_outside_the_tree(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENGINE, encoding="utf-8")
    model = str(save_tiny("llama", tmp_path / "model"))
    suite = ["--pyargs", "conformance.cache_suite", "--kvspec-cache", "mine:RUN"]
    result = run_pytest(tmp_path, *suite, "--kvspec-model", model)
    assert "2 passed, 9 skipped" in result.stdout, result.stdout + result.stderr
    assert f"{EQUAL}: not served (eviction)" in result.stdout


@pytest.mark.law("one-line-with-the-way-out")
def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("absent", str(tmp_path)):
        with pytest.raises(pytest.UsageError, match=f"^model = '{name}': must be a model on this machine: .*$"):
            found_model(name)
