"""Decisions about one request, from its keys, values and queries. The decisions survive a preemption."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.continuation import CrystalStates, Pending
from models_integration.cache.dense_layer import on_host
from models_integration.engines.vllm.arguments import RequestPolicy
from models_integration.session.crystal import CrystalMethod
from reference.crystalcache.observed_layer import observed_layer
from reference.policies import advance, retain, start
from spec.arrays import IntMatrix, IntVector
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation, Policy, Running
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention
from spec.witness import make_eviction

__all__ = ["Decider", "Kept", "LayerFacts", "complement"]


@dataclass(frozen=True)
class LayerFacts:
    """Constants of the attention of one layer."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None


class Kept(NamedTuple):
    """Number of slots that a decision keeps in each set, and the slots (g, e) that the decision evicts."""

    size: int
    evicted: IntMatrix  # stored until the request ends: while decoding, a decision evicts few slots and keeps many


def complement(slots: IntMatrix, stored: int) -> IntMatrix:
    """Return the slots (g, stored - k) below `stored` that are not in `slots` (g, k), ascending."""
    rest = np.ones((len(slots), stored), dtype=np.bool_)
    np.put_along_axis(rest, slots, False, axis=1)
    others: IntMatrix = np.nonzero(rest)[1].reshape(len(slots), -1).astype(np.int32)
    return others


@dataclass
class Decider:
    """Decisions about one request.

    Attributes:
        policy: policy with the constants of the model.
        ids: token ids of the prompt.
        heads: number of KV heads of a layer.
        observed: number of tokens after which the last decision or decode step was seen.
        queries: queries since the last decision, by layer.
        kept: decisions that evict, by the number of tokens processed.
        watched: layers whose tensors the policy reads.
        crystal: CrystalCache, if it evicts in breaths while the answer is generated.

    Raises:
        SpecError: if the policy reads a layer that the model does not have.
    """

    asked: RequestPolicy
    policy: Policy
    ids: IntVector
    layers: Sequence[LayerFacts]
    heads: int
    observed: int = 0
    queries: dict[int, list[Tensor]] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    watched: Sequence[int] = field(init=False)
    crystal: CrystalMethod | None = field(init=False)
    _running: Running | None = None
    _states: CrystalStates = CrystalStates()

    def __post_init__(self) -> None:
        self.crystal = self.asked.crystal("torch")
        every, needs = range(len(self.layers)), self.needs
        one = [observed_layer(every, needs.observed)] if needs.layers == "observed" else []
        self.watched = every if needs.layers == "all" else one

    @property
    def n(self) -> int:
        return len(self.ids)

    @property
    def needs(self) -> Needs:
        return self.policy.scorer.needs

    def first_query(self, done: int) -> int:
        """Return the first position from `done` on whose query the policy reads in the next decision."""
        rows, decoding = self.needs.query_rows, done >= self.n
        if not self.watched or rows == 0 or (decoding and self.policy.cadence.every is None):
            return sys.maxsize
        return max(done, self.observed, 0 if rows is None or decoding else self.n - rows)

    def decide(
        self, seen: int, slots: int, tensors: Callable[[int], tuple[Tensor, Tensor]], token: Tensor,
    ) -> Any:
        """Make the decision after `seen` tokens, unless it was made before.

        Args:
            seen: number of tokens that the model has processed.
            slots: number of tokens that the cache stores.
            tensors: function that returns the keys and values (H_kv, slots, d) of a layer.
            token: id of the newest token, a tensor without dimensions.

        Returns:
            Entry of the statement, or None if the policy evicts nothing after this token, or decided earlier.
        """
        if seen <= self.observed:
            return None
        assert seen == self.n or seen == self.observed + 1, (seen, self.observed, self.n)
        granularity = self.policy.granularity
        rows = 1 if granularity is Granularity.MODEL else len(self.layers)
        groups = rows * self.heads if granularity is Granularity.HEAD else rows
        if self.crystal is not None and seen > self.n:
            retention = self._breath(self.crystal, seen, tensors, token)
        else:
            views = {layer: self._view(layer, slots, *tensors(layer)) for layer in self.watched}
            self.queries.clear()
            one = Observation(seen, groups, self.ids if self.needs.token_ids else None, views)
            retention = self._first(one) if seen == self.n else self._later(one)
        self.observed = seen
        if retention is None or seen not in self.kept:
            return None
        return make_eviction(seen, [list(sets) for sets in retention.positions.reshape(rows, groups // rows, -1)])

    def _first(self, one: Observation) -> Retention:
        if self.policy.cadence.every is None:
            retention = retain(self.policy, self.asked.budget, one)
            sizes = np.diff(retention.offsets)
            if sizes.min() != sizes.max():
                raise SpecError(
                    "policy", self.policy.name, f"kept {sizes.min()} to {sizes.max()} tokens; sets must have one size"
                )
        else:
            retention, self._running = start(self.policy, self.asked.budget, one)
        if self.crystal is not None:
            assert isinstance(retention, CrystalRetention)
            state = self.crystal.started(retention, one)
            assert state is not None, "the backend torch has the stages of a breath"
            self._states = CrystalStates((state,), one.seen)
        self._keep(one.seen, retention.positions.reshape(one.groups, -1), one.seen)
        return retention

    def _later(self, one: Observation) -> Retention | None:
        before = self._running
        assert before is not None
        retention, self._running = advance(self.policy, self.asked.budget, before, one)
        if retention is not None:
            new = np.full((one.groups, 1), one.seen - 1)
            live, kept = np.concatenate([before.live, new], axis=1), self._running.live
            slots = np.stack([np.searchsorted(row, positions) for row, positions in zip(live, kept, strict=True)])
            self._keep(one.seen, slots, live.shape[1])
        return retention

    def _breath(
        self, method: CrystalMethod, seen: int, tensors: Callable[[int], tuple[Tensor, Tensor]], token: Tensor,
    ) -> Retention | None:
        """Add the newest token. Like a session, read the keys of all tokens since the last breath when one is due."""
        self._states = self._states.read(token.view(1, 1), Pending.DECODED)
        if not method.due(self._states):
            return None
        (state,), (layer,) = self._states.rows, self.watched
        live = np.concatenate([state.stored, np.arange(state.seen, seen)])
        self._states = method.flushed(self._states, tensors(layer)[0][None])
        kept = self._states.rows[0].stored
        self._keep(seen, np.searchsorted(live, kept)[None], len(live))
        return Retention.shared(kept, seen)

    def _keep(self, seen: int, slots: IntMatrix, stored: int) -> None:
        assert seen not in self.kept, f"a second decision after {seen} tokens"
        if slots.shape[1] < stored:
            self.kept[seen] = Kept(slots.shape[1], complement(slots, stored))

    def _view(self, layer: int, slots: int, keys: Tensor, values: Tensor) -> LayerView:
        facts, seen = self.layers[layer], self.queries.get(layer)
        rows = torch.cat(seen).transpose(0, 1) if seen else None
        assert keys.shape[1] == slots
        view = LayerView(
            rows, keys, values if self.needs.values else None, facts.scaling, facts.softcap, sinks=facts.sinks
        )
        accepts_tensor = self.needs.accepts_tensor
        if accepts_tensor is not None and accepts_tensor(keys):
            return view
        return replace(view, **{name: on_host(getattr(view, name)) for name in ("q", "k", "v", "sinks")})
