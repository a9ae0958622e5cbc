"""Retention: the positions of the tokens that are kept in the cache of one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from spec.arrays import Int64, IntVector
from spec.errors import SpecError

__all__ = ["Granularity", "Retention"]


class Granularity(Enum):
    """Part of the model that has a separate set of kept tokens: the whole model, a layer, or a KV head of a layer."""

    MODEL = "model"
    LAYER = "layer"
    HEAD = "layer and KV head"


@dataclass(frozen=True)
class Retention:
    """Positions of the kept tokens of one sequence, group by group. A batch is a tuple of `Retention` objects.

    Group g keeps the absolute positions `positions[offsets[g]:offsets[g + 1]]`, ascending. The granularity MODEL has
    one group, and LAYER has one group for each layer. HEAD has one group for each KV head of each layer, sorted by
    layer, then by head.

    Raises:
        SpecError: if `offsets` and `positions` do not describe subsets of range(seen).
    """

    positions: Int64[IntVector, " kept"]
    offsets: Int64[IntVector, " groups_and_one"]
    seen: int
    granularity: Granularity = Granularity.MODEL

    def __post_init__(self) -> None:
        _check_offsets(self.offsets, len(self.positions))
        if self.granularity is Granularity.MODEL and self.groups != 1:
            raise SpecError("offsets", self.offsets, "the granularity 'model' has exactly one group")
        _check_kept(self.positions, self.offsets, self.seen)

    @classmethod
    def shared(cls, kept: Int64[IntVector, " kept"], seen: int) -> "Retention":
        """Return a `Retention` for one set of kept tokens that all layers and KV heads share."""
        return cls(kept, np.array([0, len(kept)], dtype=np.int64), seen)

    @classmethod
    def join(cls, parts: Sequence["Retention"]) -> "Retention":
        """Concatenate the `Retention` objects of single layers, given in ascending order of layers."""
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        positions = np.concatenate([part.positions for part in parts])
        return cls(positions, np.append(0, np.cumsum(sizes)), parts[0].seen, parts[0].granularity)

    @property
    def kept(self) -> Int64[IntVector, " kept"]:
        """Return the kept positions, ascending, if all layers and KV heads share one set of kept tokens.

        Raises:
            SpecError: if the retention has more than one group.
        """
        if self.groups > 1:
            reason = f"each {self.granularity.value} has its own: type retention.group(i) for the i-th"
            raise SpecError("kept", f"{self.groups} kept sets", reason)
        return self.positions

    @property
    def groups(self) -> int:
        return len(self.offsets) - 1

    def group(self, index: int) -> Int64[IntVector, " kept"]:
        """Return the kept positions of the group with this index, ascending."""
        return self.positions[self.offsets[index] : self.offsets[index + 1]]


def _check_offsets(offsets: Int64[IntVector, " groups_and_one"], total: int) -> None:
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        raise SpecError("offsets", offsets, f"must increase from 0 to the {total} positions")


def _check_kept(
    positions: Int64[IntVector, " kept"], offsets: Int64[IntVector, " groups_and_one"], seen: int,
) -> None:
    # All groups are checked at once for speed: decode-time eviction can build a group per layer and head in every step.
    falls = np.concatenate([[False], positions[1:] <= positions[:-1], [False]])
    falls[offsets] = False
    first, end = offsets[:-1], offsets[1:]
    ends = positions[np.concatenate([first[first < end], end[first < end] - 1])]
    if falls.any() or (ends < 0).any() or (ends >= seen).any():
        groups = (positions[low:high] for low, high in zip(first, end, strict=True))
        kept = next(kept for kept in groups if _wrong(kept, seen))
        raise SpecError("positions", kept, f"must increase strictly inside range({seen})")


def _wrong(kept: Int64[IntVector, " kept"], seen: int) -> bool:
    return len(kept) > 0 and bool(kept[0] < 0 or kept[-1] >= seen or (np.diff(kept) <= 0).any())
