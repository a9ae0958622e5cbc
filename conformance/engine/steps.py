"""A policy while tokens are decoded: what a cache of its kept sets holds, and what is kept after each step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference import policies
from spec.budget import Budget
from spec.policy import LayerView, Observation, Policy

__all__ = ["decoded", "shown"]

Live = Sequence[Sequence[int]]


def cached(view: LayerView, live: Live, seen: int, first: int) -> LayerView:
    """What a cache holds: the live keys of each KV head, and the queries from `first` on."""
    rows = [live[g % len(live)] for g in range(len(view.k))]
    k, v = (
        None if x is None else np.stack([head[list(at)] for head, at in zip(np.asarray(x), rows, strict=True)])
        for x in (view.k, view.v)
    )
    before = view.k.shape[1] - view.q.shape[1]
    return replace(view, q=view.q[:, max(0, first - before) : seen - before], k=k, v=v)


def shown(layers: Sequence[LayerView], live: Live, seen: int, first: int) -> Observation:
    """What the layers show of kept sets with these live positions."""
    heads = len(live) // len(layers)
    views = {at: cached(view, live[at * heads :][: heads or 1], seen, first) for at, view in enumerate(layers)}
    return Observation(seen, len(live), None, views)


def decoded(
    policy: Policy, layers: Sequence[LayerView], groups: int, B: int, prompt: int,
) -> list[list[list[int]]]:
    """Live positions of every group, after the first `prompt` tokens and after each step that decodes one of the rest.

    A policy that decides at the end of a prompt only keeps every token that is decoded.
    """
    n, rows, budget = layers[0].k.shape[1], policy.scorer.needs.query_rows, Budget(count=B)
    first = 0 if rows is None else max(0, prompt - rows)
    seen = shown(layers, [range(prompt)] * groups, prompt, first)
    if policy.cadence.every is None:
        found = policies.retain(policy, budget, seen)[0]
        kept = [found.group(g).tolist() for g in range(groups)]
        return [[[*own, *range(prompt, at)] for own in kept] for at in range(prompt, n + 1)]
    _, running = policies.start(policy, budget, seen)
    history = [running.live.tolist()]
    for at in range(prompt + 1, n + 1):
        live = np.column_stack([running.live, np.full(groups, at - 1)]).tolist()
        _, running = policies.advance(policy, budget, running, shown(layers, live, at, at - 1))
        history.append(running.live.tolist())
    return history
