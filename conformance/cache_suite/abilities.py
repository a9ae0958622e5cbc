"""Tests of what a cache may also offer: batches, padding on the left, and saved caches."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.abstentions import abstain
from conformance.cache_suite.judge import (
    PROMPT,
    WHOLE,
    Case,
    Run,
    call,
    compare,
    load_model,
    masked_model,
    visible_case,
)

BATCH, PADDED, SAVED = "a batch", "left padding", "save and load"
ABILITIES: Mapping[str, Sequence[str]] = {BATCH: ["batch"], PADDED: ["batch"], SAVED: ["save_to", "load_from"]}
"""Abilities that a cache may have, with the parameters of its function that declare the ability."""
ROWS: Mapping[str, Sequence[int]] = {BATCH: (PROMPT, PROMPT, PROMPT), PADDED: (PROMPT, 7, 64), SAVED: (PROMPT, 7)}
"""Numbers of tokens of the prompts of a batch, by ability."""
ABILITY_KINDS = ("the newest tokens are evicted", "a set of its own length for each KV head")
"""Kinds of kept sets with which abilities are tested."""


def check_ability(
    run: Run, folder: str, ability: str, place: Path, seed: int = 0, renumbered: bool = False,
) -> None:
    """Check a batch whose rows keep different sets, or a cache that is saved to a file in `place` and loaded.

    If the function accepts batches, a batch with left padding is saved too.

    Raises:
        AssertionError: if the log-probabilities of a row differ from those of the masked model.
    """
    names = inspect.signature(run).parameters
    if missing := [name for name in ABILITIES[ability] if name not in names]:
        abstain("not served", f"{ability}: not served (the function has no parameter {missing[0]})")
    refused = []
    for kind in ABILITY_KINDS:
        lengths = ROWS[ability] if "batch" in names and (ability, kind) != (SAVED, ABILITY_KINDS[1]) else (PROMPT,)
        of_row = {1: WHOLE} if kind == ABILITY_KINDS[0] else {}  # padding must be hidden without an eviction too
        cases = [
            visible_case(folder, of_row.get(row, kind), 5, seed + row, renumbered, n, 3)
            for row, n in enumerate(lengths)
        ]
        try:
            if ability == SAVED:
                _check_saved(run, folder, cases[0], place / f"saved {len(kind)}", renumbered)
                if len(cases) > 1:
                    with suppress(NotImplementedError):
                        _check_saved_batch(run, folder, cases, place / "saved batch", renumbered)
            else:
                _check_batch(run, folder, cases, ability, renumbered)
        except NotImplementedError as error:
            refused.append(f"{kind}: {error}")
    if len(refused) == len(ABILITY_KINDS):
        abstain("not served", f"{ability}: not served ({'; '.join(refused)})")


def _check_batch(
    run: Run, folder: str, cases: Sequence[Case], words: str, renumbered: bool, **offered: Any,
) -> None:
    """Check the rows of a batch. If a file is loaded, it replaces the prompts and the kept sets."""
    given: list[Any] = [[case.prompt for case in cases], [case.kept for case in cases]]
    given = [[], {}] if "load_from" in offered else copy.deepcopy(given)
    answer = call(run, *given, [case.following for case in cases], folder, batch=True, **offered)
    assert len(answer) == len(cases), f"logits are {tuple(answer.shape)}, not (rows, new tokens, vocabulary)"
    for row, (case, result) in enumerate(zip(cases, answer, strict=True)):
        where = f"{words}, row {row} of {[len(one.prompt) for one in cases]} tokens"
        compare(case, result, where, folder, renumbered)


def _check_saved_batch(run: Run, folder: str, cases: Sequence[Case], path: Path, renumbered: bool) -> None:
    _check_batch(run, folder, cases, "a batch that was saved", renumbered, save_to=str(path))
    others = [_reversed(case, folder, renumbered) for case in cases]
    _check_batch(run, folder, others, "a batch that was loaded", renumbered, load_from=str(path))


def _check_saved(run: Run, folder: str, case: Case, path: Path, renumbered: bool) -> None:
    answer = call(run, case.prompt, copy.deepcopy(case.kept), case.following, folder, save_to=str(path))
    compare(case, answer, "a cache that was saved", folder, renumbered)
    assert path.exists(), f"there is no file {path.name} after save_to"
    other = _reversed(case, folder, renumbered)
    answer = call(run, [], {}, other.following, folder, load_from=str(path))
    compare(other, answer, "a cache that was loaded", folder, renumbered)


def _reversed(case: Case, folder: str, renumbered: bool) -> Case:
    """Return the case with different tokens after the prompt, for a file that contains only the prompt."""
    following = case.following[::-1]
    full = {layer: [list(range(len(case.prompt)))] * len(sets) for layer, sets in case.kept.items()}
    _, masked = masked_model(load_model(folder), case.prompt, following, renumbered)
    return replace(case, following=following, expected=masked(case.kept), unmasked=masked(full))
