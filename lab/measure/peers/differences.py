"""Kept sets of kvspec, and its kept sets under the readings of a press. Each reading is one named difference."""

import math
from collections.abc import Callable, Set
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch

from lab.measure.peers.inputs import Constants, Inputs, Rehearsed, threshold
from reference import policies
from reference.policies.attention import accumulated_attention, average_pool, group_mean, observed_attention
from reference.policies.budgets import Competition
from reference.policies.criticalkv import EPSILON
from reference.policies.defensivekv import output_size
from reference.policies.kvzip import kvzip_plus_score, kvzip_score
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer, with_window
from reference.policies.selectors import top_units
from spec.budget import Budget
from spec.policy import SEGMENT_END, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

Kept = list[list[int]]
Array = np.ndarray[Any, Any]

FLOORED = "floored budget"
TRUNCATED = "truncated budget"
AVERAGE = "average pool"
TIES = "ties of torch.topk"
PINNED = "pinned last token"
LINE = "line without a window"
FLAT = "flat fallback"
INNER = "scores of SnapKV's press"
IN_CHUNKS = "budget in chunks"
QUOTA = "safeguard as a quota"
PER_QUERY = "mean attention instead of the sum"
NO_RECENT = "no recent half"
EACH_PIECE = "budget of each piece"
IN_FIRST = "window counts in the first stage"
SAFE_FIRST = "quota and window count in the first stage"
BEHIND_PREFIX = "chunks start after the chat prefix"
OF_ALL = "rounded once"
BY_LAYER = "heads of a layer compete"
UNSCALED = "unscaled logits"
FILLED = "filled last chunk"
SKETCH = "random projection"
BLEND = "ratio as weight"
EQUAL_ENDS = "ties of protected tokens"
DRAWN = "numbers of torch"
LAST = "last token without attention"
FEWER = "one recent token less"
SHORT = "short prompts stay whole"
EACH_LAYER = "budget of each layer"
WITHIN = "weights include protected tokens"
FROM_BUDGET = "blocks start after the budget"
GIVEN_HEADS = "number of full heads"
FROM_PROMPT = "steps count from the last eviction"
WHOLE_PROMPT = "prompt stays whole"
TWO_BUDGETS = "separate budget of the prompt"
"""Readings. docs/peers.md describes each of them."""


def budget(inputs: Inputs, readings: Set[str], seen: int | None = None) -> int:
    """Return the budget of the first `seen` tokens. Default: of all tokens."""
    n = inputs.n if seen is None else seen
    if TRUNCATED in readings:
        return max(1, int(n * (1 - float(inputs.ratio))))
    exact = inputs.kept * n
    return max(1, math.floor(exact)) if FLOORED in readings else math.ceil(exact)


