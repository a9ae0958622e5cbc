"""Kept sets of policies from text: Compactor, tables of budgets, lazy layers, blocks, full heads and decode steps."""

import math
from collections.abc import Callable, Set
from dataclasses import replace

import numpy as np
import torch

from lab.measure.peers.differences import (
    BLEND,
    DRAWN,
    EACH_LAYER,
    EQUAL_ENDS,
    FEWER,
    FILLED,
    FLOORED,
    FROM_BUDGET,
    FROM_PROMPT,
    GIVEN_HEADS,
    LAST,
    SHORT,
    SKETCH,
    TIES,
    TRUNCATED,
    TWO_BUDGETS,
    UNSCALED,
    WHOLE_PROMPT,
    WITHIN,
    Kept,
    behind_sinks,
    budget,
    equal_scores,
    run,
    topk,
)
from lab.measure.peers.inputs import HEAD_WEIGHTS, LAYER_WEIGHTS, Array, Inputs, evicted
from lab.measure.peers.learned import Learned
from reference import policies
from reference.policies.attention import observed_attention, unrotated
from reference.policies.cadences import append_tokens
from reference.policies.compactor import leverage_scores, noncausal_score
from reference.policies.kvzip_heads import FullHeads
from reference.policies.names import make_policy
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.tables import Table
from spec.budget import Budget
from spec.policy import Cadence, LayerView, Needs, Observation, Policy, Scores

LAZY = 0.5
"""Threshold of SimLayerKV."""
SKETCHED, JITTER = 48, 0.01
"""Columns of the random projection of LeverageScorePress, and the number that the press adds to the diagonal."""


def curdkv(inputs: Inputs, readings: Set[str]) -> Kept:
    return behind_sinks(policies.curdkv(inputs.constants.sinks, inputs.constants.lag), inputs, readings)


def capkv(inputs: Inputs, readings: Set[str]) -> Kept:
    given = inputs.constants
    host = policies.capkv(inputs.inv_freq, 1.0, N_sink=given.sinks, N_future=given.future)
    return behind_sinks(host, inputs, readings)


def attention_in_chunks(view: LayerView, c: int, readings: Set[str]) -> Array:
    n = view.k.shape[1]
    if UNSCALED in readings:
        view = replace(view, scaling=1.0)
    if FILLED in readings:
        q, k, v = (np.pad(x, ((0, 0), (0, -n % c), (0, 0))) for x in (view.q, view.k, np.asarray(view.v)))
        view = replace(view, q=q, k=k, v=v)
    return noncausal_score(view, c)[:, :n]


def noncausal(inputs: Inputs, readings: Set[str]) -> Kept:
    host, c = policies.noncausal(inputs.constants.chunk), inputs.constants.chunk
    scorer = LayerScorer(Needs("all", None, values=True), lambda view: attention_in_chunks(view, c, readings))
    return run(replace(host, scorer=scorer), inputs, budget(inputs, readings))


def leverages(inputs: Inputs, inner: slice, readings: Set[str]) -> Array:
    """Return the leverage scores of some keys before RoPE, or those of a random projection of the keys."""
    keys = unrotated(inputs.k[:, inner], np.arange(inputs.n)[inner], inputs.inv_freq, 1.0)
    if SKETCH not in readings:
        return leverage_scores(keys)
    torch.manual_seed(inputs.seed)
    H, _, d = keys.shape
    columns = torch.randn(H, d, SKETCHED, dtype=torch.float64) / math.sqrt(SKETCHED)
    X = ((torch.tensor(keys) - torch.tensor(keys).mean(dim=1, keepdim=True)) @ columns).float()
    roots = torch.linalg.cholesky(X.mT @ X + JITTER * torch.eye(SKETCHED))
    result: Array = (X * torch.cholesky_solve(X.mT, roots).mT).sum(dim=2).double().numpy()
    return result


def leverage(inputs: Inputs, readings: Set[str]) -> Kept:
    if SKETCH not in readings:
        return run(policies.leverage(inputs.inv_freq), inputs, budget(inputs, readings))
    return topk(leverages(inputs, slice(None), readings), budget(inputs, readings))


