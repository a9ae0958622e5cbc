"""The pocket model's sibling that has seen conversations: its template, its tokenizer, and its training rows.

The template is ChatML's, as the injection paper prints it for Qwen: `<|im_start|>role`, a line feed, the text,
`<|im_end|>`, a line feed. Both markers are one token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from models_integration.pocket.training.batches import ANSWER_DIGIT, ANSWER_WORD, UNSCORED, Batch
from models_integration.pocket.training.talk import Question, chatter, draw_conversation
from models_integration.pocket.training.tokenizer import build_tokenizer

__all__ = ["CLOSE", "OPEN", "PROMPTS", "ChatPlan", "ChatRows", "asked_behind", "chat_tokenizer", "turn"]

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
PROMPTS = ("You are a helpful assistant.", "You are a coding assistant.")
_MORE = (*PROMPTS, " Its", " The partner", "system", "user", "assistant", " assistant")

_RAW_SHARE, _REPLY_SHARE, _CHATTY_SHARE, _TALK_SHARE = 0.2, 0.3, 0.5, 0.2
"""Rows with chunks outside of turns; turns with a reply; questions behind chatter; unrelated talk before questions."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The pocket model's tokenizer with the template's words and markers behind its ids."""
    return build_tokenizer(_MORE, (OPEN, CLOSE))


def turn(role: str, text: str) -> str:
    """A turn in the template."""
    return f"{OPEN}{role}\n{text}{CLOSE}\n"


def asked_behind(question: str) -> str:
    """The user's question, and the opening of the assistant's answer."""
    return turn("user", question) + f"{OPEN}assistant\n"


@dataclass(frozen=True)
class ChatPlan:
    """Rows of `length` tokens: conversations with `each` questions of a kind, some of which are asked."""

    length: int
    each: int
    filler: tuple[int, int]
    questions: int


class ChatRows:
    """Training rows: a conversation, then questions with their answers, which alone are scored."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, held_out: bool = False) -> None:
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._start, self._held_out = int(tokenizer.bos_token_id), held_out

    def batch(
        self, rng: np.random.Generator, plan: ChatPlan, rows: int, choice: bool = False, shared: bool = False,
    ) -> Batch:
        """`rows` rows, cut at the plan's length or padded on the right.

        With `choice`, of each word that had to be found only the first token weighs most: it tells which fact was
        chosen. With `shared`, a name may have two facts.
        """
        ids = np.zeros((rows, plan.length), dtype=np.int64)
        kinds = np.zeros((rows, plan.length), dtype=np.int8)
        for index in range(rows):
            row, row_kinds = self._row(rng, plan, 1 if choice else plan.length, shared)
            ids[index, : len(row)], kinds[index, : len(row)] = row, row_kinds
        return Batch(ids, np.tile(np.arange(plan.length), (rows, 1)), kinds)

    def _row(
        self, rng: np.random.Generator, plan: ChatPlan, weighed: int, shared: bool,
    ) -> tuple[list[int], list[int]]:
        conversation = draw_conversation(rng, plan.each, plan.filler, self._held_out, shared)
        raw = rng.random() < _RAW_SHARE
        ids = [self._start, *self._system(rng)]
        for text in conversation.turns:
            ids += self._encode(text) if raw else self._exchange(rng, text)
        if rng.random() < _TALK_SHARE:
            ids += self._talk(rng)
        kinds = [UNSCORED] * len(ids)
        # Outside of turns nothing says where one begins.
        fair = [question for question in conversation.questions if not (raw and question.kind == "topic")]
        for chosen in rng.permutation(len(fair))[: plan.questions]:
            asked, answered, scored = self._question(rng, fair[int(chosen)], weighed)
            if len(ids) + len(asked) + len(answered) > plan.length:
                break
            ids += asked + answered
            kinds += [UNSCORED] * len(asked) + scored
        return ids[: plan.length], kinds[: plan.length]

    def _system(self, rng: np.random.Generator) -> list[int]:
        kind = rng.random()
        return [] if kind < 0.15 else self._encode(turn("system", PROMPTS[int(kind > 0.7)]))

    def _exchange(self, rng: np.random.Generator, text: str) -> list[int]:
        reply = turn("assistant", chatter(rng, 1, self._held_out)) if rng.random() < _REPLY_SHARE else ""
        return [*self._encode(turn("user", text)), *self._encode(reply)]

    def _talk(self, rng: np.random.Generator) -> list[int]:
        count = int(rng.integers(1, 5))
        return [token for _ in range(count) for token in self._exchange(rng, chatter(rng, 2, self._held_out))]

    def _question(
        self, rng: np.random.Generator, question: Question, weighed: int,
    ) -> tuple[list[int], list[int], list[int]]:
        before = chatter(rng, 2, self._held_out) + " " if rng.random() < _CHATTY_SHARE else ""
        answer = self._encode(question.answer + CLOSE)
        scored = self._scored(answer, question.retrieved, weighed)
        return self._encode(asked_behind(before + question.text)), answer, scored

    def _scored(self, answer: Sequence[int], retrieved: Sequence[str], weighed: int) -> list[int]:
        """What had to be found weighs most; it is looked for from the end, as the partner's name comes twice."""
        kinds, stop = [ANSWER_WORD] * len(answer), len(answer)
        for word in reversed(retrieved):
            ids = self._encode(" " + word)
            starts = range(stop - len(ids) + 1)
            stop = max(start for start in starts if list(answer[start : start + len(ids)]) == ids)
            kinds[stop : stop + min(weighed, len(ids))] = [ANSWER_DIGIT] * min(weighed, len(ids))
        return kinds
