"""Result of stage S1 as tensors, and a record that is copied to the host when its arrays are first read."""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from accelerated.torch_device.device import download_together, upload
from spec.arrays import IntVector
from spec.records import CoAttention

__all__ = ["DeferredCoAttention", "Neighbours", "to_host"]


class Neighbours(NamedTuple):
    """Result of stage S1. Neighbours are counted from the first token of the segment. Unused places are negative."""

    salience: Tensor
    intra: Tensor
    intra_weight: Tensor
    cross: Tensor
    cross_weight: Tensor

    @classmethod
    def of_host(cls, S1: CoAttention, start: int) -> "Neighbours":
        """Copy a record to the device. A neighbour becomes the distance of its position from `start`."""
        values = (upload(x, np.float64) for x in (S1.salience, S1.intra_weight, S1.cross_weight))
        salience, intra_weight, cross_weight = values
        # Empty places are -1, and a neighbour before the segment is negative after the subtraction.
        intra, cross = (upload(np.where(x < 0, -1, x - start), np.int64) for x in (S1.intra, S1.cross))
        return cls(salience, intra, intra_weight, cross, cross_weight)


def to_host(S1: Neighbours, finite: Tensor, positions: IntVector) -> CoAttention | None:
    """Copy S1 to the host with a single wait, or return None if `finite` (1,) is False.

    In `S1`, a neighbour is an index into `positions`, or -1. In the result, it is the position, or -1.
    """
    # Index -1, an unused place, is the last entry of `at`.
    at = upload(np.append(positions, -1), np.int64, finite.device)
    numbered = S1._replace(intra=at[S1.intra], cross=at[S1.cross])
    salience, intra, intra_weight, cross, cross_weight, usable = download_together(*numbered, finite)
    if not usable[0]:
        return None
    start = int(positions[len(positions) - len(salience)])
    return CoAttention(start, salience, intra, intra_weight, cross, cross_weight)


class DeferredCoAttention(CoAttention):
    """CoAttention of a prompt. Until an array is first read, the arrays remain on the device."""

    def __init__(self, S1: Neighbours) -> None:
        vars(self).update(start=0, _tensors=S1)

    def __getattr__(self, name: str) -> Any:
        tensors = vars(self).get("_tensors")
        if tensors is not None and name in Neighbours._fields:
            arrays = download_together(*tensors)
            vars(self).update(zip(Neighbours._fields, arrays, strict=True))
            vars(self).pop("_tensors", None)
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        return CoAttention, tuple(getattr(self, field.name) for field in fields(CoAttention))
