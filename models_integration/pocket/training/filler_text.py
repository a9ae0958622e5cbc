"""Filler for the pocket model: sentences of a small grammar, split into a training and a held-out part.

The split is by the sentence: a checksum of its text decides, so that no sentence of an evaluation was ever
trained on, while both parts are drawn from the same words.
"""

import zlib

import numpy as np

from models_integration.pocket.training import words
from models_integration.tasks.sentences import DEFAULT_FILLER

__all__ = ["HELD_OUT_EVERY", "filler_sentence", "held_out_filler", "is_held_out"]

HELD_OUT_EVERY = 5
SALAD_SHARE = 0.15
"""Share of training filler that is a random order of words, so that no word order is required of filler."""

_SALAD_WORDS: tuple[str, ...] = tuple(
    sorted({word for sentence in DEFAULT_FILLER for word in sentence.strip(".").split()})
) + tuple(sorted({word for phrase in words.FILLER_OBJECTS + words.FILLER_ENDINGS for word in phrase.split()}))


def is_held_out(sentence: str) -> bool:
    """Whether a filler sentence is reserved for evaluation (one in five)."""
    return zlib.crc32(sentence.encode()) % HELD_OUT_EVERY == 0


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _grammar_sentence(rng: np.random.Generator) -> str:
    clause = _pick(rng, words.FILLER_CLAUSES) + " " if rng.random() < 0.3 else ""
    second = " and " + _pick(rng, words.FILLER_OBJECTS) if rng.random() < 0.2 else ""
    ending = _pick(rng, words.FILLER_ENDINGS)
    core = f"{_pick(rng, words.FILLER_SUBJECTS)} {_pick(rng, words.FILLER_VERBS)} {_pick(rng, words.FILLER_OBJECTS)}"
    text = f"{clause}{core}{second} {ending}".strip()
    mark = "." if rng.random() < 0.94 else _pick(rng, ("!", "?"))
    return text[0].upper() + text[1:] + mark


def _salad_word(rng: np.random.Generator) -> str:
    kind = rng.random()
    if kind < 0.05:
        return str(int(rng.integers(10 ** int(rng.integers(1, 5)))))
    return words.invented_word(rng) if kind < 0.12 else _pick(rng, _SALAD_WORDS)


def _word_salad(rng: np.random.Generator) -> str:
    chosen = [_salad_word(rng) for _ in range(int(rng.integers(5, 14)))]
    return " ".join(chosen) + "."


def filler_sentence(rng: np.random.Generator, held_out: bool) -> str:
    """One filler sentence of the training part, or of the held-out part (never word salad)."""
    if not held_out and rng.random() < SALAD_SHARE:
        return _word_salad(rng)
    while True:
        sentence = _grammar_sentence(rng)
        if is_held_out(sentence) == held_out:
            return sentence


def held_out_filler(seed: int) -> tuple[str, ...]:
    """Held-out sentences: the filler that the model card's figures are measured on."""
    rng = np.random.default_rng(seed)
    return tuple(filler_sentence(rng, held_out=True) for _ in range(200))