def run(policy: Policy, inputs: Inputs, B: int, view: LayerView | None = None) -> Kept:
    """Return the kept sets of the KV heads in the input's layer. `view` replaces the tensors of the layer."""
    heads = len(inputs.k)
    groups = heads if policy.granularity is Granularity.HEAD else 1
    # A line may give a layer 0 tokens, which is not a valid budget. The protected window raises both budgets.
    seen = Observation(inputs.n, groups, None, {0: view or inputs.view})
    result = policies.retain(policy, Budget(count=max(1, B)), seen)
    return [result.group(g).tolist() for g in range(groups)] * (heads // groups)


def topk(scores: Array, B: int) -> Kept:
    """Return torch.topk for each row, with its order of equal scores."""
    return [sorted(row) for row in torch.tensor(scores).topk(B, dim=-1).indices.tolist()]


def raised(scores: Array) -> Array:
    """Return the scores with NaN (a token without a score) replaced by the maximum plus one."""
    return np.where(np.isnan(scores), np.nanmax(scores) + 1, scores)


def averaged(view: LayerView, given: Constants) -> Array:
    """Return SnapKV's scores with an average pool and the mean over the window."""
    A = observed_attention(view, given.window)
    past = A[:, :, : A.shape[2] - A.shape[1]].mean(axis=1)
    return with_window(group_mean(average_pool(past, given.kernel), len(view.k)), A.shape[2])


def snap_policy(make: Callable[[int, int], Policy], inputs: Inputs, readings: Set[str]) -> Policy:
    given = inputs.constants
    host = make(given.window, given.kernel)
    scorer = LayerScorer(Needs("all", given.window), partial(averaged, given=given))
    return replace(host, scorer=scorer) if AVERAGE in readings else host


def snap_scores(inputs: Inputs, readings: Set[str]) -> Array:
    host = snap_policy(policies.snapkv, inputs, readings)
    seen = Observation(inputs.n, len(inputs.k), None, {0: inputs.view})
    return host.scorer(seen, host.protection(inputs.n)).values


def snapkv(inputs: Inputs, readings: Set[str]) -> Kept:
    B = budget(inputs, readings)
    if TIES in readings:
        return topk(raised(snap_scores(inputs, readings)), B)
    return run(snap_policy(policies.snapkv, inputs, readings), inputs, B)


def streaming(inputs: Inputs, readings: Set[str]) -> Kept:
    B, sinks = budget(inputs, readings), inputs.constants.sinks
    if TIES in readings and sinks > B:
        scores = np.ones((len(inputs.k), inputs.n))
        scores[:, sinks : sinks + inputs.n - int(inputs.n * (1 - float(inputs.ratio)))] = 0.0
        return topk(scores, B)
    return run(policies.streaming_llm(sinks), inputs, B)


def plain(make: Callable[[], Policy]) -> Callable[[Inputs, Set[str]], Kept]:
    return lambda inputs, readings: run(make(), inputs, budget(inputs, readings))


def chunk(inputs: Inputs, readings: Set[str]) -> Kept:
    host, c = policies.keydiff(), inputs.constants.piece
    if EACH_PIECE not in readings:
        return run(policies.in_pieces(host, c), inputs, budget(inputs, readings))
    result: Kept = [[] for _ in inputs.k]
    for start in range(0, inputs.n, c):
        piece = slice(start, start + c)
        part = replace(
            inputs, raw_q=inputs.raw_q[:, piece], k=inputs.k[:, piece], v=inputs.v[:, piece],
        )
        B = budget(part, {TRUNCATED})
        of_piece = equal_scores(part.k, B) if TIES in readings and part.n == 2 else run(host, part, B)
        for head, kept in zip(result, of_piece, strict=True):
            head.extend(start + i for i in kept)
    return result


def equal_scores(keys: Array, B: int) -> Kept:
    """Return torch.topk of KeyDiff's scores for two keys, whose scores are equal without rounding errors."""
    unit = torch.nn.functional.normalize(torch.tensor(keys), dim=-1)
    scores = -torch.nn.functional.cosine_similarity(torch.tensor(keys), unit.mean(dim=1, keepdim=True), dim=-1)
    return topk(scores.numpy(), B)


def gated(inputs: Inputs, readings: Set[str]) -> Kept:
    given = inputs.constants
    return run(policies.in_chunks(policies.knorm(), given.chunk, given.gate), inputs, budget(inputs, readings))


def tova(inputs: Inputs, readings: Set[str]) -> Kept:
    host, B = policies.tova(), budget(inputs, readings)
    if PINNED in readings:
        return run(replace(host, protection=policies.snapkv(1, 1).protection), inputs, B)
    return run(host, inputs, B)


def behind_sinks(host: Policy, inputs: Inputs, readings: Set[str]) -> Kept:
    """Return the kept sets of a policy with sinks. A press gives all sinks one score, above all other scores."""
    B, marks = budget(inputs, readings), host.protection(inputs.n)
    if TIES in readings and inputs.constants.sinks > B:
        seen = Observation(inputs.n, len(inputs.k), None, {0: inputs.view})
        return topk(raised(np.where(marks, np.nan, host.scorer(seen, marks).values)), B)
    return run(host, inputs, B)


def expected(inputs: Inputs, readings: Set[str]) -> Kept:
    given = inputs.constants
    host = policies.expected_attention(inputs.inv_freq, 1.0, given.sinks, given.future)
    return behind_sinks(host, inputs, readings)


def layer_shares(inputs: Inputs, readings: Set[str]) -> list[int] | None:
    """Return PyramidKV's shares under the readings of the press, or None if the shares are those of kvspec."""
    W, L = inputs.constants.window, inputs.constants.layers
    base = inputs.n * (1 - float(inputs.ratio)) if TRUNCATED in readings else float(inputs.kept * inputs.n)
    least = base / 20
    most = base * 2 - least
    if most >= inputs.n - W:
        most, least = inputs.n - W, base * 2 - (inputs.n - W)
    if FLAT in readings and not inputs.n >= most >= least >= W:
        return [max(1, round(base))] * L
    return [round(most - layer * (most - least) / (L - 1)) for layer in range(L)] if LINE in readings else None


def separate_shares(inputs: Inputs, readings: Set[str]) -> list[int]:
    """Return PyramidKV's shares from kvspec's budgets, which do not depend on the scores."""
    given, B = inputs.constants, max(budget(inputs, readings), inputs.constants.window)
    host = policies.pyramidkv(given.window, given.kernel)
    blank = Scores(np.zeros((given.layers, inputs.n)), np.arange(inputs.n + 1))
    return [int(share) for share in host.budgets(given.layers * B, blank)]


def pyramidkv(inputs: Inputs, readings: Set[str]) -> Kept:
    shares = layer_shares(inputs, readings)
    B = (shares or separate_shares(inputs, readings))[inputs.layer]
    if TIES in readings and shares:
        return topk(raised(snap_scores(inputs, readings)), B)
    return run(snap_policy(policies.snapkv, inputs, readings), inputs, B)


def chunkkv(inputs: Inputs, readings: Set[str]) -> Kept:
    given = inputs.constants
    if IN_CHUNKS not in readings:
        return run(policies.chunkkv(given.chunk, given.window), inputs, budget(inputs, readings))
    inner = INNER in readings
    members = raised(averaged(inputs.view, given)) if inner else np.nan_to_num(snap_scores(inputs, readings))
    offsets = np.array([*range(0, inputs.n, given.chunk), inputs.n])
    totals = np.add.reduceat(members.sum(axis=0), offsets[:-1]) / np.diff(offsets)
    chunks = max(1, int(len(totals) * (1 - float(inputs.ratio))))
    stay = sorted(np.argsort(-totals, kind="stable")[:chunks].tolist())
    return [[i for u in stay for i in range(offsets[u], offsets[u + 1])]] * len(inputs.k)


def adakv(inputs: Inputs, readings: Set[str]) -> Kept:
    host = snap_policy(policies.adakv, inputs, readings)
    B = budget(inputs, readings)
    if QUOTA in readings:
        host = replace(host, budgets=Competition(Fraction(1, 5)))
    if TIES in readings and (QUOTA in readings or inputs.constants.window > B):
        scores = torch.tensor(raised(snap_scores(inputs, readings)))
        scores.scatter_(-1, scores.topk(max(1, int(B * 0.2)), dim=-1).indices, torch.finfo(scores.dtype).max)
        gone = set(torch.topk(-scores.reshape(-1), len(scores) * (inputs.n - B)).indices.tolist())
        return [[i for i in range(inputs.n) if h * inputs.n + i not in gone] for h in range(len(scores))]
    return run(host, inputs, B)


def critical(inputs: Inputs, readings: Set[str]) -> Kept:
    B = budget(inputs, readings)
    if IN_FIRST not in readings:
        host = snap_policy(policies.snapkv, inputs, readings)
        return run(policies.with_critical_selection(host, {0: inputs.W_o}), inputs, B)
    scores = torch.tensor(raised(snap_scores(inputs, readings)))
    first = scores.topk(max(1, int((1 - float(inputs.ratio)) * inputs.n * 0.5)), dim=-1).indices
    second = (scores + EPSILON) * torch.tensor(output_size(inputs.v, inputs.W_o))
    second.scatter_(-1, first, torch.finfo(second.dtype).max)
    return [sorted(row) for row in second.topk(B, dim=-1).indices.tolist()]


def critical_ada(inputs: Inputs, readings: Set[str]) -> Kept:
    B, (H_kv, n) = budget(inputs, readings), inputs.k.shape[:2]
    if SAFE_FIRST not in readings:
        host = snap_policy(policies.adakv, inputs, readings)
        return run(policies.with_critical_selection(host, {0: inputs.W_o}), inputs, B)
    scores = torch.tensor(raised(snap_scores(inputs, readings)))
    most = torch.finfo(scores.dtype).max
    scores.scatter_(-1, scores.topk(max(1, int(B * 0.2)), dim=-1).indices, most)
    shares = torch.bincount(scores.reshape(-1).topk(B * H_kv).indices // n, minlength=H_kv).tolist()
    second = (scores + EPSILON) * torch.tensor(output_size(inputs.v, inputs.W_o))
    for head, share in enumerate(shares):
        second[head, scores[head].topk(share // 2).indices] = most
    return [sorted(row.topk(share).indices.tolist()) for row, share in zip(second, shares, strict=True)]


def kvzip(inputs: Inputs, readings: Set[str], plus: bool = False, uniform: bool = False) -> Kept:
    """Return the kept sets of all layers."""
    prompt, given, (H_kv, n) = Rehearsed(inputs), inputs.constants, inputs.k.shape[:2]
    W_o, L = dict.fromkeys(range(given.layers), inputs.W_o), given.layers
    options: Any = {"template": prompt.template, "N_sink": given.sinks, "chunk": given.rehearsed}
    host = (policies.kvzip_uniform if uniform else policies.kvzip)(**options)
    host = policies.kvzip_plus(W_o, **options) if plus else host
    score = partial(kvzip_plus_score, W_o=inputs.W_o) if plus else kvzip_score

    def behind_prefix(view: LayerView) -> Array:
        parts = [score(replace(view, repeats=(one,)), min(given.sinks, one.start)) for one in view.repeats or ()]
        result: Array = np.nan_to_num(np.fmax.reduce(parts))
        result[:, : given.sinks] = np.nan
        return result

    if BEHIND_PREFIX in readings:
        host = replace(host, scorer=LayerScorer(host.scorer.needs, behind_prefix, separable=False))
    if BY_LAYER in readings:
        host = replace(host, budgets=Competition(0))
    views = prompt.views(prompt.prefix if BEHIND_PREFIX in readings else given.sinks)
    return shared(host, inputs, Observation(n, L * H_kv, np.arange(n), views), readings, given.sinks, uniform)


def shared(
    host: Policy, inputs: Inputs, seen: Observation, readings: Set[str], protected: int, uniform: bool = False,
) -> Kept:
    """Return the kept sets of all layers, whose heads share one budget, or one budget for each layer if `uniform`."""
    n, groups, H_kv, B = inputs.n, seen.groups, len(inputs.k), math.ceil(inputs.kept * inputs.n)
    L, gone = groups // H_kv, (n - B) * groups
    pools = L if uniform else 1
    if OF_ALL in readings:
        gone = int(n * groups // pools * float(inputs.ratio)) * pools
        total, divide = groups * n - gone, host.budgets
        host = replace(host, budgets=lambda _, scores: divide(max(total, protected * groups), scores))
    if TIES not in readings:
        kept = policies.retain(host, Budget(count=B), seen)
        return [kept.group(g).tolist() for g in range(groups)]
    marks = host.protection(n)
    scores = raised(np.where(marks, np.nan, host.scorer(seen, marks).values)).reshape(L, -1)
    shares = np.full(L, gone // L)
    if not uniform:
        shares = np.bincount(torch.tensor(-scores).reshape(-1).topk(gone).indices // (n * H_kv), minlength=L)
    result: Kept = []
    for row, share in zip(-scores, shares, strict=True):
        away = set(torch.tensor(row).topk(int(share)).indices.tolist())
        result += [[i for i in range(n) if h * n + i not in away] for h in range(H_kv)]
    return result


def dms(inputs: Inputs, readings: Set[str]) -> Kept:
    """Return the tokens with scores above the threshold, with a budget of the whole prompt."""
    policy = policies.policy_from_score(
        lambda seen: np.negative(next(np.linalg.norm(view.k, axis=2) for view in seen.layers.values())),
        threshold=threshold(float(inputs.ratio)), protection=SinkAndRecent(0, inputs.constants.window),
    )
    return run(policy, inputs, inputs.n)


def lagkv(inputs: Inputs, readings: Set[str]) -> Kept:
    given, B = inputs.constants, budget(inputs, readings)
    host = policies.lagkv(given.sinks, given.lag)
    if TIES not in readings:
        return run(host, inputs, B)
    seen = Observation(inputs.n, len(inputs.k), None, {0: inputs.view})
    scores = host.scorer(seen, host.protection(inputs.n)).values
    rising = np.maximum(0, np.arange(inputs.n) - given.sinks) / max(1, inputs.n - given.sinks)
    end = 1.0 if (scores <= 0).any() else rising
    ranked = np.where(scores <= 0, (scores + given.lag - 1) / given.lag, end)
    return topk(np.where(np.isnan(scores), 1.0, ranked), B)


def observed(inputs: Inputs, readings: Set[str]) -> Kept:
    host = policies.h2o()

    def score(view: LayerView) -> Array:
        total = group_mean(accumulated_attention(view), len(view.k))
        return total / np.arange(inputs.n, 0, -1) if PER_QUERY in readings else total

    host = replace(host, scorer=LayerScorer(host.scorer.needs, score), cadence=SEGMENT_END)
    if NO_RECENT in readings:
        host = replace(host, selector=top_units)
    return run(host, inputs, budget(inputs, readings))
