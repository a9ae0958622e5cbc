"""Tests of decode: each transition of the state, whole sequences, and the parameters of the essay."""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from conformance import tolerances
from conformance.checks import decode_checks
from conformance.oracles import decode, s5
from conformance.oracles import decode as oracle
from conformance.plugin import fewer_examples
from conformance.strategies.trunks import decode_parameters, ends, flags, random_state, sixteenths, states
from conformance.vectors.codec import WAITING, fields_of, model_of, plain, results_of, state, state_of
from reference.crystalcache import breath, decode_step, empty_state, extend, live, tail
from spec.backend import Backend, BreathStages
from spec.budget import Budget
from spec.decode import DecodeState, LiveTrunks, TrunkWeights, check_state
from spec.parameters import ESSAY, PAPER, TINY, CrystalCacheParameters

ENDS = ends()


@st.composite
def situations(draw: st.DrawFn) -> tuple[DecodeState, CrystalCacheParameters]:
    p = draw(decode_parameters(), label="parameters")
    return draw(states(p), label="state"), p


Situation = tuple[DecodeState, CrystalCacheParameters]


@pytest.mark.spec("CC-DECAY")
@given(data=st.data(), p=decode_parameters())
def test_decay_is_equation_36(breath_stages: BreathStages, data: st.DataObject, p: CrystalCacheParameters) -> None:
    """Check Eq. 36 and its bounds: (1 - beta_0) D <= D' <= D. If beta_0 < 1, D' is 0 if and only if D is 0."""
    m = data.draw(st.integers(0, 8), label="m")
    D, M_bar = data.draw(sixteenths(m), label="D"), data.draw(sixteenths(m, 0, 320), label="Mbar")
    actual = breath_stages.decay(D, M_bar, p)
    want = np.array([decode.decay(x, y, p) for x, y in zip(D.tolist(), M_bar.tolist(), strict=True)])
    assert (np.abs(actual - want) <= tolerances.decay_radius(D)).all()
    assert ((actual <= D) & (actual >= 0)).all()
    if p.beta_0 < 1:
        assert ((actual == 0) == (D == 0)).all()
    assert breath_stages.decay(D, M_bar, replace(p, beta_0=0.0)).tolist() == D.tolist()


@pytest.mark.spec("CC-DECAY")
def test_impact_and_D_slow_the_decay(breath_stages: BreathStages) -> None:
    """Check that a trunk without impact loses a twentieth at beta_0 = 0.05, and that D' rises with Mbar and D."""
    actual = breath_stages.decay(np.array([0.5, 0.5, 0.5]), np.array([0.0, 4.0, 20.0]), PAPER)
    assert actual[0] == 0.475
    assert (np.diff(actual) > 0).all()
    low, high = breath_stages.decay(np.array([0.5, 0.75]), np.array([4.0, 4.0]), PAPER)
    assert low < high


@pytest.mark.spec("CC-DECAY")
@pytest.mark.parametrize(("D", "M_bar", "steps"), [(0.9, 8.0, 214), (0.3, 1.0, 16)])
def test_half_lives(breath_stages: BreathStages, D: float, M_bar: float, steps: int) -> None:
    """Check after how many steps D has halved, for the two trunks of the essay (errata G1 and G2)."""
    now, taken = np.array([D]), 0
    while now[0] > D / 2:
        now, taken = breath_stages.decay(now, np.array([M_bar]), PAPER), taken + 1
    assert taken == steps


@pytest.mark.spec("CC-TAIL-TRUNKS")
@given(situation=situations())
def test_the_tail_becomes_trunks(decoder: Backend, situation: Situation) -> None:
    """Check that the tail becomes new trunks at the end of the table, without edges.

    Every token is in one trunk of at most T_max tokens. The values of older tokens do not change.
    """
    before, p = situation
    after = tail.join_tail(before, ENDS, p, decoder)
    want = decode_checks.model(before)
    decode.join_tail(want, ENDS, p)
    assert not list(decode_checks.state(after, want))
    check_state(after)
    assert after.tail_ids == ()
    assert after.stored.tolist() == before.stored.tolist()
    m, n = len(before.D), len(before.live.positions)
    assert after.D[:m].tolist() == before.D.tolist()
    assert after.live.impact[:n].tolist() == before.live.impact.tolist()
    assert (after.live.sizes[m:] <= p.T_max).all()
    assert len(after.W.weights) == len(before.W.weights)


