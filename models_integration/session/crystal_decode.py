"""CrystalCache on a cache that lives on: each row's state, from the prompt to decode steps and later segments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from models_integration.attention.capture import on_host
from models_integration.cache.row_states import RowStates
from reference.crystalcache import decode_step, empty_state, extend, start_state
from reference.crystalcache.tail import append, join_chunk
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
        before = states.rows[0].step if states.rows else 0
        return self.decode and (before + states.waiting_tokens) % self.parameters.T_breath == 0

    def settled(self, states: RowStates, keys: Tensor) -> RowStates:
        """No token waits any more: each has joined its row's tail, by a decode step if it was read as one.

        A chunk has joined the trunks. Until a breath or a segment is due nobody asks for a state, and keys stay on
        their device.

        Args:
            states: what is known.
            keys: the observed layer's, (rows, H_kv, stored, d); those of the waiting tokens are the last.
        """
        stored = states.waiting_tokens + sum(len(chunk.kept) for chunk in states.spliced)
        if not states.waiting and not states.spliced:
            return states
        rows, started = [], states.rows or self.empty(len(keys)).rows
        ids = states.ids() or [[] for _ in started]
        for row, (state, own) in enumerate(zip(started, ids, strict=True)):
            norms = self._norms(keys[row, :, keys.shape[2] - stored :])
            rows.append(self._followed(replace(state, budget=self.budget), own, norms, states))
        return RowStates(tuple(rows), states.seen)

    def _followed(
        self, state: DecodeState, ids: Sequence[int], norms: Float64[Vector, " stored"], states: RowStates,
    ) -> DecodeState:
        """One row's state after its tokens and the chunks between them, whose stored keys have these inverse norms."""
        constants, chunks, at = (self.sentence_ends, self.parameters, self.engine), list(states.spliced), 0
        for place in range(len(ids) + 1):
            while chunks and chunks[0].after == place:
                chunk = chunks.pop(0)
                own = norms[at : at + len(chunk.kept)]
                state, at = join_chunk(state, chunk.token_ids, chunk.kept, own, *constants), at + len(own)
            if place < len(ids):
                token, norm = ids[place], float(norms[at])
                state = decode_step(state, token, norm, *constants) if states.steps else append(state, token, norm)
                at += 1
        return state

    def _norms(self, keys: Tensor) -> Float64[Vector, " n"]:
        takes = self.engine.takes
        on_device = takes is not None and takes(keys)
        norms: Vector = self.engine.require_breath().inverse_key_norms(keys if on_device else on_host(keys))
        return np.asarray(norms)
