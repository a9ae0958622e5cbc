"""The page about eviction inside vLLM states how many requests its pool of blocks holds."""

from math import ceil

import pytest

from conformance.paths import DOCS
from lab.measure.serving import ANSWER, BLOCK, BLOCKS, BUDGET, PROMPT, SHARED

pytestmark = pytest.mark.law("as-it-is-described")


def mean_blocks(kept: float) -> float:
    """Return the mean number of blocks of a request during its answer."""
    return sum(ceil((kept + token) / BLOCK) for token in range(1, ANSWER + 1)) / ANSWER


def test_the_page_states_the_bound_of_the_gain() -> None:
    full, evicted, shared = mean_blocks(PROMPT), mean_blocks(BUDGET * PROMPT), SHARED // BLOCK
    most, most_full, most_alone = BLOCKS / evicted, (BLOCKS - shared) / (full - shared), BLOCKS / full
    page = " ".join((DOCS / "results" / "vllm.md").read_text(encoding="utf-8").split())
    assert f"has {full:.1f} blocks, and {shared} of these blocks are shared." in page
    assert f"An evicted request has {evicted:.1f} blocks" in page
    assert f"({BLOCKS} − {shared}) / ({full:.1f} − {shared}) = {most_full:.1f} requests with the full cache" in page
    assert f"{BLOCKS} / {evicted:.1f} = {most:.1f} evicted requests" in page
    assert f"is {most / most_full:.1f} times as many. Without prefix caching, it is {most / most_alone:.1f}" in page
