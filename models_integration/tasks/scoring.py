"""Exact match (Appendix B.4): the generated answer contains the value."""

from __future__ import annotations

from collections.abc import Sequence

from models_integration.tasks.sample import Sample, TaskTokenizer, decode

MAX_NEW_TOKENS = 50
"""Tokens generated for an answer in the paper's configuration."""


def is_exact_match(answer: str, expected: str) -> bool:
    """Tell whether the value stands in the answer as a substring."""
    return expected in answer


def score(tokenizer: TaskTokenizer, answer_ids: Sequence[int], sample: Sample) -> bool:
    """Tell whether the generated ids decode to an answer with the sample's value."""
    return is_exact_match(decode(tokenizer, answer_ids), sample.expected)
