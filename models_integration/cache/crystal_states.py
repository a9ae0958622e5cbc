"""CrystalCache on a cache that lives on: each row's state, from the prompt to decode steps and later segments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.continuation import Decision, Nothing, ObservedRows
from models_integration.cache.dense_layer import on_host
from models_integration.cache.retained_cache import RetainedCache
from reference.crystalcache import decode_step, empty_state, extend, start_state
from reference.crystalcache.tail import append, join_chunk
from reference.policies import retain
from spec.arrays import Float64, Int64, IntVector, Vector
from spec.backend import Backend
from spec.budget import Budget
from spec.decode import DecodeState
from spec.errors import SpecError
from spec.parameters import CrystalCacheParameters
from spec.policy import LayerView, Needs, Observation, Policy
from spec.records import CrystalRetention
from spec.retention import Retention

__all__ = ["CrystalStates", "DecodeRule", "Pending", "Spliced"]


class Pending(Enum):
    """How the tokens that wait were read."""

    DECODED = "decoded"
    """In decode steps that count: D decays after each of them."""
    GENERATED = "generated"
    """In steps of a session that evicts at segments only: nothing decays, but they count as steps."""
    READ = "read"
    """Inside `reading()`: nothing decays, and they are no steps."""


@dataclass(frozen=True)
class Spliced:
    """A chunk that was put behind what a session had read."""

    after: int
    """How many of the pending tokens stand before it."""
    token_ids: Int64[IntVector, " n"]
    kept: Int64[IntVector, " k"]
    """Those of its tokens that are stored, by their place in it, ascending."""


@dataclass(frozen=True)
class CrystalStates:
    """The states of all rows of a batch.

    Attributes:
        rows: one state per row; none before the first segment, where a session begins with a chunk.
        columns: columns that the cache had seen by then, padding included.
        pending: ids (rows, n) of the tokens read since, in order: they join the tails when a state is asked for.
        pending_tokens: columns that are pending, chunks aside.
        kind: how all of them were read.
        spliced: chunks put between them, in order, the same in every row.
    """

    rows: tuple[DecodeState, ...] = ()
    columns: int = 0
    pending: tuple[Tensor, ...] = ()
    pending_tokens: int = 0
    kind: Pending = Pending.GENERATED
    spliced: tuple[Spliced, ...] = ()

    @property
    def seen(self) -> int:
        """Columns that the states know of, once nothing is pending any more."""
        return self.columns + self.pending_tokens + sum(len(chunk.token_ids) for chunk in self.spliced)

    def covers(self, columns: int) -> bool:
        """Whether these states are about all `columns` that a cache has seen."""
        return bool(self.rows or self.spliced) and self.seen == columns

    def read(self, ids: Tensor, kind: Pending) -> "CrystalStates":
        """The states after these tokens (rows, n): they are pending until the next eviction is decided."""
        pending, tokens = (*self.pending, ids.detach().clone()), self.pending_tokens + ids.shape[1]
        return CrystalStates(self.rows, self.columns, pending, tokens, kind, self.spliced)

    def splice(self, token_ids: Int64[IntVector, " n"], kept: Int64[IntVector, " k"]) -> "CrystalStates":
        """A chunk has been put behind all that."""
        return replace(self, spliced=(*self.spliced, Spliced(self.pending_tokens, token_ids, kept)))

    def select(self, rows: Tensor) -> "CrystalStates":
        """The same for other rows of the batch, by index."""
        states = tuple(self.rows[row] for row in rows.tolist()) if self.rows else ()
        return replace(self, rows=states, pending=tuple(ids[rows.to(ids.device)] for ids in self._joined()))

    def crop(self, tokens: int) -> "CrystalStates | Nothing":
        """Without the last tokens: nothing is known where a state has gone beyond them already, or a chunk."""
        left = self.pending_tokens - tokens
        if left < max((chunk.after for chunk in self.spliced), default=0):
            return Nothing()
        pending = tuple(ids[:, :left] for ids in self._joined()) if left else ()
        return replace(self, pending=pending, pending_tokens=left)

    def ids(self) -> list[list[int]]:
        """What is pending, row by row."""
        return [row for ids in self._joined() for row in ids.tolist()] or [[] for _ in self.rows]

    def _joined(self) -> tuple[Tensor, ...]:
        return (torch.cat(self.pending, dim=1),) if self.pending else ()


@dataclass(frozen=True)
class DecodeRule:
    """How a cache goes on under CrystalCache. The states are in the cache; nothing is kept here.

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
    step_needs: ClassVar[Needs] = Needs()

    @property
    def segment_tokens(self) -> int | None:
        """Tokens of a stream's segment; None where segments end with their forwards."""
        return self.parameters.C if self.stream else None

    def decide_prompt(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """First prompts: S1 to S6, and the states that they leave."""
        retentions, all_records, states = [], [], []
        for row in observed.prompts:
            observation = observed.prompt(row, policy.granularity)
            retention, records = retain(policy, budget, observation)
            assert records is not None
            state = self.started(records, observation)
            retentions.append(retention)
            all_records.append(records)
            states += [] if state is None else [state]
        known = CrystalStates(tuple(states), observed.columns) if states else Nothing()
        return Decision(tuple(retentions), known, tuple(all_records))

    def started(self, records: CrystalRetention, observation: Observation) -> DecodeState | None:
        """The state after a first prompt; None where the backend knows no decode."""
        if self.engine.breath is None:
            return None
        assert observation.token_ids is not None
        (view,) = observation.layers.values()
        norms = self.engine.breath.inverse_key_norms(view.k)
        return start_state(records, observation.token_ids, norms, self.budget, self.parameters)

    def check_turn(self, policy: Policy, cache: RetainedCache) -> None:
        """A later segment can follow.

        Raises:
            SpecError: where layers store different positions.
        """
        if cache.layers_differ:
            raise SpecError(
                "past_key_values", "layers that differ", f"{policy.name} needs the same tokens in all layers and heads"
            )

    def check_padded(self, policy: Policy, cache: RetainedCache) -> None:
        """Padded turns are served."""

    def decide_turn(self, policy: Policy, budget: Budget, observed: ObservedRows) -> Decision:
        """Later segments: S1 to S6 on what is new, behind the states."""
        before, states = observed.continuation, []
        assert isinstance(before, CrystalStates)
        for row in observed.prompts:
            (view,) = observed.stored(row, policy.granularity).layers.values()
            states.append(self.extended(before.rows[row], view, observed.token_ids(row)))
        retentions = tuple(Retention.shared(state.stored, state.seen) for state in states)
        return Decision(retentions, CrystalStates(tuple(states), before.seen + observed.columns))

    def extended(self, state: DecodeState, view: LayerView, ids: Int64[IntVector, " n"]) -> DecodeState:
        """The state after a later segment, whose keys are the last of the view's."""
        return extend(
            replace(state, budget=self.budget), view.q, view.k, ids, self.sentence_ends, self.parameters, self.engine,
            scaling=view.scaling, softcap=view.softcap, sinks=view.sinks,
        )

    def before_step(self, policy: Policy, cache: RetainedCache) -> None:
        """A decode step comes.

        Raises:
            SpecError: for steps that count, where the states are not about all that the cache has seen.
        """
        if self.decode:
            _covering(cache)
        self._flush_others(cache, Pending.DECODED if self.decode else Pending.GENERATED)

    def after_step(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows | None,
    ) -> None:
        """A token (rows, 1) has been decoded: it is pending until a breath is due. The first of all starts states."""
        first = cache.get_seq_length() == ids.shape[1]
        states = CrystalStates((empty_state(self.budget),) * len(ids)) if first else cache.continuation
        if isinstance(states, CrystalStates):
            cache.continuation = states.read(ids, Pending.DECODED if self.decode else Pending.GENERATED)
            if self.due(cache.continuation):
                self.flush_pending(cache)

    def before_reading(self, policy: Policy, cache: RetainedCache) -> None:
        """Tokens come that nobody decides about; those that are pending were read in another way."""
        self._flush_others(cache, Pending.READ)

    def after_reading(
        self, policy: Policy, budget: Budget, cache: RetainedCache, ids: Tensor, observed: ObservedRows,
    ) -> None:
        """Tokens (rows, n) have been read: they are pending, and no steps."""
        if isinstance(cache.continuation, CrystalStates):
            cache.continuation = cache.continuation.read(ids, Pending.READ)

    def _flush_others(self, cache: RetainedCache, kind: Pending) -> None:
        states = cache.continuation
        if isinstance(states, CrystalStates) and (states.pending or states.spliced) and states.kind != kind:
            self.flush_pending(cache)

    def due(self, states: CrystalStates) -> bool:
        """Whether the newest of the pending tokens is a step that ends in a breath."""
        before = states.rows[0].step if states.rows else 0
        return self.decode and (before + states.pending_tokens) % self.parameters.T_breath == 0

    def flush_pending(self, cache: RetainedCache) -> None:
        """The states know all that the cache has seen, and the cache stores what they do: a breath may have evicted.

        Raises:
            SpecError: when they cannot; nothing has changed.
        """
        before = _covering(cache)
        after = self.flushed(before, cache.keys_of(self.parameters.observed_layer))
        if before.spliced or any(new.live is not old.live for new, old in zip(after.rows, before.rows, strict=True)):
            cache.compact([Retention.shared(state.stored, state.seen) for state in after.rows])
        cache.continuation = after

    def flushed(self, states: CrystalStates, keys: Tensor) -> CrystalStates:
        """No token is pending any more: each has joined its row's tail, by a decode step if it was read as one.

        A chunk has joined the trunks. Until a breath or a segment is due nobody asks for a state, and keys stay on
        their device.

        Args:
            states: what is known.
            keys: the observed layer's, (rows, H_kv, stored, d); those of the pending tokens are the last.
        """
        stored = states.pending_tokens + sum(len(chunk.kept) for chunk in states.spliced)
        if not states.pending and not states.spliced:
            return states
        rows, started = [], states.rows or (empty_state(self.budget),) * len(keys)
        ids = states.ids() or [[] for _ in started]
        for row, (state, own) in enumerate(zip(started, ids, strict=True)):
            norms = _inverse_norms(self.engine, keys[row, :, keys.shape[2] - stored :])
            rows.append(_followed(self, replace(state, budget=self.budget), own, norms, states))
        return CrystalStates(tuple(rows), states.seen)


def _followed(
    rule: DecodeRule, state: DecodeState, ids: Sequence[int], norms: Float64[Vector, " stored"], states: CrystalStates,
) -> DecodeState:
    """One row's state after its tokens and the chunks between them, whose stored keys have these inverse norms."""
    constants, chunks, at = (rule.sentence_ends, rule.parameters, rule.engine), list(states.spliced), 0
    for place in range(len(ids) + 1):
        while chunks and chunks[0].after == place:
            chunk = chunks.pop(0)
            own = norms[at : at + len(chunk.kept)]
            state, at = join_chunk(state, chunk.token_ids, chunk.kept, own, *constants), at + len(own)
        if place < len(ids):
            state, at = _joined_by(rule, state, ids[place], float(norms[at]), states.kind), at + 1
    return state


def _joined_by(rule: DecodeRule, state: DecodeState, token: int, norm: float, kind: Pending) -> DecodeState:
    """The state after one token that was read in this way."""
    if kind is Pending.DECODED:
        return decode_step(state, token, norm, rule.sentence_ends, rule.parameters, rule.engine)
    after = append(state, token, norm)
    return replace(after, step=state.step) if kind is Pending.READ else after


def _inverse_norms(engine: Backend, keys: Tensor) -> Float64[Vector, " n"]:
    accepts_tensor = engine.takes
    on_device = accepts_tensor is not None and accepts_tensor(keys)
    norms: Vector = engine.require_breath().inverse_key_norms(keys if on_device else on_host(keys))
    return np.asarray(norms)


def _covering(cache: RetainedCache) -> CrystalStates:
    """The cache's states, which are about all that it has seen.

    Raises:
        SpecError: otherwise.
    """
    seen, states = cache.get_seq_length(), cache.continuation
    if not isinstance(states, CrystalStates) or not states.covers(seen):
        raise SpecError(
            "past_key_values", f"{seen} tokens", "the policy's states do not cover all of them: some were read outside "
            "the context, under a different policy, or under a backend without decode"
        )
    return states
