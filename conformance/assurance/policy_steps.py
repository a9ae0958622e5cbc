"""A policy while tokens are decoded and in a turn: what a cache of its kept sets holds, and what is kept."""

from typing import Any

import numpy as np

from conformance.engine import methods
from conformance.strategies.policy_inputs import Inputs, drawn, groups_of
from reference import policies
from reference.policies.cadences import take_up
from spec.budget import Budget
from spec.policy import LayerView, Observation, Policy
from spec.retention import Retention

PROMPT, STEPS = 8, 9


def shown(policy: Policy, inputs: Inputs, live: Any, seen: int, first: int) -> Observation:
    assert len(live) == groups_of(policy, inputs)
    return methods.shown(inputs.layers, live, seen, first)


def decoded(policy: Policy, inputs: Inputs, B: int) -> list[list[list[int]]]:
    """Live positions of every group, after the prompt and after each step."""
    return methods.decoded(policy, inputs.layers, groups_of(policy, inputs), B, PROMPT)


def long(seed: int) -> Inputs:
    return drawn(seed, n=PROMPT + STEPS, L=2)


N, TURN, W, KERNEL = 9, 5, 3, 3
READ = 2
SEEN = N + TURN
Live = list[list[int]]

POLICIES: dict[str, Policy] = {
    "snapkv": policies.snapkv(W, KERNEL), "keydiff": policies.keydiff(), "knorm": policies.knorm(),
    "adakv": policies.adakv(W, KERNEL),
}


def stored(seed: int, groups: int) -> Live:
    """Each set has some of the prompt, all of its last W tokens, and the turn; some sets have nothing else."""
    rng = np.random.default_rng(seed)
    return [
        sorted({*np.flatnonzero(rng.random(N) < rng.choice([0.0, 0.4, 0.8])).tolist(), *range(N - W, SEEN)})
        for _ in range(groups)
    ]


def turned(policy: Policy, inputs: Inputs, live: Live, budget: Budget) -> Retention:
    """The decision, from views of each set's own head."""
    G, observations = len(inputs.layers[0].q) // inputs.H_kv, []
    for g, own in enumerate(live):
        at, head = divmod(g, inputs.H_kv)
        view = inputs.layers[at]
        k, v = (x[head : head + 1, own] for x in (view.k, np.asarray(view.v)))
        q = view.q[head * G : (head + 1) * G, N:SEEN]
        rows = policy.scorer.needs.query_rows
        q = q if rows is None else q[:, max(0, TURN - rows) :]
        observations.append(Observation(SEEN, 1, None, {at: LayerView(q, k, v, view.scaling, view.softcap)}))
    return policies.retain_turn(policy, budget, [np.array(own) for own in live], observations, inputs.H_kv)


def sets(found: Retention) -> Live:
    return [found.group(g).tolist() for g in range(found.groups)]


def kept_of(policy: Policy, inputs: Inputs, live: Live, budget: Budget) -> Live:
    return sets(turned(policy, inputs, live, budget))


def after_records(policy: Policy, inputs: Inputs, budget: Budget) -> tuple[Live, Live, Live]:
    """Live positions after a prompt; after a turn, as the retention and as the records have them."""
    groups = groups_of(policy, inputs)
    _, running = policies.start(policy, budget, shown(policy, inputs, [list(range(N))] * groups, N, 0))
    live = np.column_stack([running.live, np.tile(np.arange(N, SEEN), (groups, 1))])
    found, after = policies.advance_turn(policy, budget, running, shown(policy, inputs, live, SEEN, N), TURN)
    return running.live.tolist(), sets(found), after.live.tolist()


def after_reading(policy: Policy, inputs: Inputs, budget: Budget) -> tuple[Live, Live]:
    """Live positions after a prompt and READ tokens behind it that are only read; and after a turn behind those."""
    groups = groups_of(policy, inputs)
    _, running = policies.start(policy, budget, shown(policy, inputs, [list(range(N))] * groups, N, 0))
    live = np.column_stack([running.live, np.tile(np.arange(N, N + READ), (groups, 1))])
    read = take_up(policy, budget, running, shown(policy, inputs, live, N + READ, N), READ)
    live = np.column_stack([read.live, np.tile(np.arange(N + READ, SEEN), (groups, 1))])
    _, after = policies.advance_turn(policy, budget, read, shown(policy, inputs, live, SEEN, N + READ), TURN - READ)
    return read.live.tolist(), after.live.tolist()
