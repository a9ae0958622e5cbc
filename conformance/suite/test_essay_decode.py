"""The essay's profile while the cache lives on: renewal, tiers and protection at every breath."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conformance.oracles import decode as oracle
from conformance.oracles import s5
from conformance.vectors.arrays import plain
from conformance.vectors.example_state import WAITING, state
from conformance.vectors.models import model_of, results_of
from conformance.vectors.subject_decode import fields_of, state_of
from reference.crystalcache import decode_step, empty_state, extend
from spec.backend import Backend
from spec.budget import Budget
from spec.parameters import ESSAY, CrystalCacheParameters

ENDS = frozenset({7})
# Without decay and resonance, and with a rational rarity, every value but a score is exact: renewal, tiers and
# protection remain.
EXACT = replace(
    ESSAY, T_breath=4, N_sink=1, W_recent=2, T_max=4, N_min=1, beta_0=0.0, alpha_res=0.0, rarity="reciprocal",
)
TOKENS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.125, 0.25, 0.5, 1.0])), min_size=1, max_size=14)


def nearly_tied(before: oracle.Model, token: int, norm: float, p: CrystalCacheParameters) -> bool:
    """Whether a breath now would order trunks that differ in the last bits of a score only."""
    now = oracle.before_eviction(oracle.after_forward(before, token, norm, p), ENDS, p)
    alive = [g for g, safe in zip(range(len(now.trunks)), oracle.protected(now, p), strict=True) if not safe]
    D, M_bar = [g.D for g in now.trunks], [g.M_bar for g in now.trunks]
    score = s5.score(D, M_bar, alive, p)
    return any(
        abs(score[a] - score[b]) < 1e-12 and (D[a], M_bar[a]) != (D[b], M_bar[b]) for a, b in combinations(alive, 2)
    )


@pytest.mark.spec("CC-RENEWAL", "CC-TIERS")
@given(tokens=TOKENS, budget=st.integers(3, 16), coverage=st.sampled_from([0.0, 0.25]), allocation=st.booleans())
def test_breaths_of_the_essay_equal_the_model(
    decoder: Backend, tokens: list[tuple[int, float]], budget: int, coverage: float, allocation: bool,
) -> None:
    """Every field of the state after every step, to the bit, over breaths that evict."""
    p = replace(EXACT, coverage=coverage, allocation="tiers" if allocation else "cut")
    given_state: dict[str, Any] = state(**{**WAITING, "budget": budget})
    now, model = state_of(given_state), model_of(given_state)
    for token, norm in tokens:
        assume(not nearly_tied(model, token, norm, p))
        now = decode_step(now, token, norm, ENDS, p, decoder)
        model = oracle.decode_step(model, token, norm, ENDS, p)
        assert {name: plain(value) for name, value in fields_of(now).items()} == {
            name: plain(value) for name, value in results_of(model).items()
        }


@pytest.mark.spec("CC-RENEWAL")
def test_renewal_comes_before_resonance_and_spares_nobody_else(decoder: Backend) -> None:
    """Without eviction: D + 0.5 (1 - D) where a trunk is active, D elsewhere."""
    p = replace(EXACT, renewal=0.5, T_breath=1)
    before = state_of(state(budget=100))
    active = decoder.require_breath().activation(before.live, p)
    after = decode_step(before, 3, 1.0, ENDS, p, decoder)
    assert active.any()
    assert not active.all()
    assert after.D[:3].tolist() == np.where(active, before.D + 0.5 * (1 - before.D), before.D).tolist()
    none = decode_step(before, 3, 1.0, ENDS, replace(p, renewal=0.0), decoder)
    assert none.D[:3].tolist() == before.D.tolist()


@pytest.mark.spec("CC-TIERS")
def test_the_essay_lives_on_end_to_end(decoder: Backend) -> None:
    """A prompt, 200 steps with breaths every 16, and a turn: the budget holds, sink and newest tokens stay."""
    rng = np.random.default_rng(11)
    p = replace(ESSAY, T_breath=16, N_sink=2, W_recent=8)

    def draw(heads: int, n: int) -> Any:
        return rng.standard_normal((heads, n, 8)).astype(np.float32)

    ids = rng.zipf(1.5, 340).clip(0, 40).astype(np.int64)
    now = extend(empty_state(Budget(count=60)), draw(4, 100), draw(2, 100), ids[:100], ENDS, p, decoder)
    partial = 0
    for token in ids[100:300].tolist():
        now = decode_step(now, token, float(rng.uniform(0.5, 2)), ENDS, p, decoder)
        if now.step % p.T_breath == 0:
            assert 60 - 2 <= len(now.stored) <= 60
            assert now.stored[:2].tolist() == [0, 1]
            assert now.stored[-8:].tolist() == list(range(now.seen - 8, now.seen))
            partial += int((np.diff(now.live.positions) > 1).sum())
    turn = extend(now, draw(4, 40), draw(2, len(now.stored) + 40), ids[300:], ENDS, p, decoder)
    assert partial > 0
    assert 58 <= len(turn.stored) <= 60
    assert ((turn.D >= 0) & (turn.D <= 1)).all()
