"""The pocket model as it is shipped: it loads, it is small, it answers, and its card tells the truth."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models_integration.pocket import ASSETS, load_pocket
from models_integration.pocket.training.batches import ANSWER_DIGIT, UNSCORED, RowMaker, RowPlan
from models_integration.pocket.training.card import CARD_FILE, render_card
from models_integration.pocket.training.curriculum import STAGES, TOTAL_STEPS, draw_plan, rate_at, stage_at
from models_integration.pocket.training.evaluate import (
    Cell,
    answer,
    draw_held_out,
    evaluation_fillers,
    read_cells,
    table,
)
from models_integration.pocket.training.facts import HELD_OUT_VALUES, draw_facts, draw_values
from models_integration.pocket.training.filler_text import filler_sentence, held_out_filler, is_held_out
from models_integration.pocket.training.tokenizer import build_tokenizer
from models_integration.pocket.training.train import Trainer
from models_integration.tasks import DEFAULT_FILLER, TASKS, score
from models_integration.tasks.assembly import decode

pytestmark = pytest.mark.law("as-it-is-described")

Pocket = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]

MEBIBYTE = 2**20
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


def test_the_shipped_tokenizer_is_what_the_script_builds(pocket: Pocket) -> None:
    assert build_tokenizer().get_vocab() == pocket[1].get_vocab()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("distractors", [0, 3])
def test_it_answers_held_out_samples_with_its_full_cache(pocket: Pocket, task: str, distractors: int) -> None:
    model, tokenizer = pocket
    for filler in evaluation_fillers().values():
        samples = draw_held_out(tokenizer, task, filler, distractors, 512, 5)
        assert all(score(tokenizer, answer(model, tokenizer, sample), sample) for sample in samples)


def test_the_answer_is_a_full_sentence_that_ends(pocket: Pocket) -> None:
    model, tokenizer = pocket
    sample = draw_held_out(tokenizer, "needle", DEFAULT_FILLER, 0, 256, 1)[0]
    generated = answer(model, tokenizer, sample)
    assert generated[-1] == tokenizer.eos_token_id
    start, stop = sample.needle
    fact = decode(tokenizer, sample.context_ids[start:stop]).strip()
    assert decode(tokenizer, generated).strip() == fact


def test_a_model_that_has_not_seen_the_value_does_not_know_it(pocket: Pocket) -> None:
    model, tokenizer = pocket
    sample = draw_held_out(tokenizer, "needle", DEFAULT_FILLER, 3, 512, 1)[0]
    start, stop = sample.needle
    blank = tuple(sample.context_ids[0] if start <= i < stop else t for i, t in enumerate(sample.context_ids))
    without = type(sample)(sample.task, blank, sample.question_ids, sample.expected, sample.needle)
    assert not score(tokenizer, answer(model, tokenizer, without), without)


def test_training_never_sees_held_out_values_or_filler() -> None:
    rng = np.random.default_rng(0)
    held_out = set(HELD_OUT_VALUES)
    assert 800 < len(held_out) < 1000
    assert not held_out & set(draw_values(rng, 500))
    assert not held_out & {fact.value for _ in range(50) for fact in draw_facts(rng, 6, 0.5)}
    trained = {filler_sentence(rng, held_out=False) for _ in range(2000)}
    assert not trained & set(held_out_filler(1))
    assert not trained & set(DEFAULT_FILLER)
    assert all(is_held_out(sentence) for sentence in held_out_filler(2))


def test_rows_score_only_the_digits_of_answers_and_positions_never_fall() -> None:
    tokenizer = build_tokenizer()
    maker = RowMaker(tokenizer, 0, pool=200)
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids, positions, kinds = maker.row(rng, RowPlan(256, (1, 5), 3, span=4096, gap_share=1.0))
        assert len(ids) == len(positions) == len(kinds) <= 256
        assert (np.diff(positions) >= 1).all()
        assert positions[-1] < 4096
        scored = [token for token, kind in zip(ids, kinds, strict=True) if kind == ANSWER_DIGIT]
        assert len(scored) % 4 == 0
        assert decode(tokenizer, scored).replace(" ", "").isdigit()
        first_question = ids.index(tokenizer.encode(" Question", add_special_tokens=False)[0])
        digits = [i for i, token in enumerate(ids[:first_question]) if decode(tokenizer, [token]).strip().isdigit()]
        assert sum(kinds[i] == UNSCORED for i in digits) >= 4


def test_a_row_s_seed_decides_it() -> None:
    plan = STAGES[0].plans[0][1]
    first = RowMaker(build_tokenizer(), 0, pool=200).batch(np.random.default_rng(5), plan, 3)
    again = RowMaker(build_tokenizer(), 0, pool=200).batch(np.random.default_rng(5), plan, 3)
    assert (first.ids == again.ids).all()
    assert (first.positions == again.positions).all()


def test_the_curriculum_covers_64_to_4096_tokens() -> None:
    lengths = [plan.length for stage in STAGES for _, plan in stage.plans]
    assert min(lengths) <= 64
    assert max(lengths) >= 4096
    assert stage_at(TOTAL_STEPS - 1)[0] is STAGES[-1]
    assert rate_at(0) < rate_at(100)
    assert draw_plan(np.random.default_rng(0), STAGES[0])[1] >= 1


@pytest.mark.law("saved-is-what-was")
def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = Trainer(tmp_path / "whole", None, pool=100)
    whole.step()
    parts = Trainer(tmp_path / "parts", None, pool=100)
    parts.step()
    parts.save()
    resumed = Trainer(tmp_path / "parts", None, pool=100)
    assert resumed.progress.step == 1
    whole.step()
    resumed.step()
    for expected, found in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.law("figures-are-counted-right")
def test_the_card_states_the_measured_figures() -> None:
    assert (ASSETS / CARD_FILE).read_text() == render_card(ASSETS)


@pytest.mark.law("figures-are-counted-right")
def test_the_measured_figures_reach_the_target() -> None:
    for cell in read_cells():
        assert cell.samples == 60
        if cell.length <= 2048:
            assert cell.accuracy >= (0.9 if cell.distractors else 0.95)


@pytest.mark.law("figures-are-counted-right")
def test_the_table_has_one_column_a_length() -> None:
    cells = [Cell("needle", "default", 0, length, 4, 3) for length in (512, 1024)]
    assert table(cells).splitlines() == [
        "| task | filler | distractors | 512 | 1024 |",
        "|---|---|---|---|---|",
        "| needle | default | 0 | 0.750 | 0.750 |",
    ]
