"""Pairs of one JSON object, of which several are asked for one by one: the shape of SCBench's `kv`.

Each question is a sample of its own over the same context (SCBench's mode `scdq`: the context is read and compacted
once, each question is answered from there). Instruction and question are InfiniteBench's and SCBench's; under a chat
template the question's second line opens the answer.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from models_integration.tasks.assembly import TaskTokenizer, encode, joiner
from models_integration.tasks.chat import Frame, bare
from models_integration.tasks.keys_in_prose import check_unprotected
from models_integration.tasks.metrics import CONTAINS
from models_integration.tasks.prose import Prose
from models_integration.tasks.samples import Sample, generator
from spec.errors import SpecError
from spec.parameters import PAPER

__all__ = ["FORMS", "key_value_samples"]

FORMS = ("uuid", "short")
"""SCBench's own pairs; or six letters with four digits, which small models can answer."""
_INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below."
_QUESTION, _OPENING = 'Key: "{key}"', "The value associated with the specified key is:"


@dataclass(frozen=True)
class _Pair:
    key: str
    value: str
    before: tuple[int, ...]
    ids: tuple[int, ...]


def key_value_samples(
    tokenizer: TaskTokenizer, prose: Prose, length: int, questions: int, index: int, seed: int, *,
    form: str = "short", frame: Frame | None = None,
) -> tuple[Sample, ...]:
    """The questions of context number `index`, in the order in which they are asked.

    The pairs that are asked for come from equal parts of the object, one from each, outside sinks and recent window.

    Args:
        tokenizer: any `transformers` tokenizer.
        prose: of which the few tokens before the instruction are, that make the length exact.
        length: context tokens, the frame's opening included.
        questions: how many, at least 1.
        index: which context.
        seed: of all contexts.
        form: of keys and values.
        frame: of a chat template; none by default.

    Raises:
        SpecError: for an unknown form, no question, or a length that has no pair for each question.
    """
    if form not in FORMS:
        raise SpecError("form", form, f"must be one of {', '.join(FORMS)}")
    if questions < 1:
        raise SpecError("questions", questions, "must be at least 1")
    around = bare(tokenizer) if frame is None else frame
    rng = generator((seed, FORMS.index(form), length, index))
    head, foot = (encode(tokenizer, text) for text in (f"\n\n{_INSTRUCTION}\n\n{{", "}\n\n"))
    room = length - len(around.opening) - len(head) - len(foot)
    pairs = _pairs(tokenizer, rng, form, room)
    rest = room - sum(len(pair.before) + len(pair.ids) for pair in pairs)
    first = length * prose.window(length, index, seed)
    before = (*around.opening, *prose.tokens[first : first + rest], *head)
    ids, spans = _joined(before, pairs)
    context = (*ids, *foot)
    return tuple(
        _sample(tokenizer, context, pairs[at], spans[at], around, form, at / len(pairs))
        for at in _asked(rng, spans, questions, length)
    )


def _pairs(tokenizer: TaskTokenizer, rng: np.random.Generator, form: str, room: int) -> list[_Pair]:
    """As many pairs with different keys as there is room for, a comma before each but the first."""
    found: list[_Pair] = []
    used, comma = set[str](), encode(tokenizer, ",\n")
    while True:
        key, value = _drawn(rng, form)
        if key in used:
            continue
        pair = _Pair(key, value, comma if found else (), encode(tokenizer, f'"{key}": "{value}"'))
        room -= len(pair.before) + len(pair.ids)
        if room < 0:
            return found
        used.add(key)
        found.append(pair)


def _joined(before: Sequence[int], pairs: Sequence[_Pair]) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens with all pairs behind them, and where each pair stands."""
    ids, spans = list(before), list[tuple[int, int]]()
    for pair in pairs:
        ids.extend(pair.before)
        spans.append((len(ids), len(ids) + len(pair.ids)))
        ids.extend(pair.ids)
    return ids, spans


def _drawn(rng: np.random.Generator, form: str) -> tuple[str, str]:
    if form == "uuid":
        key, value = (str(UUID(bytes=rng.bytes(16), version=4)) for _ in range(2))
        return key, value
    letters = rng.integers(len(string.ascii_lowercase), size=6)
    return "".join(string.ascii_lowercase[int(at)] for at in letters), str(int(rng.integers(1000, 10_000)))


def _asked(
    rng: np.random.Generator, spans: Sequence[tuple[int, int]], questions: int, length: int
) -> list[int]:
    """One pair of each part, in a random order."""
    free = [
        at for at, (start, stop) in enumerate(spans)
        if start >= PAPER.N_sink and stop <= length - PAPER.W_recent
    ]
    if len(free) < questions:
        raise SpecError("length", length, f"has {len(free)} pairs outside sinks and window, for {questions} questions")
    chosen = [int(rng.choice(part)) for part in np.array_split(np.array(free), questions)]
    return [chosen[int(at)] for at in rng.permutation(questions)]


def _sample(
    tokenizer: TaskTokenizer, context: tuple[int, ...], pair: _Pair, span: tuple[int, int], frame: Frame, form: str,
    depth: float,
) -> Sample:
    check_unprotected(span, len(context))
    space = joiner(tokenizer)
    question = _QUESTION.format(key=pair.key) + (frame.closing or "\n") + _OPENING
    return Sample(
        task=f"key_value_{form}", context_ids=context, question_ids=encode(tokenizer, question), expected=pair.value,
        needle=span, metadata={"key": pair.key, "depth": depth}, answer_ids=encode(tokenizer, f"{space}{pair.value}"),
        chat_template=frame.name, metric=CONTAINS,
    )
