"""Decisions about one request, from its keys, values and queries. The decisions survive a preemption."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.dense_layer import on_host
from models_integration.engines.vllm.arguments import RequestPolicy
from models_integration.engines.vllm.statement import eviction
from reference.crystalcache.observed_layer import observed_layer
from reference.policies import advance, retain, start
from spec.arrays import Int64, IntMatrix, IntVector
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation, Policy, Running
from spec.retention import Granularity, Retention

__all__ = ["Decider", "LayerFacts"]


@dataclass(frozen=True)
class LayerFacts:
    """Constants of the attention of one layer."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None


@dataclass
class Decider:
    """Decisions about one request.

    Attributes:
        asked: policy of the request.
        policy: policy with the constants of the model.
        n: number of tokens in the prompt.
        layers: facts about each layer.
        heads: number of KV heads of a layer.
        live: positions of the tokens that the cache stores, (g, live). Set by decisions that were made, also if a
            preempted request has not yet carried them out again.
        queries: queries since the last decision, by layer.
        watched: layers whose tensors the policy reads.

    Raises:
        SpecError: if the policy reads a layer that the model does not have.
    """

    asked: RequestPolicy
    policy: Policy
    n: int
    layers: Sequence[LayerFacts]
    heads: int
    observed: int = 0
    """Number of tokens after which the last decision or decode step was seen."""
    queries: dict[int, list[Tensor]] = field(default_factory=dict)
    _running: Running | None = None
    _kept: dict[int, Int64[IntMatrix, "g kept"]] = field(default_factory=dict)
    """Slots that each decision keeps, by the number of tokens processed."""
    watched: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        every, needs = range(len(self.layers)), self.needs
        one = [observed_layer(every, needs.observed)] if needs.layers == "observed" else []
        self.watched = every if needs.layers == "all" else one

    @property
    def needs(self) -> Needs:
        """Return the tensors that the policy reads."""
        return self.policy.scorer.needs

    def kept(self, event: int) -> IntMatrix | None:
        """Return the kept slots of a decision, or None if the decision has not been made or keeps all tokens."""
        return self._kept.get(event)

    def wants(self, position: int) -> bool:
        """Return True if the policy reads the query at this position in the next decision."""
        if position < self.observed or not self.watched or self.needs.query_rows == 0:
            return False
        if position >= self.n:
            return self.policy.cadence.every is not None
        return self.needs.query_rows is None or position >= self.n - self.needs.query_rows

    def decide(self, seen: int, slots: int, tensors: Callable[[int], tuple[Tensor, Tensor]], ids: IntVector) -> Any:
        """Make the decision after `seen` tokens, unless it was made before.

        Args:
            seen: number of tokens that the model has processed.
            slots: number of tokens that the cache stores.
            tensors: function that returns the keys and values (H_kv, slots, d) of a layer.
            ids: token ids of the prompt.

        Returns:
            Entry of the statement, or None if the policy evicts nothing after this token, or decided earlier.

        Raises:
            SpecError: if the sets of kept tokens have different sizes.
        """
        if seen <= self.observed:
            return None
        assert seen == self.n or seen == self.observed + 1, (seen, self.observed, self.n)
        views = {layer: self._view(layer, slots, *tensors(layer)) for layer in self.watched}
        self.queries.clear()
        groups = {
            Granularity.MODEL: 1, Granularity.LAYER: len(self.layers), Granularity.HEAD: len(self.layers) * self.heads,
        }[self.policy.granularity]
        one = Observation(seen, groups, ids if self.needs.token_ids else None, views)
        retention = self._first(one) if seen == self.n else self._later(one)
        self.observed = seen
        if retention is None or self.kept(seen) is None:
            return None
        return eviction(seen, retention.positions.reshape(groups, -1), self.policy.granularity, len(self.layers))

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

    def _keep(self, seen: int, slots: IntMatrix, stored: int) -> None:
        assert seen not in self._kept, f"a second decision after {seen} tokens"
        if slots.shape[1] < stored:
            self._kept[seen] = slots.astype(np.int32)

    def _view(self, layer: int, slots: int, keys: Tensor, values: Tensor) -> LayerView:
        facts, seen = self.layers[layer], self.queries.get(layer)
        rows = torch.cat(seen).transpose(0, 1) if seen else None
        assert keys.shape[1] == slots
        view = LayerView(
            rows, keys, values if self.needs.values else None, facts.scaling, facts.softcap, sinks=facts.sinks
        )
        takes = self.needs.takes
        if takes is not None and takes(keys):
            return view
        return replace(view, **{name: on_host(getattr(view, name)) for name in ("q", "k", "v", "sinks")})