def compactor(inputs: Inputs, readings: Set[str]) -> Kept:
    given, B, n = inputs.constants, budget(inputs, readings), inputs.n
    host = policies.compactor(inputs.inv_freq, 1.0, given.chunk, given.sinks, 1)
    if not readings - {FLOORED, TRUNCATED}:
        return run(host, inputs, B)
    inner, view = slice(given.sinks, n - 1), inputs.view
    part = replace(view, q=view.q[:, inner], k=view.k[:, inner], v=np.asarray(view.v)[:, inner])
    blend = float(inputs.ratio) if BLEND in readings else 1 - B / n
    scores = np.full((len(inputs.k), n), np.nan)
    parts = leverages(inputs, inner, readings), attention_in_chunks(part, given.chunk, readings)
    scaled = [(x - x.mean()) / max(float(x.std()), 1e-6) for x in parts]
    scores[:, inner] = blend * scaled[0] + scaled[1]
    if EQUAL_ENDS in readings:
        return topk(np.where(np.isnan(scores), np.nanmax(scores), scores), B)
    return run(replace(host, scorer=LayerScorer(Needs("all", 0), lambda _: scores)), inputs, B)


def random_tokens(inputs: Inputs, readings: Set[str]) -> Kept:
    B = budget(inputs, readings)
    if DRAWN not in readings:
        return run(policies.random_tokens(inputs.seed), inputs, B)
    numbers = torch.Generator().manual_seed(inputs.seed)
    return topk(torch.rand(inputs.k.shape[:2], generator=numbers, dtype=torch.float64).numpy(), B)


def simlayerkv(inputs: Inputs, readings: Set[str]) -> Kept:
    """Return the kept sets with the whole prompt as the budget."""
    (sinks, recent), n = (inputs.constants.sinks, inputs.constants.window), inputs.n
    if not readings:
        return run(policies.simlayerkv(LAZY, sinks, recent), inputs, n)
    A = observed_attention(inputs.view, 1)[:, 0].mean(axis=0)
    A = A[:-1] if LAST in readings else A
    lazy = A[:sinks].sum() + A[max(sinks, len(A) - recent) :].sum() > LAZY
    if not lazy or (SHORT in readings and n <= sinks + recent + 1):
        return [[*range(n)] for _ in inputs.k]
    first = max(sinks, n - recent + (FEWER in readings))
    return [[*range(min(n, sinks)), *range(first, n)] for _ in inputs.k]


def blank(groups: int, n: int) -> Scores:
    return Scores(np.zeros((groups, n)), np.arange(n + 1), heads=1)


def per_layer(inputs: Inputs, readings: Set[str]) -> Kept:
    if EACH_LAYER in readings:
        B = max(1, int(inputs.n * (1 - evicted(float(inputs.ratio), LAYER_WEIGHTS)[inputs.layer])))
    else:
        L, table = len(LAYER_WEIGHTS), Table(0, "_".join(map(str, LAYER_WEIGHTS)))
        B = int(table(L * budget(inputs, readings), blank(L, inputs.n))[inputs.layer])
    return run(policies.knorm(), inputs, B)


def lu_kv(inputs: Inputs, readings: Set[str]) -> Kept:
    sinks, weights, n = inputs.constants.sinks, HEAD_WEIGHTS[len(inputs.k)], inputs.n
    table, protection = Table(sinks + 1, "_".join(map(str, weights))), SinkAndRecent(sinks, 1)
    host = replace(policies.knorm(), budgets=table, protection=protection)
    if WITHIN not in readings:
        return run(host, inputs, budget(inputs, readings))
    wanted = (1 - np.array(evicted(float(inputs.ratio), weights), dtype=np.float32)) * np.float32(n)
    shares = np.floor(wanted).astype(int)
    rest = int(np.round(wanted.sum())) - int(shares.sum())
    shares[np.argsort(shares - wanted, kind="stable")[:rest]] += 1
    norms = np.where(protection(n), 0, np.linalg.norm(inputs.k, axis=2))
    order = np.argsort(norms, axis=1, kind="stable")
    return [sorted(row[:max(1, share)].tolist()) for row, share in zip(order, shares, strict=True)]


