"""Later segments: each kept set is decided from its stored tokens, compared with scores from positions."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import tolerances
from conformance.methods import policies as oracle
from conformance.methods.adakv import adakv as brute_adakv
from conformance.methods.brute import KERNEL, W, plain
from conformance.methods.keydiff import keydiff as brute_keydiff
from conformance.methods.knorm import knorm as brute_knorm
from conformance.methods.snapkv import snapkv as brute_snapkv
from conformance.strategies.policy_inputs import Inputs, drawn, observation
from lab.policy_cases import (
    CASES,
    POLICIES,
    READ,
    SEEN,
    TURN,
    Live,
    N,
    after_reading,
    after_records,
    sets,
    shown,
    stored,
    turned,
)
from reference import policies
from reference.policies.protections import SinkAndRecent
from spec.budget import Budget, parse_budget
from spec.errors import SpecError
from spec.policy import Cadence, LayerView, Observation, Policy, SeparableScorer
from spec.retention import Granularity
from tests.reference.test_decoding import one_head

pytestmark = pytest.mark.usefixtures("reference_items")

sequences = given(seed=st.integers(0, 2**32 - 1), B=st.integers(W, SEEN))
few = settings(max_examples=30)


def rows_of(inputs: Inputs, live: Live, score: Callable[[oracle.Layer], oracle.Score]) -> list[oracle.Score]:
    actual = []
    for g, kept in enumerate(live):
        at, head = divmod(g, inputs.H_kv)
        actual.append(score(one_head(plain(inputs.layers[at]), head, kept, SEEN)))
    return actual


SCORES: dict[str, Callable[[oracle.Layer], oracle.Score]] = {
    "snapkv": lambda layer: brute_snapkv(layer, W, KERNEL)[0],
    "keydiff": lambda layer: brute_keydiff(layer)[0],
    "knorm": lambda layer: brute_knorm(layer)[0],
    "adakv": lambda layer: brute_adakv(layer, W, KERNEL)[0],
}


def brute_force(name: str, inputs: Inputs, live: Live, B: int) -> Live:
    """Return the best tokens of each of four sets. For Ada-KV, shorter rows are padded in front to the longest."""
    rows, shares = rows_of(inputs, live, SCORES[name]), [B] * 4
    if name == "adakv":
        longest = max(map(len, rows))
        filled = [[*[-np.inf] * (longest - len(row)), *row] for row in rows]
        shares = [
            share for layer in (filled[:2], filled[2:]) for share in oracle.adaptive_shares(layer, B, Fraction(1, 5))
        ]
    return [
        [kept[at] for at in oracle.top(row, min(share, len(kept)))]
        for kept, row, share in zip(live, rows, shares, strict=True)
    ]


@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", POLICIES)
@few
@sequences
def test_each_set_is_decided_over_what_it_stores(name: str, seed: int, B: int) -> None:
    """A set with fewer tokens than its share keeps all, and no set gets the rest."""
    inputs, live = drawn(seed, n=SEEN, L=2, heads=(2, 2)), stored(seed, 4)
    actual = turned(POLICIES[name], inputs, live, Budget(count=B))
    assert sets(actual) == brute_force(name, inputs, live, B)
    assert {actual.positions.dtype, actual.offsets.dtype} == {np.dtype(np.int64)}


@pytest.mark.spec("PO-TURN")
def test_a_place_that_is_not_stored_is_won_by_its_own_head() -> None:
    """One head has all 14 tokens. The second head has the turn's 5, fewer than 2 B = 22.

    The wins are 14 and 8, and the shares 13 and 9.
    """
    inputs, live = drawn(3, n=SEEN, L=2, heads=(2, 2)), [[*range(SEEN)], [*range(N, SEEN)]] * 2
    actual = sets(turned(POLICIES["adakv"], inputs, live, Budget(count=11)))
    assert actual == brute_force("adakv", inputs, live, 11)
    assert [*map(len, actual)] == [13, 5] * 2


@pytest.mark.spec("PO-TURN")
def test_the_budget_counts_all_tokens_seen() -> None:
    """Half of 14 is 7. Half of the 8 stored tokens is not the budget."""
    inputs = drawn(1, n=SEEN, L=1, heads=(2, 1))
    live = [list(range(N - W, SEEN))] * 2
    assert [len(kept) for kept in sets(turned(policies.knorm(), inputs, live, parse_budget(0.5)))] == [7, 7]


@pytest.mark.spec("PO-TURN")
def test_protection_is_about_positions() -> None:
    """The sink was evicted long ago. The first stored token is no sink."""
    inputs = drawn(2, n=SEEN, L=1, heads=(1, 1))
    k = inputs.layers[0].k.copy()
    k[:, 4] = 9.0
    inputs = replace(inputs, layers=[replace(inputs.layers[0], k=k)])
    policy = replace(policies.knorm(), protection=SinkAndRecent(1, 0))
    assert 4 not in sets(turned(policy, inputs, [[4, *range(6, SEEN)]], Budget(count=5)))[0]


@pytest.mark.spec("PO-TURN")
def test_sets_with_other_numbers_of_protected_tokens_are_refused() -> None:
    inputs = drawn(3, n=SEEN, L=1, heads=(2, 1))
    policy = replace(policies.knorm(), protection=SinkAndRecent(1, 0))
    with pytest.raises(SpecError, match=r"protection = \[0, 1\]"):
        turned(policy, inputs, [[0, *range(6, SEEN)], list(range(4, SEEN))], Budget(count=5))


@pytest.mark.spec("PO-TURN")
def test_one_observation_stands_for_sets_that_store_the_same() -> None:
    inputs = drawn(4, n=SEEN, L=2, heads=(2, 2))
    (kept,) = stored(4, 1)
    policy = policies.snapkv(W, KERNEL)
    view = shown(policy, inputs, [kept] * 4, SEEN, SEEN - W)
    together = policies.retain_turn(policy, Budget(count=6), [np.array(kept)] * 4, [view])
    assert sets(together) == sets(turned(policy, inputs, [kept] * 4, Budget(count=6)))


@pytest.mark.spec("PO-TURN", "PO-H2O")
@few
@sequences
def test_h2o_adds_what_every_query_of_the_turn_attends_to(seed: int, B: int) -> None:
    """Check that sums belong to their tokens, and that the decision follows the last query."""
    inputs = drawn(seed, n=SEEN, L=1, heads=(2, 2))
    before, actual, after = after_records(policies.h2o(), inputs, Budget(count=B))
    assert after == actual == [summed(plain(inputs.layers[0]), g, before[g], B) for g in range(2)]


def summed(layer: oracle.Layer, g: int, kept: list[int], B: int) -> list[int]:
    sums: dict[int, float] = {}
    for seen in range(1, SEEN + 1):
        live = list(range(seen)) if seen <= N else [*kept, *range(N, seen)]
        head = one_head(layer, g, live, seen)
        for q in head["q"]:
            for p, w in zip(live, oracle.weights({**head, "q": [q]}, 0, q[seen - 1], len(live)), strict=True):
                sums[p] = sums.get(p, 0.0) + w
    live = [*kept, *range(N, SEEN)]
    newest = live[max(0, len(live) - B // 2) :]
    heavy = sorted((p for p in live if p not in newest), key=lambda p: (-sums[p], p))
    return sorted([*newest, *heavy[: B - len(newest)]])


@pytest.mark.spec("PO-TURN")
def test_a_turn_ends_in_a_decision_whatever_the_cadence() -> None:
    policy = replace(policies.knorm(), cadence=Cadence(every=100, excess=100))
    inputs, budget = drawn(5, n=SEEN, L=1, heads=(1, 1)), Budget(count=4)
    _, running = policies.start(policy, budget, shown(policy, inputs, [list(range(N))], N, N))
    live = np.column_stack([running.live, np.arange(N, SEEN)[None]])
    actual, after = policies.advance_turn(policy, budget, running, shown(policy, inputs, live, SEEN, SEEN), TURN)
    assert len(actual.positions) == after.live.shape[1] == 4


def head_view(policy: Policy, inputs: Inputs, g: int) -> Observation:
    """Return the observation of the g-th kept set, as if its layer or KV head were the only one."""
    seen = observation(policy, inputs)
    by_head = policy.granularity is Granularity.HEAD
    at, head = divmod(g, inputs.H_kv if by_head else 1)
    view = seen.layers[at]
    if by_head:
        G, rows = len(view.q) // len(view.k), slice(head, head + 1)
        q, k, v = view.q[head * G : (head + 1) * G], view.k[rows], np.asarray(view.v)[rows]
        view = LayerView(q, k, v, view.scaling, view.softcap)
    return Observation(seen.seen, 1, None, {at: view})


def scores_itself(policy: Policy, inputs: Inputs) -> bool:
    """Return True if each kept set gets the same scores, preferences and signatures as without the other sets."""
    protected = policy.protection(inputs.n)
    together = policy.scorer(replace(observation(policy, inputs), B=6), protected)
    for g, row in enumerate(together.values):
        try:
            alone = policy.scorer(replace(head_view(policy, inputs, g), B=6, first=g), protected)
        except SpecError:
            return False
        pairs = [(alone.values[0], row)]
        if together.second is not None and alone.second is not None:
            pairs.append((alone.second[0], together.second[g]))
        if together.preferences is not None and alone.preferences is not None:
            layer = g // together.heads
            pairs.append((alone.preferences, together.preferences[layer : layer + 1]))
        if not all(tolerances.scores_agree(mine, theirs.tolist()) for mine, theirs in pairs):
            return False
        if together.signatures is not None and alone.signatures is not None:
            signatures = together.signatures[g // (len(together.values) // len(together.signatures))]
            if not tolerances.scores_agree(alone.signatures[0].ravel(), signatures.ravel().tolist()):
                return False
    return True


HOST = policies.snapkv(W, KERNEL)
SCORED: dict[str, Callable[[Inputs], Policy]] = {
    **{name: case.policy for name, case in CASES.items()},
    "chunkkv-of-one-layer": lambda i: policies.chunkkv(2, W, 1),
    "diverse-flat": lambda i: policies.diverse(HOST, 0.5, "flat"),
    "diverse-layer": lambda i: policies.diverse(HOST, 0.5, "layer"),
    "diverse-head": lambda i: policies.diverse(HOST, 0.5, "head"),
    "diverse-head-of-all": lambda i: policies.diverse(CASES["defensivekv"].policy(i), 0.5, "head"),
}


CHOSEN_TOGETHER = ("kvcrush",)
"""Policies whose sets get separate scores, but whose selector reads all heads of a layer."""
OF_THE_PROMPT = ("noncausal", "simlayerkv")
"""Policies whose sets get separate scores, but whose papers decide only once.

