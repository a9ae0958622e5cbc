"""From positions to slots: what a compaction gathers, worked out before it gathers anything."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models_integration.visibility import EMPTY, StoredRows
from spec.errors import SpecError

__all__ = ["Plan", "filled", "gathered", "slots_of"]


def slots_of(stored: Tensor, wanted: Tensor) -> Tensor:
    """Slots that hold the `wanted` positions; the only place where a position becomes a slot.

    Args:
        stored: the positions behind the slots, ascending, (stored,).
        wanted: positions, ascending, (kept,).

    Raises:
        SpecError: when a wanted position is not stored.
    """
    # NumPy's search is quicker where what is wanted ascends.
    slots = torch.from_numpy(np.searchsorted(stored.numpy(), wanted.numpy()))
    found = slots < len(stored)
    found &= stored[slots.clamp(max=len(stored) - 1)] == wanted
    if not found.all():
        raise SpecError("positions", wanted[~found].tolist(), f"must be among the {len(stored)} stored positions")
    return slots


@dataclass(frozen=True)
class Plan:
    """One compaction, worked out once for all layers that store the same positions.

    Attributes:
        before: the rows that it is about.
        length: slots in use.
        slots: those that stay, for each row or for all; empty where nothing goes.
        after: the rows that it leads to.
    """

    before: StoredRows
    length: int
    slots: tuple[Tensor, ...]
    after: StoredRows

    def fits(self, rows: StoredRows, length: int) -> bool:
        """Whether a layer with these rows and slots stores what the plan is about."""
        same = torch.equal(rows.kept, self.before.kept) and torch.equal(rows.marks, self.before.marks)
        return same and length == self.length


def gathered(tensor: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Each row's slots, (rows, H_kv, longest, d), ends aligned; copies, as a view would keep evicted tokens alive."""
    if len(slots) == 1:
        return tensor.index_select(2, slots[0])
    # Zeros, and not any memory: a masked NaN would still spoil the sum over values.
    out = tensor.new_zeros(len(slots), tensor.shape[1], max(map(len, slots)), tensor.shape[3])
    for row, own in enumerate(slots):
        out[row, :, out.shape[2] - len(own) :] = tensor[row].index_select(1, own)
    return out


def filled(kept: Sequence[Tensor], width: int) -> Tensor:
    """Positions by slot, (rows, width), EMPTY on the left of shorter rows."""
    rows = torch.full((len(kept), width), EMPTY)
    for row, own in enumerate(kept):
        rows[row, width - len(own) :] = own
    return rows
