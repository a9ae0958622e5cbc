"""CAKE's cascade: while the model processes a prompt, each new layer takes a share of the budget of earlier layers."""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from models_integration.cache.continuation import Decision
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.device_compaction import settle, unsettled
from models_integration.cache.retained_cache import RetainedCache, failing_whole, storage_bytes
from models_integration.model.architecture import Architecture
from models_integration.session.method import Method
from models_integration.session.observed import ObservedSegment
from reference.policies.budgets import tokens_of
from reference.policies.cake import Cake
from reference.policies.layers import is_cascading
from spec.arrays import IntMatrix, IntVector, Vector
from spec.policy import Observation, Policy, Scores
from spec.retention import Retention

__all__ = ["Cascade", "can_cascade"]

Part: TypeAlias = tuple[Tensor, Tensor, IntVector]
"""Keys and values (tokens, d) of one layer, and labels (row * H + head) * columns + column."""
LOG_ZERO = -1_000.0
"""Logarithm of a preference of 0, below the logarithm of every positive float64."""
SPARE = 2
"""Slots of the pool for each layer, beyond the budget."""


@dataclass
class Cascade:
    """Evict with CAKE while the model processes a prompt.

    The cache contains at most one full layer, and in every layer the budget plus two tokens per KV head.

    The heads of a layer have equal shares, and each head keeps the tokens with the best ranks. Therefore a slot of the
    pool contains one rank of a layer, which means one token of each KV head. Before rounding, the share of a layer is
    min(n, W + x * preference), with one x for all layers. Therefore the kept ranks are, except for rounding, the ranks
    with the lowest costs. The cost of a rank is log(rank - W - 1) - log(preference). A later layer does not change the
    cost, so a rank that was evicted from the pool cannot belong to a share. Rounding adds at most one rank to a share,
    and the cost has a margin of one rank. The number of slots does not depend on the scores. Therefore the host reads
    the scores once, at the end, and then computes the exact shares.
    """

    method: Method
    cache: RetainedCache
    copies: int
    """Number of rows of the batch for each prompt."""
    pooled: list[int] = field(default_factory=list)
    """Layers in the pool. The keys and values of a layer are slots of the pool, (rows, H, slots of the layer, d)."""
    preferences: list[Tensor] = field(default_factory=list)
    """Preference of each layer in the pool, (rows,)."""
    tokens: list[int] = field(default_factory=list)
    """Number of tokens of each row."""
    cost: Tensor = torch.empty(0, device="cpu")
    """Cost of each slot, (rows, slots). A free slot has the cost infinity."""
    code: Tensor = torch.empty(0, device="cpu")
    """Code (layer * columns + rank) * columns + column of each token in the pool, (rows, H, slots). Free slots: -1."""

    def take(self, layer: int, policy: Policy, observed: ObservedSegment) -> bool:
        """Move a layer to the pool, and evict the ranks with the highest costs. Always return True."""
        prompts = [observed.prompt(row, policy.granularity) for row in observed.prompts]
        ranked = [[rank_tokens(policy, one, observed.columns)] * self.copies for one in prompts]
        order, cost, preferences = map(torch.stack, zip(*chain.from_iterable(ranked), strict=True))
        if not self.pooled:
            self.tokens = [one.seen for one in prompts for _ in range(self.copies)]
            self.cost, self.code = cost[:, :0], order[:, :, :0]
        self.preferences.append(preferences)
        most = max(min(n, tokens_of(policy, self.method.budget, n)) for n in self.tokens)
        free = (most + SPARE) * len(self.cache.full_layers) - self.cost.shape[1]
        before = storage_bytes(self.cache.full_layers)
        with failing_whole(self.cache):
            self._absorb(layer, order, cost, min(free, observed.columns))
        self.cache.bytes_freed += before - storage_bytes(self.cache.full_layers)
        return True

    def _absorb(self, index: int, order: Tensor, cost: Tensor, fresh: int) -> None:
        """Add `fresh` free slots to the pool.

        Then overwrite the slots with the highest costs by tokens of a layer, in the order of their ranks.
        """
        layer, (rows, H, columns) = self.cache.layers[index], order.shape
        assert isinstance(layer, DenseLayer)
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        free = [x.new_zeros(rows, H, fresh, x.shape[3]) for x in (keys, values)]
        self.cache.layers[index] = unsettled(layer, free[0], free[1], self.tokens)
        old_cost, old_code = pad(self.cost, (0, fresh), value=torch.inf), pad(self.code, (0, fresh), value=-1)
        slots = old_cost.shape[1]
        lowest = torch.argsort(torch.cat([old_cost, cost], dim=1), dim=1, stable=True)[:, :slots]
        stays = torch.zeros(rows, slots + columns, dtype=torch.bool, device=cost.device)
        stays = stays.scatter_(1, lowest, value=True)[:, :slots]
        rank = ((~stays).cumsum(dim=1) - 1).clamp(min=0)
        code = (len(self.pooled) * columns + torch.arange(columns, device=cost.device)) * columns + order
        self.cost = torch.where(stays, old_cost, cost.gather(1, rank))
        self.code = torch.where(stays[:, None], old_code, code.gather(2, rank[:, None].expand(-1, H, -1)))
        self.pooled.append(index)
        # If the pool grows by a whole layer, no slot is overwritten.
        self._write(keys, values, stays, len(self.pooled) - 1 if fresh == columns else 0)

    def _write(self, keys: Tensor, values: Tensor, stays: Tensor, first: int) -> None:
        """Write tokens of a layer (rows, H, columns, d) to slots of the pool. Skip pool layers before index `first`."""
        rows, H, columns, _ = keys.shape
        heads = torch.arange(rows * H, device=self.code.device).view(rows, H, 1)
        pool, sources = self._pool(), heads * columns + self.code % columns
        sizes = [layer.keys.shape[2] for layer in pool]
        slots = zip(pool, sources.split(sizes, 2), stays.split(sizes, 1), strict=True)  # type: ignore[no-untyped-call]
        for layer, source, stay in list(slots)[first:]:
            change, at = (~stay)[:, None].expand(source.shape).flatten(), source.flatten()
            # On the CPU the indices are known without a wait, so only the changed slots are written.
            to = change.nonzero()[:, 0] if change.is_cpu else None
            for old, new in ((layer.keys, keys), (layer.values, values)):
                old, new = old.flatten(0, 2), new.flatten(0, 2)
                if to is None:
                    old.copy_(torch.where(change[:, None], new.index_select(0, at), old))
                else:
                    there = to.to(new.device, non_blocking=True)
                    old.index_copy_(0, there, new.index_select(0, at[to].to(new.device, non_blocking=True)))

    def read(self, padding: Tensor | None) -> list[Decision]:
        """Evict the tokens beyond the exact shares, and return the decision about each layer of the pool."""
        if not self.pooled:
            return []
        before, freed, decisions = storage_bytes(self.cache.full_layers), self.cache.bytes_freed, list[Decision]()
        with failing_whole(self.cache):
            for index, layer, parts in zip(self.pooled, self._pool(), self._parts(), strict=True):
                layer.keys, layer.values, labels = merge(parts)
                retentions = self._retentions(labels)
                settle(self.cache, index, (), retentions, padding)
                decisions.append(Decision(tuple(retentions[:: self.copies]), padding=padding, on_device=True))
        self.cache.bytes_freed = freed + before - storage_bytes(self.cache.full_layers)
        self.pooled.clear()
        return decisions

    def _parts(self) -> list[list[Part]]:
        """Return the kept tokens of each layer, in parts. The slots of a pool layer are freed once they were read."""
        labels, start, parts_of_layers = self._labels(), 0, [list[Part]() for _ in self.pooled]
        places = len(labels) * self.cache.get_seq_length()
        for layer in self._pool():
            keys, values = layer.keys.flatten(0, 2), layer.values.flatten(0, 2)
            labels_here = labels[:, start : start + len(keys) // len(labels)].ravel()
            start += len(labels_here) // len(labels)
            for ordinal, parts in enumerate(parts_of_layers):
                at = np.flatnonzero(labels_here // places == ordinal)
                parts.append((select(keys, at), select(values, at), labels_here[at] % places))
            layer.keys = layer.values = None
        return parts_of_layers

    def _pool(self) -> list[Any]:
        """Return the layers whose keys and values are the slots of the pool."""
        return [self.cache.layers[index] for index in self.pooled]

    def _labels(self) -> IntMatrix:
        """Return a label for each slot: ((layer * rows + row) * H + head) * columns + column, or -1 if evicted."""
        code, preferences = self.code.flatten(0, 1), torch.stack(self.preferences, dim=1)
        flat = torch.cat([code.flatten(), preferences.view(torch.int64).flatten()]).cpu().numpy()
        slots, weights = np.split(flat, [code.numel()])
        slots, weights = slots.reshape(code.shape), weights.view(np.float64).reshape(preferences.shape)
        shares = np.concatenate([self._shares(n, row) for n, row in zip(self.tokens, weights, strict=True)])
        columns, sets = self.cache.get_seq_length(), np.arange(len(slots))[:, None]
        layer, rank = np.divmod(slots // columns, columns)
        kept = (layer >= 0) & (rank < shares[sets, layer])
        return np.where(kept, (layer * len(slots) + sets) * columns + slots % columns, -1)

    def _shares(self, n: int, preferences: Vector) -> IntMatrix:
        """Return the shares of a row of n tokens, (H, layers), from the budgets of the policy."""
        policy, H, L = self.method.policy, self.code.shape[1], len(preferences)
        unread = np.broadcast_to(np.nan, (L * H, n))
        scores = Scores(unread, np.arange(n + 1), heads=H, preferences=preferences)
        shares: IntMatrix = policy.budgets(tokens_of(policy, self.method.budget, n) * L * H, scores).reshape(L, H).T
        return shares

    def _retentions(self, labels: IntVector) -> list[Retention]:
        """Return the retention of each row, from the ascending labels of a layer."""
        columns, H = self.cache.get_seq_length(), self.code.shape[1]
        sizes = np.bincount(labels // columns, minlength=len(self.tokens) * H).reshape(-1, H)
        rows = np.split(labels % columns, np.cumsum(sizes.sum(axis=1))[:-1])
        return [
            Retention(at - columns + n, np.append(0, np.cumsum(head_sizes)), n, self.method.policy.granularity)
            for at, head_sizes, n in zip(rows, sizes, self.tokens, strict=True)
        ]


def can_cascade(policy: Policy, architecture: Architecture) -> bool:
    """Return True if the policy cascades and all weights of the decoder are on one device."""
    return is_cascading(policy) and len({weights.device for weights in architecture.decoder.parameters()}) == 1


def rank_tokens(policy: Policy, prompt: Observation, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columns by rank (H, columns), the cost of each rank (columns,), and the preference () of a layer."""
    (view,), n, protected = prompt.layers.values(), prompt.seen, policy.protection(prompt.seen)
    scorer = cast(Cake, policy.scorer)
    ranked = scorer.layer(view, scorer.W, scorer.kernel, scorer.gamma, scorer.tau1, scorer.tau2)
    scores, preference = torch.as_tensor(ranked[0]), torch.as_tensor(ranked[1]).double().view(())
    free = torch.from_numpy(~protected).to(scores.device, non_blocking=True).expand(scores.shape)
    order = torch.argsort(-scores, dim=1, stable=True)
    order = order.gather(1, torch.argsort(free.gather(1, order).int(), dim=1, stable=True))
    rank, padding = torch.arange(columns, device=scores.device), columns - n
    order = torch.cat([order + padding, rank[:padding].expand(len(order), -1)], dim=1)
    cost = (rank - int(protected.sum()) - 1).clamp(min=0).double().log() - preference.log().clamp(min=LOG_ZERO)
    return order, cost.masked_fill(rank >= n, torch.inf), preference


def merge(parts: list[Part]) -> Part:
    """Join the parts of a layer, sorted by label, and empty the list `parts`."""
    keys, values, labels = zip(*parts, strict=True)
    parts.clear()
    joined = np.concatenate(labels)
    at = np.argsort(joined)
    return select(torch.cat(keys), at), select(torch.cat(values), at), joined[at]


def select(x: Tensor, at: IntVector) -> Tensor:
    """Return rows of a tensor, by index."""
    return x.index_select(0, torch.from_numpy(at).to(x.device, non_blocking=True))
