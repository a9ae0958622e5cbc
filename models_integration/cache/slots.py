"""From positions to slots: what a compaction gathers, worked out before it gathers anything."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.positions import EMPTY, StoredRows
from spec.errors import SpecError

__all__ = ["Plan", "filled", "gathered", "slots_of"]

# Slots of an average run from which on copies of runs are quicker than a gather slot by slot.
_LONG = 64


def slots_of(stored: Tensor, wanted: Tensor) -> Tensor:
    """Slots that hold the `wanted` positions; the only place where a position becomes a slot.

    Args:
        stored: the positions behind the slots, ascending but for empty ones, (stored,).
        wanted: positions, ascending, (kept,).

    Raises:
        SpecError: when a wanted position is not stored.
    """
    own, sought = stored.numpy(), wanted.numpy()
    slots = np.flatnonzero(np.isin(own, sought))
    if len(slots) != len(sought):
        missing = sought[~np.isin(sought, own)].tolist()
        raise SpecError("positions", missing, f"must be among the {len(own)} stored positions")
    return torch.from_numpy(slots)


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
        if length != self.length:
            return False
        # Layers that followed one plan before hold the very rows of it.
        before = self.before
        return rows is before or (torch.equal(rows.kept, before.kept) and torch.equal(rows.marks, before.marks))


def gathered(tensor: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Each row's slots, (rows, H_kv, longest, d), ends aligned; copies, as a view would keep evicted tokens alive."""
    if len(slots) == 1:
        return _taken(tensor, slots[0])
    # Zeros, and not any memory: a masked NaN would still spoil the sum over values.
    out = tensor.new_zeros(len(slots), tensor.shape[1], max(map(len, slots)), tensor.shape[3])
    for row, own in enumerate(slots):
        out[row, :, out.shape[2] - len(own) :] = _taken(tensor[row], own)
    return out


def _taken(tensor: Tensor, slots: Tensor) -> Tensor:
    """These slots of (..., stored, d): a breath leaves long runs, which are copied whole."""
    ends = np.flatnonzero(np.diff(slots.numpy()) != 1) + 1
    if len(slots) < _LONG * (len(ends) + 1):
        return tensor.index_select(-2, slots.to(tensor.device))
    cuts = [0, *ends.tolist(), len(slots)]
    firsts = slots[cuts[:-1]].tolist()
    runs = zip(firsts, np.diff(cuts).tolist(), strict=True)
    return torch.cat([tensor.narrow(-2, first, length) for first, length in runs], dim=-2)


def filled(kept: Sequence[Tensor], width: int) -> Tensor:
    """Positions by slot, (rows, width), EMPTY on the left of shorter rows."""
    rows = torch.full((len(kept), width), EMPTY)
    for row, own in enumerate(kept):
        rows[row, width - len(own) :] = own
    return rows
