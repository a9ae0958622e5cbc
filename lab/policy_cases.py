"""Policies at small constants, each with a brute-force answer: the named policies of the oracles, and compositions.

The second part runs a policy in decode steps and in a turn, on a cache that stores only the kept sets.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from conformance.engine import methods
from conformance.methods import brutes
from conformance.methods.brute import BLOCK, KERNEL, Brute, W, newest, newest_half, shared
from conformance.methods.method import method_of
from conformance.methods.policies import Score, competition_shares, epicache
from conformance.methods.signatures import signatures
from conformance.methods.triattention import rows
from conformance.oracles import diversity as alpha_oracle
from conformance.strategies.policy_inputs import Inputs, Kept, calibrated, drawn, groups_of, identity
from reference import policies
from reference.policies.cadences import append_tokens
from reference.triattention import Mode
from spec.budget import Budget
from spec.policy import LayerView, Observation, Policy
from spec.retention import Retention

LAM = 0.5


def triattention(inputs: Inputs, mode: Mode, pin_prompt: int = 0, slack: int = 128) -> Policy:
    return policies.triattention(calibrated(inputs), identity(inputs), mode, pin_prompt, slack)


def plain_values(inputs: Inputs) -> Any:
    return [np.asarray(view.v).tolist() for view in inputs.layers]


def alpha_kept(row: Score, V: Any, B: int, lam: float) -> list[int]:
    """Return the kept tokens. Tokens without a score are protected."""
    retained = [i for i, x in enumerate(row) if x is None]
    return alpha_oracle.alpha([0.0 if x is None else x for x in row], V, retained, min(B, len(row)), lam)


def diversity(inputs: Inputs, B: int) -> Kept:
    (row,) = rows(inputs, "global", lambda g: range(inputs.n), inputs.n, 0)
    (V,) = signatures(plain_values(inputs), "flat")
    return [alpha_kept(row, V, B, LAM)]


@dataclass(frozen=True)
class Case:
    """Policy, and its kept sets for an input and B tokens by brute force."""

    item: str
    policy: Callable[[Inputs], Policy]
    expected: Callable[[Inputs, int], Kept]
    floor: int = 0
    guaranteed: Callable[[int, int], set[int]] = field(default=lambda n, B: set())
    """Return the positions, of n, that every kept set of B tokens contains."""
    least: int = 1


def of_text(item: str, text: str, floor: int, guaranteed: Callable[[int, int], set[int]]) -> Case:
    """Return the policy of a text, and its kept sets by the oracle of parts."""
    method = method_of(text)
    return Case(item, method.reference, partial(method.brute.kept, **method.constants), floor, guaranteed)


CASES: dict[str, Brute | Case] = {
    **{one.name: one for one in brutes()},
    "epicache": Case("PO-EPICACHE", lambda i: policies.epicache(), shared(epicache, competition_shares)),
    "threshold": of_text("PO-THRESHOLD", f"snapkv:W={W}:kernel={KERNEL}/threshold=0.4", W, newest),
    "blocks": of_text("PO-BLOCKS", f"snapkv:W={W}:kernel={KERNEL}/block={BLOCK}", BLOCK, newest),
    "blocks-of-h2o": of_text("PO-BLOCKS", f"h2o/block={BLOCK}", BLOCK, newest_half),
    "diversity": Case("DV-POLICY", lambda i: policies.diverse(triattention(i, "global"), LAM), diversity),
    "diversity-in-adakv": of_text("DV-POLICY", f"adakv:W={W}:kernel={KERNEL}/diverse={LAM}:signature=head", W, newest),
}

PROMPT, STEPS = 8, 9


def shown(policy: Policy, inputs: Inputs, live: Any, seen: int, first: int) -> Observation:
    assert len(live) == groups_of(policy, inputs)
    return methods.shown(inputs.layers, live, seen, first)


def decoded(policy: Policy, inputs: Inputs, B: int) -> list[list[list[int]]]:
    """Return the live positions of every group after the prompt and after each step."""
    return list(methods.decoded(policy, inputs.layers, groups_of(policy, inputs), B, PROMPT))


def long(seed: int) -> Inputs:
    return drawn(seed, n=PROMPT + STEPS, L=2)


N, TURN, READ = 9, 5, 2
SEEN = N + TURN
Live = list[list[int]]

POLICIES: dict[str, Policy] = {
    "snapkv": policies.snapkv(W, KERNEL), "keydiff": policies.keydiff(), "knorm": policies.knorm(),
    "adakv": policies.adakv(W, KERNEL),
}


def stored(seed: int, groups: int) -> Live:
    """Return random sets of stored positions.

    Each set contains random tokens of the prompt, the last W tokens of the prompt, and the turn. In some sets the
    number of random tokens is 0.
    """
    rng = np.random.default_rng(seed)
    return [
        sorted({*np.flatnonzero(rng.random(N) < rng.choice([0.0, 0.4, 0.8])).tolist(), *range(N - W, SEEN)})
        for _ in range(groups)
    ]


def turned(policy: Policy, inputs: Inputs, live: Live, budget: Budget) -> Retention:
    """Return the decision after a turn. The view of each set has only the keys of the set and of the set's head."""
    G, observations = len(inputs.layers[0].q) // inputs.H_kv, []
    for g, positions in enumerate(live):
        at, head = divmod(g, inputs.H_kv)
        view = inputs.layers[at]
        k, v = (x[head : head + 1, positions] for x in (view.k, np.asarray(view.v)))
        q = view.q[head * G : (head + 1) * G, N:SEEN]
        rows = policy.scorer.needs.query_rows
        q = q if rows is None else q[:, max(0, TURN - rows) :]
        observations.append(Observation(SEEN, 1, None, {at: LayerView(q, k, v, view.scaling, view.softcap)}))
    return policies.retain_turn(policy, budget, [np.array(positions) for positions in live], observations, inputs.H_kv)


def sets(result: Retention) -> Live:
    return [result.group(g).tolist() for g in range(result.groups)]


def after_records(policy: Policy, inputs: Inputs, budget: Budget) -> tuple[Live, Live, Live]:
    """Return the cached positions after a prompt, and after a turn: from the retention, and from the records."""
    groups = groups_of(policy, inputs)
    _, running = policies.start(policy, budget, shown(policy, inputs, [list(range(N))] * groups, N, 0))
    live = np.column_stack([running.live, np.tile(np.arange(N, SEEN), (groups, 1))])
    result, after = policies.advance_turn(policy, budget, running, shown(policy, inputs, live, SEEN, N), TURN)
    return running.live.tolist(), sets(result), after.live.tolist()


def after_reading(policy: Policy, inputs: Inputs, budget: Budget) -> tuple[Live, Live]:
    """Return the cached positions after a prompt and READ tokens in `reading()`, and after the turn."""
    groups = groups_of(policy, inputs)
    _, running = policies.start(policy, budget, shown(policy, inputs, [list(range(N))] * groups, N, 0))
    live = np.column_stack([running.live, np.tile(np.arange(N, N + READ), (groups, 1))])
    read = append_tokens(policy, budget, running, shown(policy, inputs, live, N + READ, N), READ)
    live = np.column_stack([read.live, np.tile(np.arange(N + READ, SEEN), (groups, 1))])
    _, after = policies.advance_turn(policy, budget, read, shown(policy, inputs, live, SEEN, N + READ), TURN - READ)
    return read.live.tolist(), after.live.tolist()
