"""Black-box test of a server that accepts only text: does the server evict tokens?

The witness searches prompts whose greedy answer changes under every eviction of `EVICTIONS`, and does not depend on
rounding. Then the witness compares the greedy answers of the server with those of the full cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from models_integration import compact, decide, observe, policy_from_name
from models_integration.cache.retained_cache import RetainedCache
from models_integration.session.verbs import read

__all__ = ["EVICTIONS", "MARGINS", "Question", "evicts", "questions"]

EVICTIONS = (("streamingllm", 0.3), ("streamingllm", 0.6), ("snapkv", 0.3), ("snapkv", 0.6), ("knorm", 0.6))
"""Policies and budgets that must change the answer to each prompt."""
MARGINS = {"float32": 0.02, "bfloat16": 2.0}
"""Smallest difference between the two largest logits of each answer token, by dtype of the server."""
ANSWER, QUESTIONS, TRIES, WORDS = 24, 8, 300, 60
"""Number of answer tokens, of prompts, of prompts that are tried, and of words that the prompt begins with."""


@dataclass(frozen=True)
class Question:
    """A prompt with the greedy answer of the full cache.

    Attributes:
        text: the prompt.
        answer: the answer with the full cache.
        first: text of the first answer token, which the server chooses before an eviction after the prompt.
    """

    text: str
    answer: str
    first: str


def questions(
    model: PreTrainedModel, tokenizer: Any, dtype: str = "float32", seed: int = 0, count: int = QUESTIONS,
) -> list[Question]:
    """Return prompts whose answers change under all `EVICTIONS`. There can be fewer than `count`.

    Args:
        model: the weights that the server runs, in float32.
        tokenizer: tokenizer of the model. The server must tokenize in the same way.
        dtype: dtype of the server's computation.
        seed: random seed of the prompts.
        count: number of prompts.
    """
    result, words = list[Question](), _words(tokenizer)
    rng = np.random.default_rng(seed)
    for text in (_text(words, rng) for _ in range(TRIES)):
        question = _question(model, tokenizer, text, MARGINS[dtype])
        result += [] if question is None else [question]
        if len(result) == count:
            break
    return result


def _words(tokenizer: Any) -> list[str]:
    """Return the words of the vocabulary, each with a space before."""
    decoded = (tokenizer.decode([token]) for token in range(len(tokenizer)))
    return sorted({one for one in decoded if one[:1] == " " and one[1:].isascii() and one[1:].isalpha()})


def _text(words: Sequence[str], rng: np.random.Generator) -> str:
    """Return a random text that begins again at the end, so that the answer depends on the first occurrence."""
    first, middle = ([words[at] for at in rng.integers(len(words), size=WORDS)] for _ in range(2))
    return "".join([*first, *middle, *first[: WORDS // 4]]).strip()


def _question(model: PreTrainedModel, tokenizer: Any, text: str, margin: float) -> Question | None:
    """Return the question of a text, or None if its answer depends on rounding, or not on an eviction."""
    observed = observe(model, torch.tensor([tokenizer(text).input_ids]))
    assert observed.logits is not None
    tokens = list[int]()
    for row in _greedy(model, observed):
        best = row.topk(2)
        if best.values[0] - best.values[1] < margin or int(best.indices[0]) in tokenizer.all_special_ids:
            return None
        tokens.append(int(best.indices[0]))
    for name, budget in EVICTIONS:
        policy = policy_from_name(name, budget)
        if _predicted(model, compact(observed.cache, decide(policy.on(model), observed)), tokens) == tokens[1:]:
            return None
    return Question(text, tokenizer.decode(tokens), tokenizer.decode(tokens[:1]))


def _greedy(model: PreTrainedModel, observed: Any) -> Iterator[torch.Tensor]:
    """Yield the logits of each token of the greedy answer, without a change of the observed cache."""
    everything = policy_from_name("fullcache", 1.0).on(model)
    cache, row = compact(observed.cache, decide(everything, observed)), observed.logits[0, -1]
    for _ in range(ANSWER):
        yield row
        logits = read(model, cache, row.argmax()[None, None]).logits
        assert logits is not None
        row = logits[0, -1]


def _predicted(model: PreTrainedModel, cache: RetainedCache, tokens: Sequence[int]) -> list[int]:
    """Return the greedy token after each answer token except the last one."""
    logits = read(model, cache, torch.tensor([list(tokens[:-1])]), last=len(tokens) - 1).logits
    assert logits is not None
    predicted: list[int] = logits[0].argmax(dim=-1).tolist()
    return predicted


def evicts(asked: Sequence[Question], answer: Callable[[str, int], str]) -> tuple[bool | None, str]:
    """Return True if a server evicts, False if it does not, None if that is undecided, and the reason.

    Args:
        asked: result of `questions`.
        answer: function that returns the greedy answer of the server to a prompt, with a number of tokens.
    """
    if len(asked) < 2:
        return None, f"{len(asked)} prompts have an answer that changes under every eviction, and 2 are needed"
    answers = [answer(one.text, ANSWER).strip() for one in asked]
    different = [(one, text) for one, text in zip(asked, answers, strict=True) if text != one.answer.strip()]
    about = f"{len(different)} of {len(asked)} answers differ from those of the full cache"
    for one, text in different:
        if not text.startswith(one.first.strip()):
            return None, f"{about}; an answer begins with {text[:20]!r}, not with {one.first!r}: different weights"
    if len(different) == 1:
        return None, about
    return bool(different), about