def blocks(inputs: Inputs, readings: Set[str]) -> Kept:
    """Return the kept sets of KeyDiff with an eviction after each block."""
    B, c, n = budget(inputs, readings), inputs.constants.chunk, inputs.n
    ends = [*range(B + c if FROM_BUDGET in readings else c, n, c), n]
    if FROM_BUDGET not in readings and n - ends[-2] == 1:
        del ends[-2]  # a last block of one token belongs to the block before
    result: Kept = []
    for head in range(len(inputs.k)):
        live, first = list[int](), 0
        for end in ends:
            live, first = [*live, *range(first, end)], end
            if len(live) > B:
                part = replace(
                    inputs, raw_q=inputs.raw_q[:1, live], k=inputs.k[head : head + 1, live],
                    v=inputs.v[head : head + 1, live],
                )
                ties = TIES in readings and len(live) == 2
                (kept,) = equal_scores(part.k, B) if ties else run(policies.keydiff(), part, B)
                live = [live[at] for at in kept]
        result.append(live)
    return result


def full_heads(inputs: Inputs, readings: Set[str]) -> Kept:
    given, scores, n = inputs.constants, Learned(inputs).head_scores, inputs.n
    window, groups = given.sinks + given.window, scores.size
    streaming = round(groups * float(inputs.ratio))
    total = (groups - streaming) * n + streaming * min(window, n)
    if GIVEN_HEADS not in readings:
        total = math.ceil(total / groups) * groups
    shares = FullHeads(scores.ravel(), window)(total, blank(groups, n)).reshape(scores.shape)[inputs.layer]
    return [run(policies.streaming_llm(given.sinks), inputs, int(B))[head] for head, B in enumerate(shares)]


def decoding(inputs: Inputs, readings: Set[str]) -> Kept:
    host = make_policy(f"keydiff/every={inputs.constants.chunk}", {})
    return stepped(host, inputs, readings, lambda seen: inputs.constants.piece)


def ratio_decoding(inputs: Inputs, readings: Set[str]) -> Kept:
    host = make_policy(f"knorm/every={inputs.constants.chunk}", {})
    return stepped(host, inputs, readings, lambda seen: budget(inputs, readings, seen))


def prefill_decoding(inputs: Inputs, readings: Set[str]) -> Kept:
    host = make_policy(f"knorm/steps=keydiff/every={inputs.constants.chunk}", {})
    return stepped(host, inputs, readings, lambda seen: inputs.constants.piece)


def stepped(policy: Policy, inputs: Inputs, readings: Set[str], B: Callable[[int], int]) -> Kept:
    """Return the kept sets after a prompt of half of the tokens, and one decode step for each later token."""
    view, H, n, prompt = inputs.view, len(inputs.k), inputs.n, inputs.n // 2
    v, first, steps = np.asarray(view.v), B(prompt), 0
    if WHOLE_PROMPT in readings or TWO_BUDGETS in readings:
        first = n if WHOLE_PROMPT in readings else budget(inputs, {TRUNCATED}, prompt)
    shown = replace(view, q=view.q[:, :prompt], k=view.k[:, :prompt], v=v[:, :prompt])
    _, running = policies.start(policy, Budget(count=first), Observation(prompt, H, None, {0: shown}))
    for seen in range(prompt + 1, n + 1):
        at = np.pad(running.live, ((0, 0), (0, 1)), constant_values=seen - 1)[:, :, None]
        k, values = np.take_along_axis(view.k, at, axis=1), np.take_along_axis(v, at, axis=1)
        shown = replace(view, q=view.q[:, seen - 1 : seen], k=k, v=values)
        given = Budget(count=B(seen)), running, Observation(seen, H, None, {0: shown})
        steps += 1
        if FROM_PROMPT not in readings:
            _, running = policies.advance(policy, *given)
        elif steps >= inputs.constants.chunk or B(seen) == 1:
            _, running = policies.advance(replace(policy, cadence=Cadence(every=1)), *given)
            steps = 0
        else:
            running = append_tokens(policy, *given, 1)
    return [row.tolist() for row in running.live]
