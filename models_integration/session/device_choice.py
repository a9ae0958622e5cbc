"""Kept positions of layers, chosen where the layers' tensors are: the host waits once, for those of all layers."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from models_integration.cache.continuation import Decision, Nothing, ObservedRows
from models_integration.cache.device_compaction import Chosen, gather, read_retentions, settle
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.scorer_records import ScorerRecords
from models_integration.session.method import Method
from reference.policies.budgets import Above, Adaptive, Competition
from reference.policies.names import with_twins
from reference.policies.retain import tokens_of
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_tokens, top_units
from spec.backend import Backend
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Observation, Policy, Running, Scores

__all__ = ["DeviceChoices", "choose", "policy_on_device"]

@dataclass
class DeviceChoices:
    """Layers of a first prompt that were compacted before the host knows what they keep."""

    method: Method
    cache: RetainedCache
    copies: int
    """Rows of the batch that stand for one prompt."""
    layers: dict[int, list[Chosen]] = field(default_factory=dict)

    def take(self, layer: int, policy: Policy, observed: ObservedRows) -> bool:
        """Compact a layer, if the policy of this layer can choose on the device; whether that is so.

        Raises:
            SpecError: if the budget does not hold the protected tokens.
        """
        engine, found = self.method.engine, list[Chosen]()
        if engine is None or policy_on_device(policy, engine) is None:
            return False
        for row in observed.prompts:
            one = choose(policy, engine, self.method.budget, observed.prompt(row, policy.granularity))
            if one is None:
                return False
            found.append(one)
        gather(self.cache, layer, [one for one in found for _ in range(self.copies)])
        self.layers[layer] = found
        return True

    def read(self, padding: Tensor | None) -> list[Decision]:
        """The decisions about the layers that were taken, in their order.

        Raises:
            SpecError: for a token without a score.
        """
        policy, parts = self.method.policy, list[Decision]()
        each = read_retentions(self.layers.values(), policy.granularity) if self.layers else []
        for layer, kept in zip(self.layers, each, strict=True):
            settle(self.cache, layer, [one for one in kept for _ in range(self.copies)], padding)
            rows = tuple(Running(one.positions.reshape(one.groups, -1), None) for one in kept)
            after = Nothing() if policy.cadence.every is None else ScorerRecords(policy.name, rows)
            parts.append(Decision(kept, after, padding=padding))
        self.layers.clear()
        return parts


def policy_on_device(policy: Policy, engine: Backend) -> Policy | None:
    """A layerwise policy with scores on the device, if the number of tokens that it keeps depends on no score."""
    twin = with_twins(policy, replace(engine, scores=engine.tensors))
    selector = getattr(policy.selector, "func", policy.selector)
    if twin is policy or selector not in (top_units, top_tokens) or isinstance(policy.budgets, Above):
        return None
    return twin if isinstance(twin.scorer, LayerScorer) else None


def choose(policy: Policy, engine: Backend, budget: Budget, one: Observation) -> Chosen | None:
    """What a policy of one layer keeps of a prompt, if it can choose on the device.

    Raises:
        SpecError: if the budget does not hold the protected tokens.
    """
    (view,), twin = one.layers.values(), policy_on_device(policy, engine)
    if twin is None or not isinstance(view.k, Tensor):
        return None
    assert isinstance(twin.scorer, LayerScorer)
    values, protected = cast(Tensor, twin.scorer.score(view)), policy.protection(one.seen)
    (g, n), pinned = values.shape, int(protected.sum())
    held = torch.from_numpy(protected).to(values.device).expand(g, n)
    unscored, values = values.isnan() & ~held, values.masked_fill(held, torch.nan)
    shares, kept = _shares(policy, engine, tokens_of(policy, budget, one.seen), values, pinned)
    marks = engine.tensors["top_units"](values, shares, held).flatten()
    first = torch.where(unscored.any(), unscored.flatten().int().argmax(), -1)
    return Chosen(torch.argsort((~marks).int(), stable=True)[:kept], first[None], g, n)


def _shares(policy: Policy, engine: Backend, B: int, values: Tensor, pinned: int) -> tuple[Tensor, int]:
    """Of each kept set (g,), on the device, and their sum.

    Raises:
        SpecError: if the budget does not hold the protected tokens.
    """
    g, n = values.shape
    free = min(B, n) * g - pinned * g
    if free < 0:
        raise SpecError("budget", B, f"must hold the {pinned} protected tokens of {policy.name}")
    if isinstance(policy.budgets, Adaptive | Competition):
        shares = engine.tensors[type(policy.budgets).__name__](values, free, pinned, policy.budgets.safeguard)
        return shares, free + pinned * g
    whole = policy.budgets(B * g, Scores(cast(Any, values), np.arange(n + 1), heads=g)).clip(pinned, n)
    return torch.from_numpy(whole).to(values.device), int(whole.sum())
