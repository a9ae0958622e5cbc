"""State of CrystalCache between two decode steps, as a frozen record that contains no keys or values."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spec.arrays import Float64, Int64, IntVector, Vector
from spec.budget import Budget
from spec.errors import SpecError

__all__ = ["DecodeState", "LiveTrunks", "TrunkWeights", "check_state"]


class TrunkWeights(NamedTuple):
    """The symmetric trunk graph W in CSR form.

    Columns ascend in each row. W has no self-loops, and every weight exceeds tau_edge.
    """

    indptr: IntVector
    indices: IntVector
    weights: Vector


@dataclass(frozen=True)
class LiveTrunks:
    """The live (not evicted) tokens of each trunk.

    Trunk g contains the live tokens `positions[offsets[g]:offsets[g + 1]]`. No trunk is empty.
    """

    positions: Int64[IntVector, " live"]
    """Absolute positions of the live tokens, ascending."""
    offsets: Int64[IntVector, " m_and_one"]
    impact: Float64[Vector, " live"]
    """Impact M_i of each live token, computed when the token joined a trunk."""
    inverse_norms: Float64[Vector, " live"]
    """Mean of 1 / ||k|| over the KV heads of the observed layer, for each live token. inf if a key is zero."""
    trunk_impact: Float64[Vector, " m"]
    """Impact Mbar of each trunk (Eq. 23), computed once, when the trunk is made."""

    @property
    def sizes(self) -> Int64[IntVector, " m"]:
        """Return the number of live tokens in each trunk."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class DecodeState:
    """State of one sequence between two forward passes.

    Pure functions compute the next state after a decode step, a breath (decode-time eviction) or a segment. The tail
    of a sequence consists of the newest tokens, which belong to no trunk yet. The last token of the tail has the
    position `seen - 1`.
    """

    budget: Budget
    seen: int
    """Number of tokens processed so far, including evicted tokens and the tail. The next token has position `seen`."""
    step: int
    """Number of decode steps so far. A segment is not counted as a step."""
    live: LiveTrunks
    D: Float64[Vector, " m"]
    W: TrunkWeights
    ids: Int64[IntVector, " distinct"]
    """Distinct token ids, ascending, of all tokens processed so far except the tail. Evicted tokens are included."""
    counts: Int64[IntVector, " distinct"]
    """For each id of `ids`, the number of occurrences so far outside the tail."""
    mu: float
    """Mean trunk degree (Equation 27) at the end of the prompt. 0 if there was no prompt."""
    sigma: float
    """Standard deviation of the trunk degrees at the end of the prompt, with 1 in place of values below epsilon.

    1 if there was no prompt.
    """
    tail_ids: tuple[int, ...] = ()
    tail_inverse_norms: tuple[float, ...] = ()

    @property
    def tail_positions(self) -> Int64[IntVector, " tail"]:
        """Return the absolute positions of the tail's tokens, ascending."""
        return np.arange(self.seen - len(self.tail_ids), self.seen)

    @property
    def stored(self) -> Int64[IntVector, " stored"]:
        """Return the positions of all cached tokens, ascending: the live tokens of the trunks, then the tail."""
        return np.concatenate([self.live.positions, self.tail_positions])


def check_state(state: DecodeState) -> None:
    """Check that a state is consistent. Every state that kvspec returns is consistent.

    Raises:
        SpecError: if a field of the state is invalid. The message names the first invalid field.
    """
    live, m = state.live, len(state.D)
    sizes_fit = len(live.offsets) == m + 1 and live.offsets[0] == 0 and live.offsets[-1] == len(live.positions)
    if not sizes_fit or (np.diff(live.offsets) < 1).any():
        raise SpecError("offsets", live.offsets.tolist(), f"must increase strictly from 0 to {len(live.positions)}")
    stored = state.stored
    if len(stored) and (stored[0] < 0 or (np.diff(stored) <= 0).any()):
        raise SpecError("positions", live.positions.tolist(), f"must increase strictly inside range({state.seen})")
    for name, array, length in (
        ("impact", live.impact, len(live.positions)), ("inverse_norms", live.inverse_norms, len(live.positions)),
        ("trunk_impact", live.trunk_impact, m), ("counts", state.counts, len(state.ids)),
        ("tail_inverse_norms", state.tail_inverse_norms, len(state.tail_ids)),
    ):
        if len(array) != length:
            raise SpecError(name, len(array), f"must have {length} values")
    for name, values in (("impact", live.impact), ("trunk_impact", live.trunk_impact), ("W", state.W.weights)):
        if not np.isfinite(values).all():
            raise SpecError(name, values.tolist(), "must be finite")
    for name, norms in (("inverse_norms", live.inverse_norms), ("tail_inverse_norms", state.tail_inverse_norms)):
        if not (np.asarray(norms) >= 0).all():
            raise SpecError(name, list(norms), "must be at least 0; the value of a zero key is infinity")
    if (np.diff(state.ids) <= 0).any() or (state.counts < 1).any():
        raise SpecError("counts", state.counts.tolist(), "each count must be at least 1, and the ids must be ascending")
    if not ((state.D >= 0) & (state.D <= 1)).all():
        raise SpecError("D", state.D.tolist(), "must lie in [0, 1]")
    if int(state.counts.sum()) + len(state.tail_ids) != state.seen:
        raise SpecError(
            "counts", int(state.counts.sum()), f"counts and tail must add up to {state.seen}, the number of tokens seen"
        )
    _check_weights(state.W, m)


def _check_weights(W: TrunkWeights, m: int) -> None:
    if len(W.indptr) != m + 1 or W.indptr[0] != 0 or W.indptr[-1] != len(W.indices) or (np.diff(W.indptr) < 0).any():
        raise SpecError("W", W.indptr.tolist(), f"must have {m} rows over its {len(W.indices)} entries")
    row = np.repeat(np.arange(m), np.diff(W.indptr))
    there, back = np.lexsort((W.indices, row)), np.lexsort((row, W.indices))
    ascends = (there == np.arange(len(row))).all()
    mirrored = (row[there] == W.indices[back]).all() and (W.indices[there] == row[back]).all()
    if not ascends or not mirrored or (row == W.indices).any() or (W.weights[there] != W.weights[back]).any():
        raise SpecError("W", W.indices.tolist(), "must be symmetric, without loops, with ascending columns")
