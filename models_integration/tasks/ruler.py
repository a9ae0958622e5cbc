"""What RULER's tasks share: the two dialects, the words, and the field of a sample.

Prompts, answer openings, numbers of facts and the metric are NVIDIA/RULER's v1 (Apache-2.0), letter for letter as its
`scripts/data/synthetic/constants.py` and the generators beside it have them since 2025. Ours are: the running text and
the words (of the shipped text, which has neither essays nor parts of speech), the seeds, subjects and values that are
all different, exact lengths (a few tokens of running text before the instruction; question and tokens to generate are
not counted in), and places outside sinks and recent window, of which one takes turns over the depths.

v1 shuffles words and facts anew for each sample with the same `random.Random(42)`, so that equal counts stand in equal
places in every sample: `ruler-v1`. In `ruler-v1-unpinned` each sample has an order of its own. Only tasks that shuffle
differ: `niah_multikey_1`, `niah_multivalue`, `niah_multiquery`, `cwe` and `fwe`.
"""

import random
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from models_integration.tasks.metrics import STRING_MATCH_ALL
from models_integration.tasks.prose import NARRATIVE, read_text
from models_integration.tasks.samples import Sample

__all__ = ["DIALECTS", "PINNED", "UNPINNED", "as_ruler", "order", "words"]

PINNED, UNPINNED = "ruler-v1", "ruler-v1-unpinned"
DIALECTS = (PINNED, UNPINNED)
_RULER_SEED = 42


def order(rng: np.random.Generator, dialect: str, count: int) -> list[int]:
    """A permutation: the sample's own, or v1's, which depends on the count alone."""
    if dialect == UNPINNED:
        return [int(at) for at in rng.permutation(count)]
    fixed = list(range(count))
    random.Random(_RULER_SEED).shuffle(fixed)
    return fixed


@lru_cache(maxsize=1)
def words(path: Path = NARRATIVE) -> tuple[str, ...]:
    """The words of four to nine letters that the text writes in lower case only, in the order of the alphabet."""
    found = set(re.findall(r"\b[A-Za-z]{4,9}\b", read_text(path)))
    return tuple(sorted(word for word in found if word.islower() and word.capitalize() not in found))


def as_ruler(sample: Sample, name: str, dialect: str, max_new_tokens: int) -> Sample:
    """The sample under its name in a dialect, with RULER's metric."""
    return replace(
        sample, task=f"{dialect.replace('-', '_')}_{name}", dialect=dialect, metric=STRING_MATCH_ALL,
        max_new_tokens=max_new_tokens,
    )