@pytest.mark.spec("CC-TAIL-TRUNKS")
def test_rarity_counts_the_whole_tail_and_the_evicted(decoder: Backend) -> None:
    """Check the rarity of id 5, which was seen once and evicted, and occurs twice in the tail.

    Both tokens have the rarity 1 / (1 + ln 4), times half of M_max.
    """
    state = replace(
        live.empty_state(Budget(count=8)), seen=3, ids=np.array([5]), counts=np.array([1]), tail_ids=(5, 5),
        tail_inverse_norms=(1.0, 1.0),
    )
    M = tail.join_tail(state, ENDS, PAPER, decoder).live.impact
    assert M.round(9).tolist() == [round(0.05 + 10 / (1 + np.log(4)), 9)] * 2


@pytest.mark.spec("CC-CHUNK-TRUNKS")
@given(situation=situations(), data=st.data())
def test_a_spliced_chunk_becomes_trunks(decoder: Backend, situation: Situation, data: st.DataObject) -> None:
    """Check that a chunk becomes trunks of a separate text, after the tail was cut into trunks.

    Tokens that are not stored are only counted.
    """
    before, p = situation
    ids = np.array(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=9), label="ids"))
    kept = np.flatnonzero(data.draw(flags(len(ids)), label="kept"))
    norms = np.array(data.draw(st.lists(
        st.sampled_from([0.25, 1.0, 3.0, np.inf]), min_size=len(kept), max_size=len(kept)), label="norms"))
    after = tail.join_chunk(before, ids, kept, norms, ENDS, p, decoder)
    want = decode_checks.model(before)
    decode.join_chunk(want, ids.tolist(), kept.tolist(), norms.tolist(), ENDS, p)
    assert not list(decode_checks.state(after, want))
    check_state(after)
    assert after.stored.tolist() == [*before.stored.tolist(), *(before.seen + kept).tolist()]
    assert (after.seen, after.step, after.tail_ids) == (before.seen + len(ids), before.step, ())
    assert after.live.inverse_norms[len(after.live.positions) - len(kept) :].tolist() == norms.tolist()


@pytest.mark.spec("CC-REEVICT")
@given(situation=situations(), data=st.data())
def test_an_eviction_of_live_trunks_is_algorithm_1(
    decoder: Backend, situation: Situation, data: st.DataObject,
) -> None:
    """Check the kept tokens, D and the sizes under I.19. The budget of Eq. 30 counts all tokens seen."""
    state, p = situation
    safe = data.draw(flags(len(state.D)), label="protected")
    after = breath.evict(state, safe, p, decoder)
    assert not list(decode_checks.eviction(state, after, safe.tolist(), p, decoder))
    check_state(after)


@pytest.mark.spec("CC-REEVICT")
@given(situation=situations())
def test_a_second_eviction_changes_nothing(decoder: Backend, situation: Situation) -> None:
    """Check that the state does not change, because no token was read and the budget is already met."""
    state, p = situation
    nobody = np.zeros(len(state.D), dtype=np.bool_)
    once = breath.evict(state, nobody, p, decoder)
    again = breath.evict(once, nobody[: len(once.D)], p, decoder)
    assert decode_checks.same_bits(once, again)


@pytest.mark.spec("CC-BREATH")
@fewer_examples
@given(situation=situations())
def test_a_breath_is_its_substeps_in_order(decoder: Backend, situation: Situation) -> None:
    """Check the order: activation, resonance, Hebbian update, new trunks, eviction.

    After the breath, every live token is in a trunk.
    """
    state, p = situation
    after = breath.breath(state, ENDS, p, decoder)
    assert not list(decode_checks.breath(state, after, ENDS, p, decoder))
    check_state(after)
    assert after.tail_ids == ()
    assert set(after.stored.tolist()) <= set(state.stored.tolist())
    assert (after.seen, after.step, after.mu, after.sigma) == (state.seen, state.step, state.mu, state.sigma)