`noncausal` needs the queries of all tokens of a chunk, and a later turn has queries only of its own tokens. In
SimLayerKV a layer is lazy or not for the whole text.
"""


@pytest.mark.spec("PO-TURN")
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.spec(CASES[name].item)) if name in CASES else name for name in SCORED
])
def test_a_scorer_is_separable_where_each_set_scores_itself(name: str) -> None:
    """Check `separable`. A policy with decode steps uses its scorer's records, so the policy may be not separable."""
    inputs = [drawn(seed, n=12, L=3, heads=(2, 2)) for seed in range(4)]
    policy = SCORED[name](inputs[0])
    promised = isinstance(policy.scorer, SeparableScorer) and policy.scorer.separable
    by_model = policy.granularity is Granularity.MODEL
    held = not by_model and name not in CHOSEN_TOGETHER and all(scores_itself(SCORED[name](one), one) for one in inputs)
    if name in OF_THE_PROMPT:
        assert (held, promised) == (True, False)
    else:
        assert promised == held or (policy.cadence.every is not None and not promised)


@pytest.mark.spec("PO-READ")
@few
@sequences
def test_a_text_that_is_only_read_is_part_of_the_next_turn_s_sums(seed: int, B: int) -> None:
    """Check that no token is evicted during reading.

    After the turn, H2O keeps the tokens that it would keep if text and turn were one turn.
    """
    inputs = drawn(seed, n=SEEN, L=1, heads=(2, 2))
    before, _, together = after_records(policies.h2o(), inputs, Budget(count=B))
    read, after = after_reading(policies.h2o(), inputs, Budget(count=B))
    assert read == [[*kept, *range(N, N + READ)] for kept in before]
    assert after == together
