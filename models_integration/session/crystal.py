"""CrystalCache on the rows of a cache: first prompts, later segments, decode steps and spliced chunks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.continuation import Continuation, CrystalStates, Decision, Pending
from models_integration.cache.dense_layer import on_host
from models_integration.cache.retained_cache import RetainedCache
from models_integration.session.method import Method, check_layers_agree
from models_integration.session.observed import ObservedSegment
from reference.crystalcache import decode_step, empty_state, extend, start_state
from reference.crystalcache.tail import append, join_chunk
from reference.policies import retain
from reference.policies.budgets import tokens_of
from reference.policies.crystalcache import CrystalScorer
from spec.arrays import Float64, Int64, IntVector, Matrix, Vector
from spec.backend import Backend
from spec.decode import DecodeState
from spec.errors import SpecError
from spec.parameters import PAPER, CrystalCacheParameters
from spec.policy import LayerView, Observation, Policy
from spec.printing import short
from spec.records import CrystalRetention
from spec.retention import Retention

__all__ = ["CrystalMethod"]


@dataclass(frozen=True, kw_only=True, repr=False)
class CrystalMethod(Method):
    """CrystalCache with a budget. The cache contains the states of all rows.

    If `decode` is True, a breath evicts tokens after every T_breath decode steps. If `decode` is False, eviction
    follows only segments, and tokens of decode steps are pending until the next segment.

    Attributes:
        sentence_ends: ids of the tokens that end a sentence.
        parameters: constants of the policy.
        stream: if True, a segment ends after every C tokens, independent of the forward passes.
    """

    sentence_ends: frozenset[int]
    parameters: CrystalCacheParameters
    stream: bool = False

    @property
    def settings(self) -> str:
        """Settings of `Method`, the number of sentence ends, and the parameters that differ from the paper's."""
        flags = {name: True for name in ("decode", "stream") if getattr(self, name)}
        changed = {name: value for name, value in vars(self.parameters).items() if value != getattr(PAPER, name)}
        more = "".join(f", {name}={value!r}" for name, value in (changed | flags).items())
        return f"{super().settings}, sentence_ends={short(self.sentence_ends, 30)}{more}"

    @property
    def segment_tokens(self) -> int | None:
        """Number of tokens in a segment of a stream, or None if segments end with forward passes."""
        return self.parameters.C if self.stream else None

    def decide_prompt(self, observed: ObservedSegment) -> Decision:
        """Apply S1 to S6 to first prompts, and make the states for later decisions."""
        retentions, states = [], []
        observations = (observed.prompt(row, self.policy.granularity) for row in observed.prompts)
        for policy, observation in self._begun(observations):
            retention = retain(policy, self.budget, observation)
            assert isinstance(retention, CrystalRetention)
            state = self.started(retention, observation)
            retentions.append(retention)
            states += [] if state is None else [state]
        known = CrystalStates(tuple(states), observed.columns) if states else Continuation()
        return Decision(tuple(retentions), known)

    def _begun(self, observations: Iterable[Observation]) -> Iterator[tuple[Policy, Observation]]:
        """Yield the policy and the observation of each prompt.

        If the backend can, it runs the stages of all prompts before the host waits for a result.
        """
        policy, scorer = self.policy, self.policy.scorer
        assert isinstance(scorer, CrystalScorer)
        if (rows := getattr(scorer.prefill, "rows", None)) is None:
            yield from ((policy, one) for one in observations)
            return
        prompts = [replace(one, B=tokens_of(policy, self.budget, one.seen)) for one in observations]
        every = rows([scorer.prompt(one, policy.protection(one.seen)) for one in prompts])
        for decided, one in zip(every, prompts, strict=True):
            yield replace(policy, scorer=replace(scorer, decided=decided)), one

    def started(self, retention: CrystalRetention, observation: Observation) -> DecodeState | None:
        """Return the state after a first prompt, or None if the backend has no decode stages."""
        if self.engine.breath is None:
            return None
        assert observation.token_ids is not None
        (view,) = observation.layers.values()
        norms = retention.inverse_norms
        if norms is None:
            norms = self.engine.breath.inverse_key_norms(view.k)
        return start_state(retention, observation.token_ids, norms, self.budget, self.parameters)

    def check_blocks(self) -> None:
        """Accept blocks, except of a stream.

        Raises:
            SpecError: if the policy is a stream, which evicts after every C tokens.
        """
        if self.stream:
            reason = f"a stream has blocks of {self.segment_tokens} tokens: leave block out"
            raise SpecError("policy", self.policy.name, reason)

    def check_turn(self, cache: RetainedCache) -> None:
        """Check that a later segment can follow.

        Raises:
            SpecError: if layers store different positions.
        """
        check_layers_agree(self.policy, cache)

    def check_padded(self, cache: RetainedCache) -> None:
        """Accept padded turns."""

    def decide_turn(self, observed: ObservedSegment) -> Decision:
        """Apply S1 to S6 to later segments, starting from the states."""
        before, states = observed.cache.continuation, []
        assert isinstance(before, CrystalStates)
        for row in observed.prompts:
            (view,) = observed.stored(row, self.policy.granularity).layers.values()
            states.append(self.extended(before.rows[row], view, observed.token_ids(row)))
        retentions = tuple(Retention.shared(state.stored, state.seen) for state in states)
        return Decision(retentions, CrystalStates(tuple(states), before.seen + observed.columns))

    def extended(self, state: DecodeState, view: LayerView, ids: Int64[IntVector, " n"]) -> DecodeState:
        """Return the state after a later segment. The last keys of `view` are the keys of the segment."""
        return extend(
            replace(state, budget=self.budget), view.q, view.k, ids, self.sentence_ends, self.parameters, self.engine,
            scaling=view.scaling, softcap=view.softcap, sinks=view.sinks,
        )

    def count_sentence_ends(self, observed: ObservedSegment) -> int:
        """Return the number of tokens of a segment that end a sentence."""
        tokens = observed.input_ids[observed.is_token].tolist()
        return sum(token in self.sentence_ends for token in tokens)

    def before_step(self, cache: RetainedCache) -> None:
        """Check that a decode step can follow.

        Raises:
            SpecError: if steps are counted and the states do not include all tokens that the cache has seen.
        """
        if self.decode:
            _covering(cache)
        self._flush_others(cache, Pending.DECODED if self.decode else Pending.GENERATED)

    def after_step(self, cache: RetainedCache, ids: Tensor, observed: ObservedSegment | None) -> None:
        """Record a decoded token (rows, 1), pending until a breath is due. A session's first token makes the states."""
        first = cache.get_seq_length() == ids.shape[1]
        states = CrystalStates((empty_state(self.budget),) * len(ids)) if first else cache.continuation
        if isinstance(states, CrystalStates):
            cache.continuation = states.read(ids, Pending.DECODED if self.decode else Pending.GENERATED)
            if self.due(cache.continuation):
                self.flush_pending(cache)

    def before_reading(self, cache: RetainedCache) -> None:
        """Process pending tokens of a different kind before tokens are read without eviction."""
        self._flush_others(cache, Pending.READ)

    def after_reading(self, cache: RetainedCache, ids: Tensor, observed: ObservedSegment) -> None:
        """Record tokens (rows, n) that were read without eviction. The tokens are pending, and not decode steps."""
        if isinstance(cache.continuation, CrystalStates):
            cache.continuation = cache.continuation.read(ids, Pending.READ)

    def _flush_others(self, cache: RetainedCache, kind: Pending) -> None:
        states = cache.continuation
        if isinstance(states, CrystalStates) and (states.pending or states.spliced) and states.kind != kind:
            self.flush_pending(cache)

    def due(self, states: CrystalStates) -> bool:
        """Return True if the newest pending token is a decode step after which a breath is due."""
        before = states.rows[0].step if states.rows else 0
        return self.decode and (before + states.pending_tokens) % self.parameters.T_breath == 0

    def flush_pending(self, cache: RetainedCache) -> None:
        """Add all pending tokens to the states, and compact the cache if a breath has evicted tokens.

        Raises:
            SpecError: if a pending token cannot be added. Nothing is changed.
        """
        before = _covering(cache)
        after = self.flushed(before, cache.keys_of(self.parameters.observed_layer))
        if before.spliced or any(new.live is not old.live for new, old in zip(after.rows, before.rows, strict=True)):
            cache.compact([Retention.shared(state.stored, state.seen) for state in after.rows])
        cache.continuation = after

    def flushed(self, states: CrystalStates, keys: Tensor) -> CrystalStates:
        """Return the states after all pending tokens are added to the tails, and all chunks to the trunks.

        A token that was read as a decode step is added by a decode step. Until this call, keys stay on the device.

        Args:
            states: states with pending tokens or chunks.
            keys: keys of the observed layer, (rows, H_kv, stored, d). The last keys belong to the pending tokens.
        """
        stored = states.pending_tokens + sum(len(chunk.kept) for chunk in states.spliced)
        if not states.pending and not states.spliced:
            return states
        started = states.rows or (empty_state(self.budget),) * len(keys)
        rows = zip(started, *_read(self.engine, states, keys[:, :, keys.shape[2] - stored :]), strict=True)
        return CrystalStates(tuple(
            _followed(self, replace(state, budget=self.budget), ids, norms, states) for state, ids, norms in rows
        ), states.seen)


