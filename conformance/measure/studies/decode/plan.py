"""What the decode study runs: conversations of a prompt, a stream and eight facts, one per stratum, and the plan."""

from dataclasses import dataclass

import numpy as np

from conformance.measure.studies.decode.rules import ARMS, T_BREATH
from models_integration.pocket.training.facts import HELD_OUT_VALUES
from models_integration.studies.subject import Subject
from models_integration.tasks import DEFAULT_FILLER, TaskTokenizer
from models_integration.tasks.assembly import Anchor, assemble, encode, joiner
from models_integration.tasks.samples import draw_value, generator
from models_integration.tasks.sentences import NEEDLE_TEMPLATES, QUESTION_FRAME
from spec import SPEC_VERSION
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = ["CONTROL", "PROMPT", "STRATA", "Conversation", "Plan", "Question", "draw_conversation"]

PROMPT = 512
"""Tokens of the prompt."""
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


@dataclass(frozen=True)
class Plan:
    """What is run.

    Raises:
        SpecError: for an unknown arm, no samples, or a stream that does not end with a breath.
    """

    samples: int = 100
    tokens: int = 2048
    arms: tuple[str, ...] = tuple(ARMS)
    first: int = 0

    def __post_init__(self) -> None:
        check_choices("arm", self.arms, ARMS)
        if self.samples < 1:
            raise SpecError("samples", self.samples, "must be at least 1")
        if self.tokens % T_BREATH:
            raise SpecError("tokens", self.tokens, f"must be a multiple of T_breath = {T_BREATH}")

    def identity(self, index: int, subject: Subject) -> dict[str, str | int | list[str]]:
        """What a stored row must share to be about this conversation."""
        return {
            "conversation": index, "tokens": self.tokens, "arms": list(self.arms), "model": subject.name,
            "backend": subject.backend, "spec_version": SPEC_VERSION,
        }
