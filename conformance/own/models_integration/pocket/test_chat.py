"""The pocket model's sibling as it is shipped, and the conversations that it was trained on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models_integration.pocket import ASSETS, CHAT_ASSETS, load_pocket, load_pocket_tokenizer
from models_integration.pocket.training.batches import ANSWER_DIGIT, UNSCORED
from models_integration.pocket.training.chat import (
    CLOSE,
    OPEN,
    PROMPTS,
    ChatPlan,
    ChatRows,
    asked_behind,
    chat_tokenizer,
    turn,
)
from models_integration.pocket.training.chat_train import RATES, STEPS, ChatTrainer, new_sibling, rate_at, stage_at
from models_integration.pocket.training.facts import is_held_out_value
from models_integration.pocket.training.talk import KINDS, draw_conversation

pytestmark = pytest.mark.law("as-it-is-described")

PLAN = ChatPlan(512, 1, (0, 1), 4)


def test_the_shipped_files_are_small_and_are_the_sibling() -> None:
    assert sum(path.stat().st_size for path in CHAT_ASSETS.iterdir()) < 2.5 * 2**20
    model, tokenizer = load_pocket(CHAT_ASSETS)
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 4
    assert tokenizer.get_vocab() == chat_tokenizer().get_vocab()
    assert json.loads((CHAT_ASSETS / "training.json").read_text())["step"] == STEPS


def test_the_pocket_models_ids_stay_and_markers_are_one_id() -> None:
    chat, pocket = chat_tokenizer(), load_pocket_tokenizer(ASSETS)
    known = chat.get_vocab()
    assert {word: known[word] for word in pocket.get_vocab()} == pocket.get_vocab()
    ids = chat(turn("user", "The panel met."), add_special_tokens=False).input_ids
    opening, closing = (chat.convert_tokens_to_ids(marker) for marker in (OPEN, CLOSE))
    assert [ids.count(opening), ids.count(closing), ids[0]] == [1, 1, opening]
    assert chat.decode(ids) == "<|im_start|>user\nThe panel met.<|im_end|>\n"
    for text in (*PROMPTS, "user\n", "assistant\n"):
        assert len(chat(text, add_special_tokens=False).input_ids) <= 6


def test_it_starts_as_the_pocket_model() -> None:
    """The layer that is added adds nothing at first; tokens that both know get the same logits."""
    pocket, tokenizer = load_pocket()
    ids = tokenizer("The secret code for Project Aurora is 7492.", return_tensors="pt").input_ids
    with torch.no_grad():
        wanted, found = pocket(ids).logits, new_sibling()(ids).logits
    assert torch.equal(found[..., : wanted.shape[-1]], wanted)


def test_it_answers_in_a_conversation() -> None:
    model, tokenizer = load_pocket(CHAT_ASSETS)
    turns = ("The panel noted Project Fox. Its total distance is 3019.", "The total distance for Project Opal is 5264.")
    text = turn("system", PROMPTS[0]) + "".join(turn("user", one) for one in turns)
    asked = text + asked_behind("What is the total distance for Project Opal?")
    ids = tokenizer(asked, return_tensors="pt").input_ids
    with torch.no_grad():
        generating: Any = model  # some versions declare the mixin's self in a way that mypy refuses
        answer = generating.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
    said = tokenizer.decode(answer[0, ids.shape[1] :])
    assert said == "The total distance for Project Opal is 5264." + CLOSE


@pytest.mark.parametrize("each", [1, 2, 3])
def test_values_are_stated_once_and_held_out_ones_never_in_training(each: int) -> None:
    for seed in range(20):
        held_out = bool(seed % 2)
        conversation = draw_conversation(np.random.default_rng(seed), each, (0, 2), held_out, shared=seed % 3 == 0)
        assert len(conversation.turns) == 6 * each
        assert [question.kind for question in conversation.questions] == [
            kind for _ in range(each) for kind in ("plain", "topic", "update", "chain")
        ]
        assert len({question.text for question in conversation.questions}) == 4 * each
        for question in conversation.questions:
            stated = [at for at, text in enumerate(conversation.turns) if question.value in text]
            assert stated == [question.turn]
            assert is_held_out_value(int(question.value)) == held_out
    assert set(KINDS) == {"plain", "topic", "update", "chain"}


def test_rows_score_what_had_to_be_found() -> None:
    tokenizer = chat_tokenizer()
    for choice, digits in ((False, 4), (True, 1)):
        batch = ChatRows(tokenizer).batch(np.random.default_rng(3), PLAN, 4, choice)
        assert batch.ids.shape == batch.kinds.shape == (4, 512)
        for ids, kinds in zip(batch.ids, batch.kinds, strict=True):
            found = tokenizer.decode(ids[kinds == ANSWER_DIGIT])
            assert sum(letter.isdigit() for letter in found) in [digits * asked for asked in (3, 4)]
            opening = str(tokenizer.decode(ids[: int(np.argmax(kinds != UNSCORED))]))
            assert opening.startswith("<bos>")
            assert opening.endswith(f"{OPEN}assistant\n")


@pytest.mark.law("saved-is-what-was")
def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Two steps in one run, and one step in each of two, give the same weights."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    whole = ChatTrainer(once)
    whole.step()
    whole.step()
    first = ChatTrainer(twice)
    first.step()
    first.save()
    second = ChatTrainer(twice)
    second.step()
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, second.model.state_dict()[name]), name


def test_the_schedule_covers_every_step() -> None:
    assert RATES[-1][0] == STEPS
    assert all(0 < rate_at(step) <= RATES[0][1] for step in range(0, STEPS, 50))
    assert len(stage_at(STEPS - 1).plans) == 4
    with pytest.raises(ValueError, match="past the end"):
        stage_at(STEPS)


@pytest.mark.law("figures-are-counted-right")
def test_the_card_has_the_figures_of_the_files() -> None:
    card = (CHAT_ASSETS / "MODEL_CARD.md").read_text(encoding="utf-8")
    cost = json.loads((CHAT_ASSETS / "training.json").read_text())
    model, _ = load_pocket(CHAT_ASSETS)
    assert f"{sum(weights.numel() for weights in model.parameters()):,} parameters" in card
    minutes = f"{cost['seconds'] / 60:.0f} CPU minutes"
    assert f"{cost['step']} steps, {cost['tokens'] / 1e6:.1f} million tokens, {minutes}" in card
    assert f"ends at {cost['probes'][-1][1]:.2f}" in card
