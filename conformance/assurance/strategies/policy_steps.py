"""A policy while tokens are decoded: what a cache of its kept sets would hold, step by step."""

from typing import Any

import numpy as np

from conformance.strategies.policy_inputs import Inputs, drawn, groups_of
from reference import policies
from spec.budget import Budget
from spec.policy import LayerView, Observation, Policy

__all__ = ["PROMPT", "STEPS", "decoded", "long", "shown"]

PROMPT, STEPS = 8, 9


def cached(view: LayerView, live: list[list[int]], seen: int, first: int) -> LayerView:
    """What a cache holds: the live keys of each KV head, and the queries from `first` on."""
    rows = [live[g % len(live)] for g in range(len(view.k))]
    k = np.stack([head[at] for head, at in zip(view.k, rows, strict=True)])
    v = np.stack([head[at] for head, at in zip(np.asarray(view.v), rows, strict=True)])
    return LayerView(view.q[:, first:seen], k, v, view.scaling, view.softcap)


def shown(policy: Policy, inputs: Inputs, live: Any, seen: int, first: int) -> Observation:
    groups = groups_of(policy, inputs)
    heads = groups // len(inputs.layers)
    views = {
        at: cached(view, [[int(p) for p in row] for row in live[at * heads :][: heads or 1]], seen, first)
        for at, view in enumerate(inputs.layers)
    }
    return Observation(seen, groups, None, views)


def decoded(policy: Policy, inputs: Inputs, B: int) -> list[list[list[int]]]:
    """Live positions of every group, after the prompt and after each step."""
    groups, budget = groups_of(policy, inputs), Budget(count=B)
    rows = policy.scorer.needs.query_rows
    first = 0 if rows is None else max(0, PROMPT - rows)
    retention, running = policies.start(
        policy, budget, shown(policy, inputs, [list(range(PROMPT))] * groups, PROMPT, first)
    )
    history = [running.live.tolist()]
    assert history[0] == [retention.group(g).tolist() for g in range(groups)]
    for seen in range(PROMPT + 1, PROMPT + STEPS + 1):
        live = np.column_stack([running.live, np.full(groups, seen - 1)])
        found, running = policies.advance(policy, budget, running, shown(policy, inputs, live, seen, seen - 1))
        history.append(running.live.tolist())
        assert found is None or history[-1] == [found.group(g).tolist() for g in range(groups)]
    return history


def long(seed: int) -> Inputs:
    return drawn(seed, n=PROMPT + STEPS, L=2)
