"""Prompts that the witness sends to a server."""

import numpy as np

__all__ = ["ANSWER", "LENGTHS", "LONG_ANSWER", "ROUNDED_ANSWER", "prompts_of"]

ANSWER = 12
"""Number of answer tokens. The first token is chosen before the eviction of the prompt, the others after it."""
ROUNDED_ANSWER = 24
"""Number of answer tokens of a server in bfloat16, where rounding hides small differences."""
LONG_ANSWER = 160
"""Number of answer tokens of a request for policies that evict while decoding."""
LENGTHS = (2, 16, 31, 32, 33, 64, 65, 127, 128, 129, 257, 512, 601)
"""Prompt lengths: near multiples of 16, 32, 64 and 128 tokens, which servers use as blocks, and above one chunk."""


def prompts_of(group: str, vocabulary: int, longest: int, seed: int) -> list[list[int]]:
    """Return the prompts of a group, as random token ids.

    Args:
        group: "lengths", "shared prefixes", "recalled", "at once", "cancelled" or "long answers".
        vocabulary: number of token ids of the model.
        longest: largest number of tokens of a prompt.
        seed: random seed.
    """
    rng = np.random.default_rng([seed, *group.encode()])

    def draw(n: int) -> list[int]:
        return [int(one) for one in rng.integers(min(100, vocabulary // 2), vocabulary, min(n, longest))]

    if group == "lengths":
        return [draw(n) for n in LENGTHS]
    if group == "shared prefixes":
        prefix = draw(300)
        return [(prefix + draw(n))[:longest] for n in (20, 33, 20, 1)]
    if group == "recalled":  # The text begins again at the end, so the answer depends on the first occurrence.
        texts = [draw(n) for n in (60, 120, 200)]
        return [(text + draw(200) + text[: len(text) // 2])[-longest:] for text in texts]
    if group == "at once":
        return [draw(int(n)) for n in rng.integers(40, 500, 8)]
    if group == "cancelled":  # The server does not answer every second prompt. The two prompts have the same length.
        return [draw(n) for n in (300, 300, 177, 177)]
    assert group == "long answers"
    return [draw(n) for n in (180, 333)]
