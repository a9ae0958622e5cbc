"""What the study runs: its questions, the chunks of their conversations, and the selections that all arms share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.measure.studies.archive.pins import Pins, corpus_digest
from conformance.measure.studies.archive.rules import ARMS
from models_integration.archive.library import vocabulary_of
from models_integration.archive.retrieval import lexical
from models_integration.pocket.training.talk import KINDS, Question, chatter, draw_conversation
from models_integration.studies.subject import Subject
from reference.injection.wrappers import slices
from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "CUTS", "FILLERS", "SELECTED", "SLICE", "TALK", "Asked", "Plan", "Talk", "draw_talk", "encoder", "key_of", "pinned",
    "talks_and_pins",
]

SEED = 2026
SELECTED = 12
SLICE = 48
"""Tokens of a slice, at most."""
FILLERS, TALK = 8, 12
"""The most filler chunks and unrelated turns that any arm has."""
CUTS = ("turn", "arbitrary", "sentence")
_EACH, _SENTENCES, _CHATTER = 3, (1, 3), 2

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Asked:
    """A question; `organic` ones stand behind chatter whose words are those of other chunks."""

    question: Question
    text: str
    organic: bool


@dataclass(frozen=True)
class Talk:
    """A conversation: token ids of its chunks in their order by cut, one question of every kind, and filler."""

    index: int
    chunks: Mapping[str, tuple[tuple[int, ...], ...]]
    asked: tuple[Asked, ...]
    fillers: tuple[str, ...]
    talk: tuple[str, ...]


def key_of(talk: Talk, asked: Asked) -> str:
    """The question's name in a pin file."""
    return f"{talk.index}.{asked.question.kind}"


def draw_talk(index: int, encode: Encode, ends: frozenset[int], seed: int) -> Talk:
    """Conversation `index`: 18 turns, values and filler held out of training; two of five questions are organic."""
    rng = np.random.default_rng([seed, index])
    conversation = draw_conversation(rng, _EACH, _SENTENCES, held_out=True)
    turns = tuple(tuple(encode(text)) for text in conversation.turns)
    stream = [token for turn in turns for token in turn]
    cut = {
        name: tuple(tuple(stream[start:stop]) for start, stop in slices(stream, cuts_at, SLICE))
        for name, cuts_at in (("arbitrary", frozenset[int]()), ("sentence", ends))
    }
    asked = []
    for order, kind in enumerate(KINDS):
        question = next(question for question in conversation.questions if question.kind == kind)
        organic = (index + order) % 5 < 2
        before = chatter(rng, _CHATTER, held_out=True) + " " if organic else ""
        asked.append(Asked(question, before + question.text, organic))
    fillers = tuple(chatter(rng, _CHATTER + 1, held_out=True) for _ in range(FILLERS))
    talk = tuple(chatter(rng, _CHATTER, held_out=True) for _ in range(TALK))
    return Talk(index, {"turn": turns, **cut}, tuple(asked), fillers, talk)


def pinned(talks: Sequence[Talk], decode: Callable[[Sequence[int]], str], cut: str) -> Pins:
    """BM25's first chunks of each question among those of its conversation: chosen once, for all arms of a cut."""
    corpus = {f"{talk.index}.{order:02}": ids for talk in talks for order, ids in enumerate(talk.chunks[cut])}
    chosen = {}
    for talk in talks:
        ranked = lexical({f"{talk.index}.{order:02}": decode(ids) for order, ids in enumerate(talk.chunks[cut])})
        for asked in talk.asked:
            chosen[key_of(talk, asked)] = tuple(ranked(asked.text)[:SELECTED])
    return Pins(corpus_digest(corpus), {"ranker": "bm25s", "selected": str(SELECTED), "cut": cut}, chosen)


@dataclass(frozen=True)
class Plan:
    """What is run: conversations from `first` on, four questions each.

    Raises:
        SpecError: for an unknown arm, or no conversations.
    """

    conversations: int
    arms: tuple[str, ...] = tuple(ARMS)
    first: int = 0

    def __post_init__(self) -> None:
        check_choices("arm", self.arms, ARMS)
        if self.conversations < 1:
            raise SpecError("conversations", self.conversations, "must be at least 1")


def encoder(subject: Subject) -> Callable[[str], list[int]]:
    """Ids of a text, without special tokens of the tokenizer's own."""
    return lambda text: list(subject.tokenizer(text, add_special_tokens=False).input_ids)


def talks_and_pins(subject: Subject, plan: Plan) -> tuple[list[Talk], dict[str, Pins]]:
    """The plan's conversations, and the selections of each cut."""
    wanted = range(plan.first, plan.first + plan.conversations)
    talks = [draw_talk(index, encoder(subject), subject.sentence_ends, SEED) for index in wanted]
    decode = vocabulary_of(subject.tokenizer).decode
    return talks, {cut: pinned(talks, decode, cut) for cut in CUTS}
