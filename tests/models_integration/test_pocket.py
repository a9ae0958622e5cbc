"""The shipped pocket models load, are small and answer. A toy model learns scores on the pocket model."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.tasks import TASKS, Sample, draw_sample, score
from models_integration.model.frame import decode
from models_integration.pocket import ASSETS, CHAT_ASSETS, load_pocket, load_pocket_tokenizer

pytestmark = pytest.mark.law("as-it-is-described")

Pocket = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]

MEBIBYTE = 2**20
TURN = "<|im_start|>{}\n{}<|im_end|>\n"
TEXTS = (
    "The secret code for Project Aurora is 7492.",
    "Zürich’s café, 日本語, emoji 🦜 and a tab\t!",
    "  two spaces\n\nand\r\nlines\u00a0",
    "def f(x):\n    return x ** 2 - 1e-9  # code",
    "\x00\x7f ￿ İı ǅ ﬁ",
    "1234567890 00 007 3.14",
)


@pytest.fixture(scope="module")
def pocket() -> Pocket:
    return load_pocket()


def test_the_shipped_files_are_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) < 10 * MEBIBYTE
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "MODEL_CARD.md"}
    assert needed <= {path.name for path in ASSETS.iterdir()}


def test_the_model_is_a_small_llama_with_grouped_heads(pocket: Pocket) -> None:
    model, tokenizer = pocket
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers >= 2
    assert model.config.num_key_value_heads == 2
    assert model.config.num_attention_heads == 4
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(pocket: Pocket, text: str) -> None:
    tokenizer = pocket[1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]


def test_digits_and_punctuation_are_tokens_of_their_own(pocket: Pocket) -> None:
    tokenizer = pocket[1]
    for value in (1000, 7492, 9999):
        assert len(tokenizer.encode(f" {value}", add_special_tokens=False)) == 4
        assert len(tokenizer.encode(f"{value}", add_special_tokens=False)) == 4
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("So. What? Yes!\nDone.", add_special_tokens=False))
    assert [piece for piece in pieces if piece in {".", "?", "!", "Ċ"}] == [".", "?", "!", "Ċ", "."]


@torch.no_grad()
def generated(model: LlamaForCausalLM, ids: torch.Tensor) -> list[int]:
    """Return the greedy answer, which ends without a limit."""
    generating: Any = model  # some versions declare the mixin's self in a way that mypy refuses
    answer = generating.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    return [int(token) for token in answer[0, ids.shape[1] :]]


def answer(model: LlamaForCausalLM, sample: Sample) -> list[int]:
    return generated(model, torch.tensor([[*sample.context_ids, *sample.question_ids]]))


def drawn(pocket: Pocket, task: str, length: int, index: int = 0, distractors: int = 0) -> Sample:
    return draw_sample(task, pocket[1], length, index, 42, distractors=distractors)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("distractors", [0, 3])
def test_it_answers_with_its_full_cache(pocket: Pocket, task: str, distractors: int) -> None:
    for index in range(5):
        sample = drawn(pocket, task, 512, index, distractors)
        assert score(pocket[1], answer(pocket[0], sample), sample)


def test_the_answer_is_a_full_sentence_that_ends(pocket: Pocket) -> None:
    model, tokenizer = pocket
    sample = drawn(pocket, "needle", 256)
    actual = answer(model, sample)
    assert actual[-1] == tokenizer.eos_token_id
    start, stop = sample.needle
    fact = decode(tokenizer, sample.context_ids[start:stop]).strip()
    assert decode(tokenizer, actual).strip() == fact


def test_a_model_that_has_not_seen_the_value_does_not_know_it(pocket: Pocket) -> None:
    sample = drawn(pocket, "needle", 512, distractors=3)
    start, stop = sample.needle
    blank = tuple(sample.context_ids[0] if start <= i < stop else t for i, t in enumerate(sample.context_ids))
    without = type(sample)(sample.task, blank, sample.question_ids, sample.expected, sample.needle)
    assert not score(pocket[1], answer(pocket[0], without), without)


@pytest.mark.law("figures-are-counted-right")
def test_the_card_states_the_measured_figures() -> None:
    card, cells = (ASSETS / "MODEL_CARD.md").read_text(), json.loads((ASSETS / "evaluation.json").read_text())
    for cell in cells:
        share = cell["correct"] / cell["samples"]
        assert cell["length"] > 2048 or share >= (0.9 if cell["distractors"] else 0.95)
        (row,) = re.findall(rf"\| {cell['task']} \| {cell['filler']} \| {cell['distractors']} \|.*", card)
        assert row.split(" | ")[3 + [512, 1024, 2048, 4096].index(cell["length"])].strip(" |") == f"{share:.3f}"
    cost = json.loads((ASSETS / "training.json").read_text())
    assert f"{cost['step']} steps, {cost['tokens'] / 1e6:.1f} million tokens, {cost['seconds'] / 60:.0f} min" in card


def test_the_sibling_is_small_and_keeps_the_pocket_model_s_ids() -> None:
    assert sum(path.stat().st_size for path in CHAT_ASSETS.iterdir()) < 2.5 * MEBIBYTE
    model, chat = load_pocket(CHAT_ASSETS)
    assert (model.dtype, model.config.num_hidden_layers) == (torch.float32, 4)
    known, pocket = chat.get_vocab(), load_pocket_tokenizer(ASSETS).get_vocab()
    assert {word: known[word] for word in pocket} == pocket
    ids = chat(TURN.format("user", "The panel met."), add_special_tokens=False).input_ids
    opening, closing = (chat.convert_tokens_to_ids(marker) for marker in ("<|im_start|>", "<|im_end|>"))
    assert [ids.count(opening), ids.count(closing), ids[0]] == [1, 1, opening]
    assert chat.decode(ids) == "<|im_start|>user\nThe panel met.<|im_end|>\n"


def test_the_sibling_answers_in_a_conversation() -> None:
    model, tokenizer = load_pocket(CHAT_ASSETS)
    turns = ("The panel noted Project Fox. Its total distance is 3019.", "The total distance for Project Opal is 5264.")
    asked = "".join(TURN.format("user", one) for one in (*turns, "What is the total distance for Project Opal?"))
    ids = tokenizer(asked + "<|im_start|>assistant\n", return_tensors="pt").input_ids
    assert tokenizer.decode(generated(model, ids)) == "The total distance for Project Opal is 5264.<|im_end|>"


@pytest.mark.law("figures-are-counted-right")
def test_the_card_of_the_sibling_has_the_figures_of_the_files() -> None:
    card = (CHAT_ASSETS / "MODEL_CARD.md").read_text(encoding="utf-8")
    cost = json.loads((CHAT_ASSETS / "training.json").read_text())
    model, _ = load_pocket(CHAT_ASSETS)
    assert f"{sum(weights.numel() for weights in model.parameters()):,} parameters" in card
    minutes = f"{cost['seconds'] / 60:.0f} CPU minutes"
    assert f"{cost['step']} steps, {cost['tokens'] / 1e6:.1f} million tokens, {minutes}" in card
    assert f"ends at {cost['probes'][-1][1]:.2f}" in card


EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "learned_scores.py"


@pytest.mark.spec("PO-THRESHOLD")
def test_the_toy_learns_which_tokens_are_evidence() -> None:
    """Check six new needles: most of their tokens are among the best-scored third."""
    spec = importlib.util.spec_from_file_location("learned_scores", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    scores = toy.learned(samples=12, length=256)
    model, tokenizer = toy.load_pocket()
    kept = []
    for index in range(6):
        sample = toy.draw_sample("needle", tokenizer, 256, index, seed=2)
        X = toy.features(model, sample.context_ids)
        weights = np.concatenate([scores.w_k, scores.w_v, scores.b[:, None]], axis=1)
        best = np.argsort(-np.einsum("gd,gnd->gn", weights, X), axis=1)[:, : 256 // 3]
        kept += [np.isin(np.arange(*sample.needle), row).mean() for row in best]
    assert np.mean(kept) > 0.7
