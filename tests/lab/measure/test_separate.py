"""Tests of the separate program: it keeps the tokens that kvspec keeps, on a small random model."""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the tests write a file of the model")

import torch
from transformers import LlamaForCausalLM

import kvspec
from lab.measure.gguf_files import TOKENS, tiny_llama, write_gguf
from lab.measure.separate.__main__ import STREAMING, Prompt, drawn
from lab.measure.separate.crystalcache import FORMS
from lab.measure.separate.llama import Llama
from lab.measure.separate.weights import Weights, read_weights, sentence_ends
from models_integration.policies.methods import parse_policy

pytestmark = pytest.mark.law("figures-are-counted-right")

ENDS = frozenset(at for at, token in enumerate(TOKENS) if token in {".", "!", "?", "Ċ"})
TEMPLATE = (3, 4, 5), (6,), (7, 8)
CONSTANTS: dict[str, dict[str, Any]] = {
    "crystalcache": {"sentence_ends": ENDS, "backend": "numpy"}, "kvzip": {"template": TEMPLATE}, "streamingllm": {},
}
BUDGET = 150


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def weights(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    path = tmp_path_factory.mktemp("separate") / "tiny.gguf"
    write_gguf(path, model)
    return read_weights(path)


@pytest.fixture(scope="module")
def prompt(weights: Weights) -> Prompt:
    ids = np.random.default_rng(0).integers(3, len(TOKENS), 400).tolist()
    reader = Llama(weights)
    return Prompt(reader, ids, ENDS, TEMPLATE, reader.read(ids, reader.layers))


def test_the_vocabulary_names_the_sentence_ends(weights: Weights) -> None:
    assert sentence_ends(weights.metadata) == ENDS


@pytest.mark.parametrize("policy", [
    *(name for name in FORMS if name.startswith("crystalcache")), STREAMING, "snapkv", "nestedkv", "kvzip",
])
def test_the_separate_program_keeps_what_kvspec_keeps(policy: str, model: LlamaForCausalLM, prompt: Prompt) -> None:
    name, constants = parse_policy(policy)
    method = kvspec.policy_from_name(name, BUDGET, **constants, **CONSTANTS.get(name, {"backend": "numpy"}))
    with method(model) as run:
        model(torch.tensor([prompt.ids]), use_cache=True)
    (retention,) = run.retentions
    kept = prompt.kept(policy, BUDGET)
    assert [sorted(one) for one in kept] == [retention.group(at).tolist() for at in range(len(kept))]
    assert retention.groups == len(kept)


def test_samples_are_drawn_evenly() -> None:
    rows = [{"task": at % 3, "placement": "paper", "sample": str(at)} for at in range(30)]
    some = drawn(rows, 6, seed=0)
    assert sorted(row["task"] for row in some.values()) == [0, 0, 1, 1, 2, 2]


def test_a_different_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.xz"
    path.write_bytes(lzma.compress(b"no weights"))
    with pytest.raises(ValueError, match="must be a GGUF file of version 3"):
        read_weights(path)
