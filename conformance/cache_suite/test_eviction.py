"""Tests that eviction by a cache or an engine equals masking."""

from pathlib import Path

import pytest

from conformance.cache_suite.abilities import check_ability
from conformance.cache_suite.judge import BLOCKS, LENGTHS, LONG, LONGER, TINY, Run, check, check_first_served

pytestmark = pytest.mark.spec("CC-COMPACT")

NEW = (1, 5, 16, 70)
"""Numbers of tokens read at once after an eviction: a decode step, a question, a page, more than a block of 64."""
KINDS = ("a set for each KV head", "a set for each layer", "one set for all")
"""Kinds of kept sets. Few caches support the first kind, and all caches support the last."""


@pytest.mark.parametrize("new", NEW)
def test_eviction_equals_masking(run: Run, folder: str, kind: str, new: int, seed: int, renumbered: bool) -> None:
    check(run, folder, kind, new, seed, renumbered)


def test_a_call_leaves_nothing_behind(run: Run, folder: str, seed: int, renumbered: bool) -> None:
    """Check that an earlier call does not change the result of a call with a different prompt."""
    for more in (1, 2, 1):
        check(run, folder, "one set for all", 5, seed + more, renumbered)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_any_length(run: Run, folder: str, kind: str, length: int, seed: int, renumbered: bool) -> None:
    check(run, folder, kind, 3, seed, renumbered, length)


@pytest.mark.parametrize("length", BLOCKS)
def test_prompts_of_whole_blocks(run: Run, folder: str, length: int, seed: int, renumbered: bool) -> None:
    check_first_served(run, folder, KINDS, 3, seed, renumbered, length)


def test_one_prompt_is_evicted_otherwise(run: Run, folder: str, kind: str, seed: int, renumbered: bool) -> None:
    """Check a prompt that is read again in the same process, with different kept sets of the same kind."""
    for again in (1, 2):
        check(run, folder, kind, 4, seed, renumbered, again=again)


def test_long_prompts(run: Run, folder: str, family: str, seed: int, renumbered: bool) -> None:
    check_first_served(run, folder, KINDS, 3, seed, renumbered, LONG)
    if family == next(iter(TINY)):
        check(run, folder, KINDS[-1], 3, seed, renumbered, LONGER)


def test_what_a_cache_offers(
    run: Run, folder: str, ability: str, tmp_path: Path, seed: int, renumbered: bool,
) -> None:
    """Check each row of a batch, with and without padding on the left, and a cache that is read from a file."""
    check_ability(run, folder, ability, tmp_path, seed, renumbered)
