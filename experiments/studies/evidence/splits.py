"""Splits of a study's samples by the place of the fact and by text, and claims whose sign differs between splits."""

from collections.abc import Callable, Mapping

import numpy as np

from experiments.studies.evidence.samples import Samples
from experiments.studies.report import Estimate
from experiments.studies.results import Row
from experiments.tasks.needle import DELAYED_ASSOCIATION
from experiments.tasks.placed_fact import PLACED_FACT
from spec.arrays import Float64, Vector

__all__ = [
    "FEWEST", "ORDER", "PLACE", "SPLITS", "TEXT", "differences", "opposite", "place_of", "split_text", "text_of",
]

PLACE, TEXT = "place", "text"
_START, _END = 0.1, 0.8
FEWEST = 10
"""Smallest number of samples of a split whose sign counts."""
ORDER = ("start", "middle", "end", "prose", "records", "code")


def place_of(row: Row) -> str | None:
    """Return the part of the context in which the fact is: start, middle or end. None: the row has no such part.

    Studies of the place have five exact places, such as "at 0.15".
    """
    depth, task = row["metadata"].get("depth"), row["task"].partition("(")[0]
    if depth is None:
        return "start" if task.startswith(DELAYED_ASSOCIATION) else None
    if task == PLACED_FACT:
        return f"at {depth:g}"
    return "start" if depth < _START else "end" if depth >= _END else "middle"


def text_of(row: Row) -> str | None:
    """Return the kind of text, or None if the task has one kind."""
    text: str | None = row["metadata"].get("text")
    return text


SPLITS: Mapping[str, Callable[[Row], str | None]] = {PLACE: place_of, TEXT: text_of}


def differences(
    some: Samples, above: Float64[Vector, " n"], below: Float64[Vector, " n"],
) -> dict[str, dict[str, Estimate]]:
    """Return the difference of a claim for each place and each text with at least 10 samples.

    Args:
        some: samples of the claim.
        above: differences of the two policies.
        below: denominators of the differences, as in `Samples.ratio`.
    """
    result = dict[str, dict[str, Estimate]]()
    for kind, value in SPLITS.items():
        names = np.array([value(row) or "" for row in some.rows])
        for name in sorted(set(names) - {""}, key=lambda name: (ORDER.index(name) if name in ORDER else -1, name)):
            members = np.flatnonzero(names == name)
            if len(members) >= FEWEST:
                part = some.only([some.rows[int(at)] for at in members])
                result.setdefault(kind, {})[name] = part.ratio(above[members], below[members])
    return result


def opposite(parts: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Return the kind of split of which one clearly favours the first policy and one clearly the second, or "".

    A split is clear if the 95 % interval of its difference does not contain 0.
    """
    for kind, groups in parts.items():
        if any(one.low > 0 for one in groups.values()) and any(one.high < 0 for one in groups.values()):
            return split_text(kind, groups)
    return ""


def split_text(kind: str, parts: Mapping[str, Estimate]) -> str:
    """Return the differences of one kind of split as text."""
    return f"by {kind} ({', '.join(f'{name} {one.value:+.2f}' for name, one in parts.items())})"