@pytest.mark.spec("CC-BREATH", "CC-STEP")
def test_two_hundred_breaths_in_which_everything_happens(decoders: list[Backend]) -> None:
    """Check breaths of states with edges, active trunks, a tail and a binding budget. A decay precedes each breath."""
    rng = np.random.default_rng(2026)
    p = replace(TINY, N_sink=1, W_recent=1, T_breath=1)
    for trial in range(200):
        decoder = decoders[trial // 2 % len(decoders)]
        p = replace(p, breath_protection=("none", "sink+recent")[trial % 2], N_min=1 + trial % 3)
        state = random_state(rng, p)
        after = breath.decode_step(state, 2, 0.5, ENDS, p, decoder)
        faded = replace(
            tail.append(state, 2, 0.5), D=decoder.require_breath().decay(state.D, state.live.trunk_impact, p)
        )
        assert not list(decode_checks.breath(faded, after, ENDS, p, decoder))


@pytest.mark.spec("CC-STEP")
@given(situation=situations(), token=st.integers(0, 8), norm=st.sampled_from([0.25, 1.0, float("inf")]))
def test_a_step_appends_decays_and_breathes_in_time(
    decoder: Backend, situation: Situation, token: int, norm: float,
) -> None:
    """Check that only D and the tail change between breaths, and that a breath starts from the decayed state."""
    state, p = situation
    after = breath.decode_step(state, token, norm, ENDS, p, decoder)
    assert after.step == state.step + 1
    faded = replace(
        tail.append(state, token, norm), D=decoder.require_breath().decay(state.D, state.live.trunk_impact, p)
    )
    assert not list(decode_checks.forward(state, faded, token, norm, p))
    if after.step % p.T_breath:
        assert decode_checks.same_bits(after, faded)
        assert after.live is state.live
        assert after.W is state.W
    else:
        assert not list(decode_checks.breath(faded, after, ENDS, p, decoder))


@pytest.mark.spec("CC-STEP")
@given(situation=situations(), data=st.data())
def test_before_the_first_breath_nothing_is_evicted(
    decoder: Backend, situation: Situation, data: st.DataObject,
) -> None:
    """Check that a T_breath above the number of steps means no eviction while decoding.

    The stored tokens grow. W and the table do not change.
    """
    first, p = situation
    state, p = replace(first, step=0), replace(p, T_breath=100)
    for token in data.draw(st.lists(st.integers(0, 8), max_size=9), label="tokens"):
        state = breath.decode_step(state, token, 1.0, ENDS, p, decoder)
    assert state.stored.tolist() == [*first.stored.tolist(), *range(first.seen, state.seen)]
    assert state.W is first.W
    assert state.live is first.live


@pytest.mark.spec("CC-STEP")
def test_decay_comes_before_the_breath(decoder: Backend) -> None:
    """Check a trunk with D = 0.5 and Mbar = 0: its own pulse raises D to 0.55375.

    With the breath before the decay, the result would be 0.54625.
    """
    state = one_trunk(D=0.5, M_bar=0.0)
    p = replace(PAPER, T_breath=1, N_sink=0, W_recent=0)
    after = breath.decode_step(state, 3, 1.0, ENDS, p, decoder)
    assert round(float(after.D[0]), 12) == 0.55375


def one_trunk(D: float, M_bar: float) -> DecodeState:
    """Return a state with one trunk of four tokens, of which none was evicted, and a large budget."""
    table = LiveTrunks(np.arange(4), np.array([0, 4]), np.ones(4), np.ones(4), np.array([M_bar]))
    none = np.empty(0, dtype=np.int64)
    return DecodeState(
        Budget(count=100), 4, 0, table, np.array([D]), TrunkWeights(np.zeros(2, dtype=np.int64), none, np.empty(0)),
        np.array([1]), np.array([4]), 0.0, 1.0,
    )


@pytest.mark.spec("CC-STEP", "CC-BREATH", "CC-SEGMENT", "CC-REEVICT", "CC-LIVE")
def test_a_sequence_lives(decoder: Backend) -> None:
    """Check states after any order of prompts, steps, turns, chunks, evictions and copies."""
    profile = settings.default or settings()
    lives = settings(profile, max_examples=max(20, profile.max_examples // 3), stateful_step_count=20)
    run_state_machine_as_test(partial(decode_checks.Life, decoder), settings=lives)  # type: ignore[arg-type]


ESSAY_ENDS = frozenset({7})
# Without decay and resonance, and with a rational rarity, every value except a score is exact. Renewal, tiers and
# protection are still active.
EXACT = replace(
    ESSAY, T_breath=4, N_sink=1, W_recent=2, T_max=4, N_min=1, beta_0=0.0, alpha_res=0.0, rarity="reciprocal",
)
TOKENS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.125, 0.25, 0.5, 1.0])), min_size=1, max_size=14)


