"""Selection of kept positions on the device of the layers. The host waits once, for the positions of all layers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from models_integration.cache.continuation import Continuation, Decision, ScorerRecords
from models_integration.cache.device_compaction import Chosen, gather, read_retentions, settle
from models_integration.cache.retained_cache import RetainedCache
from models_integration.session.method import Method
from models_integration.session.observed import ObservedSegment
from reference.policies.blocks import InBlocks
from reference.policies.budgets import Adaptive, Competition, tokens_of
from reference.policies.chunkkv import Chunks
from reference.policies.criticalkv import EPSILON, TwoScores, two_stages
from reference.policies.defensivekv import Defensive
from reference.policies.expected_attention import ExpectedAttention
from reference.policies.expected_attention_stats import ExpectedAttentionStats
from reference.policies.h2o import HeavyHitters
from reference.policies.kvcrush import scored_or_representative
from reference.policies.kvzap import LearnedScorer
from reference.policies.names import with_twins
from reference.policies.qfilters import QFilters
from reference.policies.rkv import QueryCache
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import recent_half
from reference.policies.triattention import TriAttention
from reference.policies.vase import Sampled, exponential_numbers, ranges_first
from reference.policies.vatp import ValueWeighted
from spec.arrays import BoolVector, Matrix
from spec.backend import Backend
from spec.budget import Budget
from spec.composition import required_by
from spec.errors import SpecError
from spec.policy import LayerView, Observation, Policy, RecordingScorer, Running, Scorer, Scores, Selection
from spec.retention import Granularity, Retention

__all__ = ["DeviceChoices", "choose", "policy_on_device"]

SCORERS = (
    LayerScorer, Chunks, Defensive, ExpectedAttention, ExpectedAttentionStats, HeavyHitters, LearnedScorer,
    QFilters, QueryCache, Sampled, TriAttention,
)


@dataclass
class DeviceChoices:
    """Layers of a first prompt that were compacted before the host has read the kept positions."""

    method: Method
    cache: RetainedCache
    copies: int
    """Number of rows of the batch for each prompt."""
    layers: dict[int, list[Chosen]] = field(default_factory=dict)
    records: dict[int, list[object]] = field(default_factory=dict)
    """Records of the scorer about all tokens, for each layer and prompt."""

    def take(self, layer: int, policy: Policy, observed: ObservedSegment) -> bool:
        """Compact a layer and return True, if the policy of the layer can select on the device. Else return False.

        Raises:
            SpecError: if the budget is smaller than the number of protected tokens.
        """
        engine, chosen, records = self.method.engine, list[Chosen](), list[object]()
        if policy_on_device(policy, engine) is None:
            return False
        for row in observed.prompts:
            prompt = observed.prompt(row, policy.granularity)
            one = choose(policy, engine, self.method.budget, prompt)
            if one is None:
                return False
            chosen.append(one)
            records.append(policy.scorer.record(None, prompt) if isinstance(policy.scorer, RecordingScorer) else None)
        gather(self.cache, layer, [one for one in chosen for _ in range(self.copies)])
        self.layers[layer], self.records[layer] = chosen, records
        return True

    def read(self, padding: Tensor | None) -> list[Decision]:
        """Return the decisions about the layers that `take` compacted, in the order of the calls.

        Raises:
            SpecError: if an unprotected token has no score.
        """
        policy, parts = self.method.policy, list[Decision]()
        each = read_retentions(self.layers.values(), policy.granularity) if self.layers else []
        for layer, kept in zip(self.layers, each, strict=True):
            retentions = tuple(retention for retention, _ in kept)
            rows = [one for one in self.layers[layer] for _ in range(self.copies)]
            settle(self.cache, layer, rows, [one for one in retentions for _ in range(self.copies)], padding)
            after = Continuation() if policy.cadence.every is None else ScorerRecords(policy.name, tuple(
                _running(policy.scorer, *row, records) for row, records in zip(kept, self.records[layer], strict=True)
            ))
            parts.append(Decision(retentions, after, padding=padding, on_device=True))
        self.layers.clear()
        return parts


def _running(scorer: Scorer, retention: Retention, sums: Matrix, records: object) -> Running:
    live = retention.positions.reshape(retention.groups, -1)
    return Running(live, scorer.keep(records, live) if isinstance(scorer, RecordingScorer) else sums)


def policy_on_device(policy: Policy, engine: Backend) -> Policy | None:
    """Return the policy with scores on the device, or None. The maximum of kept tokens must not depend on scores."""
    twin = with_twins(policy, replace(engine, scores=engine.tensors))
    (select, _), scorer = _selector(policy), _host(twin.scorer)
    known = isinstance(scorer, HeavyHitters if isinstance(twin.scorer, ValueWeighted) else SCORERS)
    if not known or not all(map(_device_part, (select, policy.budgets))):
        return None
    if _by_value(policy) and policy.granularity is not Granularity.HEAD:
        return None
    functions = [_function(part) for part in vars(scorer).values()]
    return twin if any(function is one for function in functions for one in engine.tensors.values()) else None


def _device_part(part: object) -> bool:
    required = required_by(part)
    return required is not None and required.device


def choose(policy: Policy, engine: Backend, budget: Budget, one: Observation) -> Chosen | None:
    """Return the tokens of a prompt that the policy of one layer keeps, or None if the device cannot select.

    Raises:
        SpecError: if the budget is smaller than the number of protected tokens.
    """
    ((layer, view),), twin = one.layers.items(), policy_on_device(policy, engine)
    if twin is None or not isinstance(view.k, Tensor):
        return None
    B, protected = tokens_of(policy, budget, one.seen), policy.protection(one.seen)
    scores = _scores(twin.scorer, layer, view, B, one.seen)
    values = scores
    if isinstance(twin.scorer, ValueWeighted):
        values = scores.double() * cast(Tensor, twin.scorer.size(cast(Tensor, view.v))).double()
    held = torch.from_numpy(protected).to(values.device, non_blocking=True).expand(values.shape)
    unscored, values = (values.isnan() & ~held).flatten(), values.masked_fill(held, torch.nan)
    shares, kept = _shares(policy, engine, B, values, protected)
    if isinstance(twin.scorer, Chunks):
        past = max(0, one.seen - twin.scorer.W)
        marks = engine.tensors["fill_units"](scores, twin.scorer.c, past, shares, held)
    else:
        marks = _marks(twin, engine, one, values, shares, protected)
    at = torch.argsort((~marks).flatten().int(), stable=True)[:kept]
    lost = torch.where(unscored.any(), unscored.int().argmax(), -1)
    sums = isinstance(_host(twin.scorer), HeavyHitters)
    count = marks.sum()[None] if _by_value(policy) else None
    return Chosen(at, lost[None], len(values), one.seen, scores.flatten()[at].double() if sums else None, count)


def _by_value(policy: Policy) -> bool:
    """Return True if the number of kept tokens depends on scores: adaptive or competing budgets with whole blocks."""
    return isinstance(policy.budgets, Adaptive | Competition) and _selector(policy)[1] > 0


def _marks(
    policy: Policy, engine: Backend, one: Observation, values: Tensor, shares: Tensor, protected: BoolVector,
) -> Tensor:
    """Return masks (g, n) of the kept tokens of each kept set, from a selector of tokens or of blocks."""
    select, b = _selector(policy)
    given, pinned = getattr(select, "keywords", {}), int(protected.sum())
    held = torch.from_numpy(protected).to(values.device, non_blocking=True).expand(values.shape)
    top: Callable[..., Tensor] = engine.tensors["top_units"]
    if _function(select) is scored_or_representative:
        free = torch.from_numpy(np.flatnonzero(~_touched(protected, b))).to(values.device, non_blocking=True)
        top = partial(engine.tensors["representatives"], free=free, **given)
    elif b:
        top = partial(engine.tensors["best_blocks"], b=b)
    if _function(select) is recent_half:
        held = held | (torch.arange(one.seen, device=values.device) >= one.seen - shares[:, None] // 2)
    if _function(select) in (two_stages, ranges_first):
        share, sinks = given["share"], given.get("N_sink")
        first = (shares - pinned) * share.numerator // share.denominator
        if sinks is not None:
            first = (shares * share.numerator // share.denominator - sinks).clamp(min=0).minimum(shares - pinned)
        held = top(values, pinned + first, held)
        values = _second(policy.scorer, one, values)
    return top(values, shares, held)


def _second(scorer: Scorer, one: Observation, values: Tensor) -> Tensor:
    """Return the scores of the second stage of a selector."""
    ((layer, view),) = one.layers.items()
    if isinstance(scorer, TwoScores):
        return (values + EPSILON) * cast(Tensor, scorer.size(cast(Tensor, view.v), scorer.W_o[layer]))
    assert isinstance(scorer, Sampled)
    A = cast(Tensor, scorer.attend(view, scorer.W, scorer.kernel))
    numbers = exponential_numbers(scorer.seed, one.first, one.seen, np.tile(np.arange(one.seen), (len(A), 1)))
    times = torch.from_numpy(numbers).to(A.device, non_blocking=True)
    return pad(A.double(), (0, one.seen - A.shape[1]), value=torch.nan) / times


def _host(scorer: Scorer) -> Scorer:
    return scorer.host if isinstance(scorer, TwoScores | ValueWeighted) else scorer


def _function(part: Any) -> Any:
    return getattr(part, "func", part)


def _selector(policy: Policy) -> tuple[Any, int]:
    """Return the selector, and the number of tokens in a block (0 if the policy selects single tokens)."""
    if isinstance(policy.selector, InBlocks):
        return policy.selector.select, cast("partial[Selection]", policy.selector.choose).keywords["b"]
    return policy.selector, getattr(policy.selector, "keywords", {}).get("b", 0)


def _touched(protected: BoolVector, b: int) -> BoolVector:
    """Return a mask of the whole blocks of b tokens that contain a protected token."""
    touched: BoolVector = np.logical_or.reduce(protected[: len(protected) // b * b].reshape(-1, b), axis=1)
    return touched


def _scores(scorer: Scorer, layer: int, view: LayerView, B: int, seen: int) -> Tensor:
    """Return the scores of a layer. The functions of the scorer must return tensors."""
    scorer = _host(scorer)
    if isinstance(scorer, Defensive):
        return cast(Tensor, scorer.score(view, scorer.W_o[layer], B, scorer.W, scorer.kernel))
    if isinstance(scorer, Chunks):
        return cast(Tensor, scorer.members(view))
    if isinstance(scorer, TriAttention):
        return cast(Tensor, scorer.layers({layer: view}, seen)[0])
    if isinstance(scorer, QFilters):
        return cast(Tensor, scorer.score_layer(layer, view))
    if isinstance(scorer, LearnedScorer):
        return cast(Tensor, scorer.score_layer(layer, view.hidden))
    if isinstance(scorer, Sampled):
        past = view.k.shape[1] - view.q.shape[1]
        ranges = cast(Tensor, scorer.range(cast(Tensor, view.v)))[:, :past]
        return pad(ranges, (0, view.q.shape[1]), value=torch.nan)
    if isinstance(scorer, ExpectedAttentionStats):
        weights = scorer.weights(layer, view, seen)
        return pad(cast(Tensor, weights), (view.k.shape[1] - weights.shape[1], 0), value=torch.nan)
    if not isinstance(scorer, ExpectedAttention):
        assert isinstance(scorer, LayerScorer | HeavyHitters | QueryCache)
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


def _shares(policy: Policy, engine: Backend, B: int, values: Tensor, protected: BoolVector) -> tuple[Tensor, int]:
    """Return the shares of the kept sets (g,) on the device, and the maximum number of kept tokens of all sets.

    Raises:
        SpecError: if the budget is smaller than the number of protected tokens.
    """
    (g, n), pinned = values.shape, int(protected.sum())
    free = min(B, n) * g - pinned * g
    if free < 0:
        raise SpecError("budget", B, f"must be at least {pinned}, the number of tokens that {policy.name} protects")
    select, b = _selector(policy)
    if isinstance(policy.budgets, Adaptive | Competition):
        shares = engine.tensors[type(policy.budgets).__name__](values, free, pinned, policy.budgets.safeguard)
        more = int(_touched(protected, b).sum()) * b + n % b if b else 0
        return shares, min(g * n, free + (pinned + more) * g)
    whole = policy.budgets(B * g, Scores(cast(Any, values), np.arange(n + 1), heads=g)).clip(pinned, n)
    kept = whole.sum()
    if b:
        newest = whole // 2 if _function(select) is recent_half else 0 * whole
        held = [_touched(protected | (np.arange(n) >= n - half), b).sum() for half in newest]
        kept = (np.maximum((whole - n % b).clip(0) // b, held) * b + n % b).sum()
    return torch.from_numpy(whole).to(values.device, non_blocking=True), int(kept)
