"""Blocks, KVCrush and diversity over a host, compared with brute force, in turns and steps, and NestedKV's budgets."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import nestedkv as policy_oracle
from conformance.methods import policies as oracle
from conformance.methods import signatures as signed
from conformance.methods.brute import BLOCK, KERNEL, W, plain
from conformance.methods.knorm import knorm as brute_knorm
from conformance.methods.policies import crushed
from conformance.plugin import fewer_examples
from conformance.strategies.numbers import Numbers, keys, seeds
from conformance.strategies.policy_inputs import decided, drawn, retained
from lab.policy_cases import LAM, PROMPT, SEEN, STEPS, N, alpha_kept, decoded, long, plain_values, sets, turned
from reference import diversity, policies
from reference import nestedkv as nk
from reference.policies.budgets import tokens_of
from reference.policies.diversity import Diverse
from reference.policies.kept import most_kept
from reference.policies.knorm import knorm_score
from reference.policies.kvcrush import ANCHORS, anchor_distances, scored_or_representative
from reference.policies.names import make_policy
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import best_blocks
from spec.arrays import BoolVector, Matrix
from spec.backend import resolve
from spec.budget import Budget
from spec.errors import SpecError
from spec.parameters import NESTEDKV, TINY
from spec.policy import Cadence, LayerView, Needs, Observation, Policy, Scores, Selection

pytestmark = pytest.mark.usefixtures("reference_items")


def lists(actual: Selection) -> list[list[int]]:
    return [part.tolist() for part in np.split(actual.positions, actual.offsets[1:-1])]


def given_rows(values: Matrix, pinned: Matrix) -> list[list[float | None]]:
    """Return scores row by row, with None for protected tokens."""
    return [
        [None if held else float(x) for x, held in zip(row, pinned_row, strict=True)]
        for row, pinned_row in zip(values, pinned, strict=True)
    ]


@pytest.mark.spec("PO-BEST-BLOCKS")
@given(seed=seeds, n=st.integers(0, 30), b=st.integers(1, 9), B=st.integers(0, 34))
def test_the_best_blocks_are_those_of_brute_force(seed: int, n: int, b: int, B: int) -> None:
    """Check blocks with few different values, so that blocks tie.

    Some tokens have no score, and rows differ in pins and shares.
    """
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, (2, n)).astype(np.float64)
    values[rng.random((2, n)) < 0.3] = np.nan
    pinned = rng.random((2, n)) < rng.choice([0.0, 0.1])
    actual = best_blocks(values, np.array([B, B + 1]), pinned, b)
    rows = given_rows(values, pinned)
    assert lists(actual) == [oracle.best_blocks(row, b, share) for row, share in zip(rows, (B, B + 1), strict=True)]
    assert {actual.positions.dtype, actual.offsets.dtype} == {np.dtype(np.int64)}


@pytest.mark.spec("PO-BEST-BLOCKS")
@pytest.mark.parametrize(
    ("b", "n"), [(16, 5_000), (16, 4_096), (32, 70_001), (128, 40_000), (1, 1_025), (4_099, 9_000)]
)
@pytest.mark.parametrize("values", [3, 10**6])
def test_blocks_of_thousands_of_tokens(b: int, n: int, values: int) -> None:
    """Check many ties and almost no ties. Sinks and a window are protected."""
    row = Numbers(n + b).integers(0, values, n) / values
    pinned = SinkAndRecent(4, 32)(n)
    (kept,) = lists(best_blocks(row[None], np.array([n // 3]), pinned[None], b))
    full = range(n // b)
    total = np.array([reduce(add, row[b * at : b * at + b].tolist()) for at in full])
    held = {at for at in full if b * at < 4 or b * at + b > n - 32}
    others = [int(at) for at in np.lexsort((np.arange(len(total)), -total)) if int(at) not in held]
    chosen = held | {*others[: max(0, (n // 3 - n % b) // b - len(held))]}
    assert kept == [*(i for at in sorted(chosen) for i in range(b * at, b * at + b)), *range(n - n % b, n)]


@pytest.mark.spec("PO-BEST-BLOCKS")
@pytest.mark.parametrize("b", [3, 16, 128, 1_000])
def test_the_order_of_a_block_s_sum_decides(b: int) -> None:
    """A sum that starts with 2^53 ignores each later 1. Ones that are added before 2^53 count."""
    first, last = np.ones((2, b))
    first[0] = last[-1] = 2.0**53
    for pair, stays in ((first, last), 1), ((first, first), 0):
        values = np.concatenate(pair)[None]
        (kept,) = lists(best_blocks(values, np.array([b]), np.zeros(values.shape, dtype=np.bool_), b))
        assert kept == [*range(stays * b, stays * b + b)]


@pytest.mark.spec("PO-BEST-BLOCKS")
def test_numba_chooses_the_same_blocks() -> None:
    """Check that the stage of single tokens chooses blocks too, for no block, one block, and a budget of 0."""
    numba = pytest.importorskip("accelerated.numba_cpu.selectors", reason="pip install 'kvspec[numba]'")
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n, b = int(rng.integers(1, 40)), int(rng.integers(1, 9))
        values, pinned = rng.integers(0, 4, (2, n)) / 4, rng.random((2, n)) < 0.1
        shares = rng.integers(0, n + 2, 2)
        actual = best_blocks(values, shares, pinned, b, numba.best_tokens)
        assert lists(actual) == lists(best_blocks(values, shares, pinned, b))


@pytest.mark.parametrize("compose", [
    pytest.param(policies.in_blocks, marks=pytest.mark.spec("PO-BLOCKS")),
    pytest.param(policies.with_representatives, marks=pytest.mark.spec("PO-KVCRUSH")),
])
@pytest.mark.parametrize("b", [1, 3, 64])
def test_a_budget_below_a_block_is_one_block(b: int, compose: Callable[[Policy, int], Policy]) -> None:
    """Check a host that protects nothing."""
    inputs = drawn(3, n=64 * 3, L=1, heads=(1, 1))
    assert len(retained(compose(policies.knorm(), b), inputs, 1).positions) == b


@pytest.mark.spec("PO-BLOCKS", "PO-TURN")
@fewer_examples
@given(seed=seeds, B=st.integers(3, SEEN))
def test_a_turn_goes_on_in_the_text_s_own_blocks(seed: int, B: int) -> None:
    """Check that the set of each head ends in an open block after the prompt, and that the turn fills this block."""
    inputs = drawn(seed, n=SEEN, L=2, heads=(2, 2))
    first = replace(inputs, layers=[
        replace(x, q=x.q[:, :N], k=x.k[:, :N], v=np.asarray(x.v)[:, :N]) for x in inputs.layers
    ])
    for host, b in ((policies.knorm(), 2), (policies.adakv(W, KERNEL), 4)):
        policy = policies.in_blocks(host, b)
        live = [[*kept, *range(N, SEEN)] for kept in decided(policy, first, B)]
        for stored, kept in zip(live, sets(turned(policy, inputs, live, Budget(count=B))), strict=True):
            assert {i // b for i in kept}.isdisjoint({i // b for i in {*stored} - {*kept}})
            assert {*range(SEEN // b * b, SEEN)} <= {*kept} <= {*stored}


@pytest.mark.spec("PO-BLOCKS", "PO-STEP")
def test_steps_evict_one_block_when_the_next_one_has_no_room() -> None:
    """Check H2O with a budget of 8 and blocks of 4.

    A step fills the open block. After the budget is exceeded, a full block is evicted.
    """
    policy = policies.in_blocks(policies.h2o(), 4)
    for seed in range(10):
        history = decoded(policy, long(seed), 8)
        for seen, groups in enumerate(history, PROMPT):
            for kept in groups:
                assert len(kept) == 8 if seen % 4 == 0 else len(kept) == 4 + seen % 4
                assert all(4 * (i // 4) + at in kept for i in kept for at in range(4) if 4 * (i // 4) + at < seen)
        assert len(history) == STEPS + 1


shares_of = st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(2, 3), Fraction(1)])


def chosen(
    values: Matrix, protected: BoolVector, B: int, b: int, share: Fraction, anchor: str, heads: int,
) -> list[list[int]]:
    given_scores = Scores(np.where(protected, np.nan, values), np.arange(values.shape[1] + 1), heads=heads)
    actual: Selection = scored_or_representative(given_scores, np.full(len(values), B), protected, b, share, anchor)
    assert {actual.positions.dtype, actual.offsets.dtype} == {np.dtype(np.int64)}
    return lists(actual)


@pytest.mark.spec("PO-REPRESENTATIVES")
@given(seed=seeds, n=st.integers(1, 40), b=st.integers(1, 6), B=st.integers(0, 42), share=shares_of,
       anchor=st.sampled_from(ANCHORS))
def test_blocks_are_those_of_brute_force(seed: int, n: int, b: int, B: int, share: Fraction, anchor: str) -> None:
    """Check two layers of two heads.

    There are few different values, so that tokens, blocks and distances tie. Some tokens have no score.
    """
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, (4, n)).astype(np.float64)
    values[rng.random((4, n)) < rng.choice([0.0, 0.2])] = np.nan
    protected = rng.random(n) < rng.choice([0.0, 0.1])
    rows = given_rows(values, np.broadcast_to(protected, values.shape))
    expected = [kept for layer in (rows[:2], rows[2:]) for kept in crushed(layer, b, B, share, anchor)]
    assert chosen(values, protected, B, b, share, anchor, 2) == expected


@pytest.mark.spec("PO-REPRESENTATIVES")
@pytest.mark.parametrize(("heads", "b", "n"), [(2, 16, 5_000), (8, 64, 20_000), (1, 300, 40_000)])
@pytest.mark.parametrize("anchor", ANCHORS)
def test_representatives_among_thousands_of_tokens(heads: int, b: int, n: int, anchor: str) -> None:
    """Check more than 255 bits in a block and more than 255 blocks. Some blocks are much nearer than others."""
    numbers, m = Numbers(n + heads), n // b
    values = numbers.integers(0, 10**6, heads * n).reshape(heads, n) / 10**6
    values[:, : m * b] += np.tile(np.repeat(numbers.integers(0, 8, m) / 4, b), (heads, 1))
    protected = np.arange(n) >= n - 32
    closed = m * b - b * protected[: m * b].reshape(m, b).any(axis=1).sum()
    bits = values[:, :closed] >= np.sort(values[:, :closed], axis=1)[:, (closed + 1) // 2, None]
    words = bits.reshape(heads, -1, b)
    point = {"alternating": np.arange(b) % 2, "mean": words.mean(axis=1) > 0.5, "zeros": 0, "ones": 1}[anchor]
    distances = anchor_distances(values, protected, b, anchor)
    assert distances[: closed // b].tolist() == [int((words[:, at] != point).sum()) for at in range(closed // b)]
    for row, kept in zip(values, chosen(values, protected, n // 3, b, Fraction(1, 2), anchor, heads), strict=True):
        places = (n // 3 - n % b) // b - (m - closed // b)
        totals = row[:closed].reshape(-1, b).sum(axis=1)
        best = np.argsort(-totals, kind="stable")[: places - places // 2]
        left = np.setdiff1d(np.arange(closed // b), best)
        left = left[np.argsort(distances[left], kind="stable")]
        near = [left[at * len(left) // (places // 2)] for at in range(places // 2)]
        assert {at // b for at in kept if at < closed} == {*best.tolist(), *map(int, near)}


@pytest.mark.spec("PO-KVCRUSH")
def test_the_anchor_reaches_the_choice() -> None:
    """Check that each anchor gives a different kept set, and that the share may be a float."""
    inputs = drawn(3, n=200, L=1, heads=(2, 1))
    actual = [decided(policies.kvcrush(W, KERNEL, BLOCK, 0.5, anchor), inputs, 60) for anchor in ANCHORS]
    assert all(one != other for at, one in enumerate(actual) for other in actual[:at])
    assert actual[0] == decided(policies.kvcrush(W, KERNEL, BLOCK, Fraction(1, 2)), inputs, 60)


@pytest.mark.spec("DV-POLICY")
@pytest.mark.parametrize("lam", [0.0, LAM])
def test_a_host_sees_what_it_sees_alone(lam: float) -> None:
    """Signatures need the values of every layer. A host that scores by one layer must still receive only this layer."""
    inputs = drawn(21, n=20, L=3, heads=(2, 1))
    scorer = LayerScorer(Needs("observed", 0), lambda view: knorm_score(view).mean(axis=0, keepdims=True))
    knorm = policies.knorm()
    host = Policy("first-layer", scorer, knorm.budgets, knorm.selector, knorm.protection)
    rows = [brute_knorm(plain(view)) for view in inputs.layers]
    first = [sum(x or 0.0 for x in column) / 2 for column in zip(*rows[0], strict=True)]
    (V,) = signed.signatures(plain_values(inputs), "flat")
    want = alpha_kept(list(first), V, 7, lam) if lam else oracle.top(first, 7)
    assert decided(policies.diverse(host, lam), inputs, 7) == [want]


@pytest.mark.spec("DV-POLICY")
def test_a_backend_may_have_stages_of_diversity_for_all_data() -> None:
    """Check that the stages of the backend are used if `decoding` has none."""
    engine = resolve("numpy")
    host = replace(engine, diversity=None)
    for both, stages in [(replace(engine, decoding=host), engine), (replace(host, decoding=engine), engine)]:
        selector = policies.diverse(policies.knorm(), LAM, backend=both).selector
        assert isinstance(selector, Diverse)
        assert selector.stages is stages.diversity


@pytest.mark.spec("DV-POLICY")
@fewer_examples
@given(seed=seeds, B=st.integers(2, 7), mode=st.sampled_from(["flat", "layer", "head"]))
def test_a_signature_outlives_its_tokens_in_other_heads(seed: int, B: int, mode: diversity.Signature) -> None:
    """Check heads that evict different tokens.

    The evictions of one head must not change the signature of the whole cache.
    """
    inputs = long(seed)
    host = policies.knorm()
    running = Policy(
        host.name, host.scorer, host.budgets, host.selector, host.protection, Cadence(every=2), host.granularity
    )
    V = signed.signatures(plain_values(inputs), mode)
    norms = [row for view in inputs.layers for row in brute_knorm(plain(view))]
    part, live = len(norms) // len(V), [list(range(PROMPT)) for _ in norms]
    for seen, actual in enumerate(decoded(policies.diverse(running, LAM, mode), inputs, B), PROMPT):
        for g, row in enumerate(norms):
            at = live[g] if seen == PROMPT else [*live[g], seen - 1]
            if seen == PROMPT or (seen % 2 == 0 and len(at) > B):
                at = [at[i] for i in alpha_kept([row[p] for p in at], [V[g // part][p] for p in at], B, LAM)]
            live[g] = at
        assert actual == live


@pytest.mark.spec("DV-VARIANT-B")
@fewer_examples
@given(seed=seeds, B=st.integers(1, 20), lam=st.sampled_from([0.0, 0.5, 2.0]))
def test_variant_b_adds_a_cosine_to_the_score(seed: int, B: int, lam: float) -> None:
    inputs = drawn(seed)
    (V,), actual = signed.signatures(plain_values(inputs), "flat"), []
    prior = signed.toward_mean(V)
    for view in inputs.layers:
        for row in brute_knorm(plain(view)):
            actual.append(oracle.top([(x or 0.0) + lam * p for x, p in zip(row, prior, strict=True)], B))
    assert decided(make_policy("diverse-knorm", {"diversity": lam, "rule": "variant_b"}), inputs, B) == actual


@pytest.mark.spec("NK-EPISODIC")
def test_blocks_of_the_papers_lengths() -> None:
    sizes = {1: 128, 4127: 128, 4128: 129, 6400: 200, 8191: 255, 8192: 256, 32768: 256}
    assert {N: nk.block_size(N, NESTEDKV) for N in sizes} == sizes


@pytest.mark.spec("NK-NESTEDKV")
@pytest.mark.parametrize("make", [policies.nestedkv, policies.nestedkv_without_adaptive])
@pytest.mark.parametrize("n", [2, 4, 5, 20])
@pytest.mark.parametrize("budget", [Budget(count=1), Budget(count=3), Budget(fraction=Fraction(1, 100))])
def test_a_budget_below_the_sinks_is_raised_to_them(make: Callable[[], Policy], n: int, budget: Budget) -> None:
    """Check the floor of the policy for prompts of any length."""
    k = keys(1, 2, n).astype(np.float64)
    seen = Observation(n, 2, None, {0: LayerView(k[:, :0], k, None, 1.0, None)})
    assert make().floor == 4
    kept = policies.retain(make(), budget, seen)
    assert [kept.group(h).tolist() for h in range(2)] == [[0, 1, 2, 3][:n]] * 2


@pytest.mark.spec("NK-TOKENS")
@given(percent=st.integers(0, 99), N=st.integers(1, 5000))
def test_the_budget_is_the_exact_floor(percent: int, N: int) -> None:
    kept = (100 - percent) * N // 100
    written = f"0.{percent:02d}"
    if kept:
        assert policies.eviction_budget(written, N) == policies.eviction_budget(percent / 100, N) == kept
        assert policy_oracle.tokens(written, N) == kept
    else:
        with pytest.raises(SpecError):
            policies.eviction_budget(written, N)


def test_a_policy_takes_its_score_from_a_backend() -> None:
    """Check that Numba's kept sets follow from Numba's scores."""
    pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")
    inputs = drawn(3, 40, L=1, heads=(2, 1))
    view = inputs.layers[0]
    rows = resolve("numba").require_nestedkv().anomaly_score(view.k, NESTEDKV)
    want = policy_oracle.kept(rows.tolist(), 10, NESTEDKV)
    assert decided(policies.nestedkv(backend="numba"), inputs, 10) == want


UNITS = {
    "blocks": ("keydiff/sink=2/recent=3/block=4", {}), "a half of blocks": ("h2o/every=none/block=4", {}),
    "representatives": ("snapkv:W=5/crush=0.25:block=4", {}),
    "trunks": ("crystalcache", {"sentence_ends": frozenset({6}), "parameters": TINY}),
}


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("name", UNITS)
def test_whole_units_with_protected_tokens_may_exceed_the_budget_up_to_a_bound(name: str) -> None:
    text, constants = UNITS[name]
    policy, above = make_policy(text, constants), 0
    for seed in range(12):
        inputs = drawn(seed, 8 + seed)
        for B in range(1, inputs.n + 1):
            kept = [len(one) for one in decided(policy, inputs, B)]
            assert sum(kept) <= len(kept) * most_kept(policy, Budget(count=B), inputs.n), (seed, B, kept)
            above += sum(kept) > len(kept) * tokens_of(policy, Budget(count=B), inputs.n)
    assert above, "each budget is kept, so the bound is not needed"


def test_a_policy_of_single_tokens_keeps_at_most_its_budget() -> None:
    policy = make_policy("snapkv:W=5", {})
    assert [most_kept(policy, Budget(count=B), 20) for B in (1, 5, 9, 30)] == [5, 5, 9, 20]