def nearly_tied(before: oracle.Model, token: int, norm: float, p: CrystalCacheParameters) -> bool:
    """Return True if a breath at this step would compare scores that differ only in the last bits."""
    now = oracle.before_eviction(oracle.after_forward(before, token, norm, p), ESSAY_ENDS, p)
    alive = [g for g, safe in zip(range(len(now.trunks)), oracle.protected(now, p), strict=True) if not safe]
    D, M_bar = [g.D for g in now.trunks], [g.M_bar for g in now.trunks]
    score = s5.score(D, M_bar, alive, p)
    return any(
        abs(score[a] - score[b]) < 1e-12 and (D[a], M_bar[a]) != (D[b], M_bar[b]) for a, b in combinations(alive, 2)
    )


@pytest.mark.spec("CC-RENEWAL", "CC-TIERS")
@fewer_examples
@given(tokens=TOKENS, budget=st.integers(3, 16), coverage=st.sampled_from([0.0, 0.25]), allocation=st.booleans())
def test_breaths_of_the_essay_equal_the_model(
    decoder: Backend, tokens: list[tuple[int, float]], budget: int, coverage: float, allocation: bool,
) -> None:
    """Check every field of the state after every step, bit for bit, over breaths that evict."""
    p = replace(EXACT, coverage=coverage, allocation="tiers" if allocation else "cut")
    given_state: dict[str, Any] = state(**{**WAITING, "budget": budget})
    now, model = state_of(given_state), model_of(given_state)
    for token, norm in tokens:
        assume(not nearly_tied(model, token, norm, p))
        now = decode_step(now, token, norm, ESSAY_ENDS, p, decoder)
        model = oracle.decode_step(model, token, norm, ESSAY_ENDS, p)
        assert {name: plain(value) for name, value in fields_of(now).items()} == {
            name: plain(value) for name, value in results_of(model).items()
        }


@pytest.mark.spec("CC-RENEWAL")
def test_renewal_comes_before_resonance_and_spares_nobody_else(decoder: Backend) -> None:
    """Check that, without eviction, an active trunk gets D + 0.5 (1 - D), and every other trunk keeps D."""
    p = replace(EXACT, renewal=0.5, T_breath=1)
    before = state_of(state(budget=100))
    active = decoder.require_breath().activation(before.live, p)
    after = decode_step(before, 3, 1.0, ESSAY_ENDS, p, decoder)
    assert active.any()
    assert not active.all()
    assert after.D[:3].tolist() == np.where(active, before.D + 0.5 * (1 - before.D), before.D).tolist()
    none = decode_step(before, 3, 1.0, ESSAY_ENDS, replace(p, renewal=0.0), decoder)
    assert none.D[:3].tolist() == before.D.tolist()


@pytest.mark.spec("CC-TIERS")
def test_the_essay_lives_on_end_to_end(decoder: Backend) -> None:
    """Check that the budget is met and that the sink and the newest tokens are kept in a long sequence.

    The sequence has a prompt, 200 steps with a breath every 16 steps, and a turn.
    """
    rng = np.random.default_rng(11)
    p = replace(ESSAY, T_breath=16, N_sink=2, W_recent=8)

    def draw(heads: int, n: int) -> Any:
        return rng.standard_normal((heads, n, 8)).astype(np.float32)

    ids = rng.zipf(1.5, 340).clip(0, 40).astype(np.int64)
    now = extend(empty_state(Budget(count=60)), draw(4, 100), draw(2, 100), ids[:100], ESSAY_ENDS, p, decoder)
    partial = 0
    for token in ids[100:300].tolist():
        now = decode_step(now, token, float(rng.uniform(0.5, 2)), ESSAY_ENDS, p, decoder)
        if now.step % p.T_breath == 0:
            assert 60 - 2 <= len(now.stored) <= 60
            assert now.stored[:2].tolist() == [0, 1]
            assert now.stored[-8:].tolist() == list(range(now.seen - 8, now.seen))
            partial += int((np.diff(now.live.positions) > 1).sum())
    turn = extend(now, draw(4, 40), draw(2, len(now.stored) + 40), ids[300:], ESSAY_ENDS, p, decoder)
    assert partial > 0
    assert 58 <= len(turn.stored) <= 60
    assert ((turn.D >= 0) & (turn.D <= 1)).all()
