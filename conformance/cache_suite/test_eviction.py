"""Eviction equals masking, on an engine of anybody's."""

from pathlib import Path

import pytest

from conformance.cache_suite.judge import (
    BLOCKS,
    LENGTHS,
    LONG,
    LONGER,
    TINY,
    Run,
    check,
    check_ability,
    check_first_served,
)

pytestmark = pytest.mark.spec("CC-COMPACT")

NEW = (1, 5, 16, 70)
"""Tokens read at once behind a compacted cache: a decode step, a question, a page, more than a block of 64 holds."""
KINDS = ("a set for each KV head", "a set for each layer", "one set for all")
"""From what few caches serve to what all do."""


@pytest.mark.parametrize("new", NEW)
def test_eviction_equals_masking(run: Run, folder: str, kind: str, new: int, seed: int, renumbered: bool) -> None:
    check(run, folder, kind, new, seed, renumbered)


def test_a_call_leaves_nothing_behind(run: Run, folder: str, seed: int, renumbered: bool) -> None:
    """The same question after another prompt."""
    for more in (1, 2, 1):
        check(run, folder, "one set for all", 5, seed + more, renumbered)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_any_length(run: Run, folder: str, kind: str, length: int, seed: int, renumbered: bool) -> None:
    check(run, folder, kind, 3, seed, renumbered, length)


@pytest.mark.parametrize("length", BLOCKS)
def test_prompts_of_whole_blocks(run: Run, folder: str, length: int, seed: int, renumbered: bool) -> None:
    check_first_served(run, folder, KINDS, 3, seed, renumbered, length)


def test_one_prompt_is_evicted_otherwise(run: Run, folder: str, kind: str, seed: int, renumbered: bool) -> None:
    """A prompt again in the same process, with other kept sets of the same kind."""
    for again in (1, 2):
        check(run, folder, kind, 4, seed, renumbered, again=again)


def test_long_prompts(run: Run, folder: str, family: str, seed: int, renumbered: bool) -> None:
    check_first_served(run, folder, KINDS, 3, seed, renumbered, LONG)
    if family == next(iter(TINY)):
        check(run, folder, KINDS[-1], 3, seed, renumbered, LONGER)


def test_what_a_cache_offers(
    run: Run, folder: str, ability: str, tmp_path: Path, seed: int, renumbered: bool,
) -> None:
    """Each row of a batch, also of prompts that are padded on the left; a cache from its file."""
    check_ability(run, folder, ability, tmp_path, seed, renumbered)
