"""Kept positions of layers, chosen where the layers' tensors are: the host waits once, for those of all layers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from models_integration.cache.continuation import Decision, Nothing, ObservedRows
from models_integration.cache.device_compaction import Chosen, gather, read_retentions, settle
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.scorer_records import ScorerRecords
from models_integration.session.method import Method
from reference.policies.budgets import Above, Adaptive, Competition
from reference.policies.chunkkv import Chunks
from reference.policies.criticalkv import EPSILON, TwoScores, two_stages
from reference.policies.defensivekv import Defensive
from reference.policies.expected_attention import ExpectedAttention
from reference.policies.names import with_twins
from reference.policies.retain import tokens_of
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import fill_units, top_tokens, top_units
from reference.policies.triattention import TriAttention
from spec.backend import Backend
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import LayerView, Observation, Policy, Running, Scorer, Scores, Selection

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
    choices = top_units, top_tokens, two_stages, fill_units
    scorer = twin.scorer.host if isinstance(twin.scorer, TwoScores) else twin.scorer
    known = isinstance(scorer, LayerScorer | Chunks | Defensive | ExpectedAttention | TriAttention)
    if not known or selector not in choices or isinstance(policy.budgets, Above):
        return None
    functions = [getattr(part, "func", part) for part in vars(scorer).values()]
    return twin if any(own is one for own in functions for one in engine.tensors.values()) else None


def choose(policy: Policy, engine: Backend, budget: Budget, one: Observation) -> Chosen | None:
    """What a policy of one layer keeps of a prompt, if it can choose on the device.

    Raises:
        SpecError: if the budget does not hold the protected tokens.
    """
    ((layer, view),), twin = one.layers.items(), policy_on_device(policy, engine)
    if twin is None or not isinstance(view.k, Tensor):
        return None
    B, protected = tokens_of(policy, budget, one.seen), policy.protection(one.seen)
    values, pinned = _scores(twin.scorer, layer, view, B, one.seen), int(protected.sum())
    g, n = values.shape
    held = torch.from_numpy(protected).to(values.device).expand(g, n)
    unscored, members, values = values.isnan() & ~held, values, values.masked_fill(held, torch.nan)
    shares, kept = _shares(policy, engine, B, values, pinned)
    top: Callable[..., Tensor] = engine.tensors["top_units"]
    if isinstance(twin.scorer, TwoScores):
        share = cast("partial[Selection]", policy.selector).keywords["share"]
        held = top(values, pinned + (shares - pinned) * share.numerator // share.denominator, held)
        values = (values + EPSILON) * cast(Tensor, twin.scorer.size(view.v, twin.scorer.W_o[layer]))
    if isinstance(twin.scorer, Chunks):
        marks = engine.tensors["fill_units"](members, twin.scorer.c, max(0, n - twin.scorer.W), shares, held).flatten()
    else:
        marks = top(values, shares, held).flatten()
    lost = torch.where(unscored.any(), unscored.flatten().int().argmax(), -1)
    return Chosen(torch.argsort((~marks).int(), stable=True)[:kept], lost[None], g, n)


def _scores(scorer: Scorer, layer: int, view: LayerView, B: int, seen: int) -> Tensor:
    """Of a layer, by a scorer whose functions return tensors."""
    if isinstance(scorer, TwoScores):
        return _scores(scorer.host, layer, view, B, seen)
    if isinstance(scorer, Defensive):
        return cast(Tensor, scorer.score(view, scorer.W_o[layer], B, scorer.W, scorer.kernel))
    if isinstance(scorer, Chunks):
        return cast(Tensor, scorer.members(view))
    if isinstance(scorer, TriAttention):
        return cast(Tensor, scorer.layers({layer: view}, seen)[0])
    if not isinstance(scorer, ExpectedAttention):
        assert isinstance(scorer, LayerScorer)
        return cast(Tensor, scorer.score(view))
    sinks = scorer.N_sink
    if view.k.shape[1] <= sinks:
        return torch.full(view.k.shape[:2], torch.nan, device=view.k.device)
    at = np.arange(max(seen - view.q.shape[1], sinks), seen)
    weights = scorer.weigh(
        view.q[:, view.q.shape[1] - len(at) :], view.k[:, sinks:], cast(Tensor, view.v)[:, sinks:], at,
        np.arange(seen, seen + scorer.N_future), scorer.inv_freq, scorer.factor, view.scaling, view.sinks,
    )
    return pad(cast(Tensor, weights), (sinks, 0), value=torch.nan)


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
