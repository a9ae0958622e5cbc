"""Conversations for the decode study: a prompt, a stream, and eight facts, one per stratum."""

from dataclasses import dataclass

import numpy as np

from models_integration.pocket.facts import HELD_OUT_VALUES
from models_integration.tasks import DEFAULT_FILLER, TaskTokenizer
from models_integration.tasks.assembly import Anchor, assemble, joiner
from models_integration.tasks.multikey import draw_value
from models_integration.tasks.sample import encode, generator
from models_integration.tasks.templates import NEEDLE_TEMPLATES, QUESTION_FRAME
from spec.errors import SpecError

__all__ = ["CONTROL", "PILOT", "PROMPT", "STRATA", "Conversation", "Question", "draw_conversation"]

PROMPT = 512
"""Tokens of the prompt."""
PILOT = 100_000
"""Conversations from this number on are for calibration only."""
CONTROL = "control"
STRATA = ("prompt 1", "prompt 2", "prompt 3", "quarter 1", "quarter 2", "quarter 3", "quarter 4", CONTROL)

_RECENT = 128
_LONGEST = 24
"""Room for one fact's sentence."""


@dataclass(frozen=True)
class Question:
    """What is asked at the end, and the sentence that answers it, up to the last digit of the value."""

    stratum: str
    ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """Token ids, of which the first PROMPT are one forward and the others decode steps, and the questions."""

    ids: tuple[int, ...]
    questions: tuple[Question, ...]


def draw_conversation(tokenizer: TaskTokenizer, index: int, tokens: int) -> Conversation:
    """Make conversation `index` with a stream of `tokens` tokens; the same arguments give the same one.

    Raises:
        SpecError: for a stream without room for its facts, or a negative index.
    """
    if tokens < 6 * _RECENT:
        raise SpecError("tokens", tokens, f"must be at least {6 * _RECENT}, to hold the facts of the stream apart")
    rng = generator((2026, index))
    subjects = [(template, key) for template in NEEDLE_TEMPLATES for key in (template.key, *template.other_keys)]
    anchors, questions = [], []
    used: list[int] = []
    for stratum, which in zip(STRATA, rng.permutation(len(subjects)), strict=False):
        template, key = subjects[int(which)]
        used.append(draw_value(rng, HELD_OUT_VALUES, used))
        low, high = _range(stratum, tokens)
        anchors.append(Anchor(template.state(used[-1], key), float(rng.uniform(low, high)) / (PROMPT + tokens)))
        asked = joiner(tokenizer) + QUESTION_FRAME.format(question=template.ask(key))
        before, _, _ = template.state("{}", key).partition(" {}")
        answer = encode(tokenizer, f" {before}") + encode(tokenizer, f" {used[-1]}")
        questions.append(Question(stratum, encode(tokenizer, asked), answer))
    text = assemble(tokenizer, anchors, DEFAULT_FILLER, PROMPT + tokens, np.random.default_rng(rng))
    return Conversation(text.ids, tuple(questions))


def _range(stratum: str, tokens: int) -> tuple[int, int]:
    """Positions between which a stratum's fact begins."""
    kind, _, number = stratum.partition(" ")
    if kind == "prompt":
        return 16, PROMPT - _RECENT - _LONGEST
    if kind == CONTROL:
        return PROMPT + tokens - 96, PROMPT + tokens - 2 * _LONGEST
    low, high = PROMPT + (int(number) - 1) * tokens // 4, PROMPT + int(number) * tokens // 4 - _LONGEST
    return low, min(high, PROMPT + tokens - _RECENT - _LONGEST)
