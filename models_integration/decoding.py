"""CrystalCache on a cache that lives on: each row's state, from the prompt to decode steps and later segments."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from models_integration.capture import on_host
from models_integration.states import RowStates
from reference.crystalcache import decode_step, empty_state, extend, start_state
from reference.crystalcache.tail import append
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.backend import Backend
from spec.budget import Budget
from spec.decode import DecodeState
from spec.parameters import CrystalCacheParameters
from spec.policy import LayerView
from spec.records import CrystalRetention

__all__ = ["Life"]


@dataclass(frozen=True)
class Life:
    """What a method does with a cache after its prompt. The states are in the cache; nothing is kept here.

    Attributes:
        decode: every decode step counts, and each T_breath-th ends in a breath. Otherwise only segments evict, and
            the tokens of decode steps wait for the next one.
        stream: segments end every C tokens, wherever the forwards end.
    """

    sentence_ends: frozenset[int]
    parameters: CrystalCacheParameters
    engine: Backend
    budget: Budget
    decode: bool = False
    stream: bool = False

    def empty(self, rows: int) -> RowStates:
        """Rows that have seen nothing."""
        return RowStates((empty_state(self.budget),) * rows)

    def started(
        self, records: CrystalRetention, view: LayerView, ids: Int64[IntVector, " n"],
    ) -> DecodeState | None:
        """The state after a first prompt; None where the backend knows no decode."""
        if self.engine.breath is None:
            return None
        return start_state(records, ids, self.engine.breath.inverse_key_norms(view.k), self.budget, self.parameters)

    def extended(self, state: DecodeState, view: LayerView, ids: Int64[IntVector, " n"]) -> DecodeState:
        """The state after a later segment, whose keys are the last of the view's."""
        return extend(
            replace(state, budget=self.budget), view.q, view.k, ids, self.sentence_ends, self.parameters, self.engine,
            scaling=view.scaling, softcap=view.softcap,
        )

    def due(self, states: RowStates) -> bool:
        """Whether the newest of the tokens that wait is a step that ends in a breath."""
        return self.decode and (states.rows[0].step + states.waiting_tokens) % self.parameters.T_breath == 0

    def settled(self, states: RowStates, keys: Tensor) -> RowStates:
        """No token waits any more: each has joined its row's tail, by a decode step if it was read as one.

        Until a breath or a segment is due nobody asks for a state, and keys stay on their device.

        Args:
            states: what is known.
            keys: the observed layer's, (rows, H_kv, stored, d); those of the waiting tokens are the last.
        """
        n = states.waiting_tokens
        if not n:
            return states
        rows = []
        for row, (state, ids) in enumerate(zip(states.rows, states.ids(), strict=True)):
            state = replace(state, budget=self.budget)
            for token, norm in zip(ids, self._norms(keys[row, :, -n:]).tolist(), strict=True):
                if states.steps:
                    state = decode_step(state, token, norm, self.sentence_ends, self.parameters, self.engine)
                else:
                    state = append(state, token, norm)
            rows.append(state)
        return RowStates(tuple(rows), states.columns + n)

    def _norms(self, keys: Tensor) -> Float64[Vector, " n"]:
        takes = self.engine.takes
        on_device = takes is not None and takes(keys)
        norms: Vector = self.engine.require_breath().inverse_key_norms(keys if on_device else on_host(keys))
        return np.asarray(norms)
