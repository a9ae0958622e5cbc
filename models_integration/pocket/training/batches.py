"""Training rows: facts among filler, then questions with their answers in full sentences.

A row is scored by kinds: the value's digits in an answer weigh most, the words around them little, and running
text a trifle. A value's first statement is never scored, because nothing predicts it.

Positions may jump between sentences. A short row then teaches long distances, and the model meets what it
will see after eviction: survivors at their original positions with nothing in between.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from models_integration.pocket.training.facts import Fact, draw_facts, draw_topic, draw_values, make_fact
from models_integration.pocket.training.filler_text import filler_sentence
from models_integration.tasks.sentences import FRAMING_SENTENCE, QUESTION_FRAME

__all__ = ["ANSWER_DIGIT", "ANSWER_WORD", "FILLER_POOL", "TEXT", "UNSCORED", "Batch", "RowMaker", "RowPlan"]

UNSCORED, TEXT, ANSWER_WORD, ANSWER_DIGIT = 0, 1, 2, 3
FILLER_POOL = 20_000
"""Filler sentences that a row maker draws once and then chooses from."""

_OPENING_ROOM = 12
"""Tokens left free for the opening token and the framing sentence."""

_FRAMED_SHARE = 0.3
"""Share of rows that open with the framing sentence of the delayed-association task."""


@dataclass(frozen=True)
class RowPlan:
    """What a row is made of.

    Attributes:
        length: tokens in the row.
        facts: smallest and largest number of facts.
        questions: largest number of questions asked at the end.
        one_form_share: how often all facts share one sentence form.
        topic_share: how often a delayed-association topic with its mentions is among them.
        filled: smallest and largest share of the room for filler that is used.
        span: positions that the row may stretch to; not above `length` for no jumps.
        gap_share: how often the positions of a row jump at all.
    """

    length: int
    facts: tuple[int, int]
    questions: int
    one_form_share: float = 0.5
    topic_share: float = 0.2
    filled: tuple[float, float] = (0.0, 1.0)
    span: int = 0
    gap_share: float = 0.5


@dataclass(frozen=True)
class Batch:
    """Rows of equal length: token ids, positions and the kind of every token, each (rows, length)."""

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int8]


@dataclass(frozen=True)
class _Piece:
    """A run of tokens that stays together, with the kind of each token."""

    ids: list[int]
    kinds: list[int]


class RowMaker:
    """Makes rows from seeded generators: of training text, or of held-out filler and values."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, seed: int, held_out: bool = False, pool: int = FILLER_POOL,
    ) -> None:
        self._tokenizer = tokenizer
        self._held_out = held_out
        self._encode = lru_cache(maxsize=200_000)(self._encode_text)
        pool_rng = np.random.default_rng([seed, 1])
        self._filler = [self._text(" " + filler_sentence(pool_rng, held_out)) for _ in range(pool)]

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _as_first_word(self, token: int) -> int:
        """The same word without the space before it, as it opens a text, where the vocabulary has it."""
        spelled = str(self._tokenizer.convert_ids_to_tokens(token)).removeprefix("Ġ")
        return int(self._tokenizer.get_vocab().get(spelled, token))

    def _text(self, text: str) -> _Piece:
        ids = list(self._encode(text))
        return _Piece(ids, [TEXT] * len(ids))

    def _statement(self, fact: Fact, scored: bool) -> _Piece:
        before, after = self._encode(" " + fact.before), self._encode(fact.after)
        digits = self._encode_text(f" {fact.value}")
        word, digit = (ANSWER_WORD, ANSWER_DIGIT) if scored else (TEXT, UNSCORED)
        kinds = [word] * len(before) + [digit] * len(digits) + [word] * len(after)
        return _Piece([*before, *digits, *after], kinds)

    def _question(self, fact: Fact) -> _Piece:
        asked = self._text(" " + QUESTION_FRAME.format(question=fact.question))
        answer = self._statement(fact, scored=True)
        end = int(self._tokenizer.eos_token_id)
        return _Piece([*asked.ids, *answer.ids, end], [UNSCORED] * len(asked.ids) + answer.kinds + [ANSWER_WORD])

    def _facts_and_mentions(self, rng: np.random.Generator, plan: RowPlan) -> tuple[list[Fact], list[str]]:
        count = int(rng.integers(plan.facts[0], plan.facts[1] + 1))
        facts = draw_facts(rng, count, plan.one_form_share, self._held_out)
        if rng.random() >= plan.topic_share:
            return facts, []
        topic, mentions = draw_topic(rng)
        fact = make_fact(topic.fact, topic.fact.key, draw_values(rng, 1, self._held_out)[0])
        others = [other for other in facts if other.question != fact.question]
        return [fact, *others], mentions

    def _context(
        self, rng: np.random.Generator, plan: RowPlan, facts: list[Fact], mentions: list[str], room: int
    ) -> list[_Piece]:
        pieces = [self._statement(fact, scored=False) for fact in facts]
        pieces += [self._text(" " + mention) for mention in mentions]
        room -= sum(len(piece.ids) for piece in pieces)
        room = int(room * rng.uniform(*plan.filled))
        while room > 0:
            chosen = self._filler[int(rng.integers(len(self._filler)))]
            room -= len(chosen.ids)
            if room >= 0:
                pieces.append(chosen)
        rng.shuffle(pieces)
        if rng.random() < _FRAMED_SHARE:
            pieces.insert(0, self._text(" " + FRAMING_SENTENCE))
        return pieces

    def row(self, rng: np.random.Generator, plan: RowPlan) -> tuple[list[int], list[int], list[int]]:
        """One row: ids, positions and kinds, at most `plan.length` tokens each."""
        facts, mentions = self._facts_and_mentions(rng, plan)
        asked = [facts[int(i)] for i in rng.permutation(len(facts))[: plan.questions]]
        questions = [self._question(fact) for fact in asked]
        room = plan.length - _OPENING_ROOM - sum(len(piece.ids) for piece in questions)
        context = self._context(rng, plan, facts, mentions, room)
        start = _Piece([int(self._tokenizer.bos_token_id)], [UNSCORED])
        pieces = [start, *context, *questions]
        ids = [token for piece in pieces for token in piece.ids][: plan.length]
        ids[1] = self._as_first_word(ids[1]) if rng.random() < 0.5 else ids[1]
        kinds = [kind for piece in pieces for kind in piece.kinds][: plan.length]
        positions = _positions(rng, plan, [len(piece.ids) for piece in pieces], len(context))
        return ids, positions[: plan.length], kinds

    def batch(self, rng: np.random.Generator, plan: RowPlan, rows: int) -> Batch:
        """Rows, padded on the right with unscored tokens."""
        ids = np.zeros((rows, plan.length), dtype=np.int64)
        positions = np.zeros((rows, plan.length), dtype=np.int64)
        kinds = np.zeros((rows, plan.length), dtype=np.int8)
        for index in range(rows):
            row_ids, row_positions, row_kinds = self.row(rng, plan)
            ids[index, : len(row_ids)] = row_ids
            positions[index, : len(row_ids)] = row_positions
            kinds[index, : len(row_ids)] = row_kinds
        return Batch(ids, positions, kinds)


def _positions(rng: np.random.Generator, plan: RowPlan, sizes: list[int], boundaries: int) -> list[int]:
    """Absolute positions that jump only before the first `boundaries + 1` pieces after the start."""
    gaps = np.zeros(len(sizes), dtype=np.int64)
    spare = plan.span - sum(sizes)
    if spare > 0 and rng.random() < plan.gap_share:
        total = int(spare * rng.random())
        shares = rng.dirichlet(np.full(boundaries + 1, 0.3))
        gaps[1 : boundaries + 2] = rng.multinomial(total, shares)
    starts = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return [int(start) + offset for start, size in zip(starts, sizes, strict=True) for offset in range(size)]
