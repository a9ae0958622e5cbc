"""How a real text goes on: no fact is asked for, and no piece of the context alone holds the answer."""

from models_integration.tasks.assembly import decode
from models_integration.tasks.chat import bare
from models_integration.tasks.context import Ground
from models_integration.tasks.samples import Sample

__all__ = ["ANSWER", "QUESTION", "prose_continuation_samples"]

QUESTION, ANSWER = 16, 128
"""Tokens behind the context that are read after it is compacted, and tokens of the text that then follow."""


def prose_continuation_samples(ground: Ground, length: int, index: int, seed: int) -> tuple[Sample, ...]:
    """One sample: `length` tokens of running text, some more to read, and the text that follows as gold answer.

    Its likelihood is what is measured; the metric of a generated continuation is ROUGE-L. No chat template stands
    around it. Contexts of different indices have no token of the text in common until all of it is used.

    Raises:
        SpecError: for a negative index or seed, and a text that is too short.
    """
    frame, tokens = bare(ground.tokenizer), ground.prose.tokens
    whole = length + QUESTION + ANSWER
    first = whole * ground.prose.window(whole, index, seed)
    read = first + length - len(frame.opening)
    answer = tokens[read + QUESTION : read + QUESTION + ANSWER]
    return (Sample(
        task="prose_continuation", context_ids=(*frame.opening, *tokens[first:read]),
        question_ids=tokens[read : read + QUESTION], expected=decode(ground.tokenizer, answer).strip(), needle=(0, 0),
        answer_ids=answer, metric="rouge_l", max_new_tokens=ANSWER,
    ),)