def _followed(
    method: CrystalMethod, state: DecodeState, ids: Sequence[int], norms: Float64[Vector, " stored"],
    states: CrystalStates,
) -> DecodeState:
    """Return the state of one row, updated by its pending tokens and chunks.

    `norms` has their stored keys' inverse norms.
    """
    constants, chunks, at = (method.sentence_ends, method.parameters, method.engine), list(states.spliced), 0
    for place in range(len(ids) + 1):
        while chunks and chunks[0].after == place:
            chunk = chunks.pop(0)
            chunk_norms = norms[at : at + len(chunk.kept)]
            state, at = join_chunk(state, chunk.token_ids, chunk.kept, chunk_norms, *constants), at + len(chunk_norms)
        if place < len(ids):
            state, at = _joined_by(method, state, ids[place], float(norms[at]), states.kind), at + 1
    return state


def _joined_by(method: CrystalMethod, state: DecodeState, token: int, norm: float, kind: Pending) -> DecodeState:
    """Return the state after one token. `kind` is the kind of the forward pass that processed the token."""
    if kind is Pending.DECODED:
        return decode_step(state, token, norm, method.sentence_ends, method.parameters, method.engine)
    after = append(state, token, norm)
    return replace(after, step=state.step) if kind is Pending.READ else after


def _read(
    engine: Backend, states: CrystalStates, keys: Tensor,
) -> tuple[list[list[int]], Float64[Matrix, "rows stored"]]:
    """Return the pending ids and the inverse norms of each row. `keys` (rows, H_kv, stored, d) are of these tokens.

    If the backend computes the norms on the device, the host waits once for ids and norms of all rows.
    """
    (rows, _, stored, _), one_row = keys.shape, keys.transpose(0, 1).flatten(1, 2)
    accepts_tensor, norms_of = engine.accepts_tensor, engine.tensors.get("inverse_key_norms")
    on_device = accepts_tensor is not None and accepts_tensor(one_row)
    if not on_device or norms_of is None:
        norms = engine.require_breath().inverse_key_norms(one_row if on_device else on_host(one_row))
        return states.ids() or [[] for _ in keys], np.asarray(norms).reshape(rows, stored)
    computed: Any = norms_of(one_row)
    pending = torch.cat(states.pending or (keys.new_empty((rows, 0)),), dim=1)
    ids = pending.to(keys.device, torch.int64, non_blocking=True)
    at_once = torch.cat([ids.flatten(), computed.view(torch.int64)]).cpu()
    read, bits = torch.split(at_once, [ids.numel(), rows * stored])
    return read.view(ids.shape).tolist(), bits.view(torch.float64).view(rows, stored).numpy()


def _covering(cache: RetainedCache) -> CrystalStates:
    """Return the states of the cache.

    Raises:
        SpecError: if the states do not include all tokens that the cache has seen.
    """
    seen, states = cache.get_seq_length(), cache.continuation
    if not isinstance(states, CrystalStates) or not states.covers(seen):
        raise SpecError(
            "past_key_values", f"{seen} tokens", "the policy's states do not cover all of them: some were read outside "
            "the context, under a different policy, or under a backend without decode"
        )
    return states
