"""Steps, breaths and segments of sequences with hundreds of trunks, long tails and far positions."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from conformance.checks import decode_checks
from conformance.strategies.scale_attention import Shape, addressed
from conformance.strategies.scale_states import FAR_IDS, state_at
from reference.crystalcache.breath import breath, decode_step
from reference.crystalcache.segments import extend
from spec.backend import Backend
from spec.decode import DecodeState
from spec.parameters import PAPER, CrystalCacheParameters

pytestmark = pytest.mark.usefixtures("compiled")

ENDS = frozenset({7, 2**32 + 1})
QUIET = replace(PAPER, tau_edge=0.05, max_hops=4, gamma_hop=0.9, T_max=40, N_sink=4, W_recent=128)


@dataclass(frozen=True)
class Case:
    """A state by its sizes."""

    name: str
    seen: int
    m: int
    largest: int
    tail: int
    budget: int
    parameters: CrystalCacheParameters = QUIET

    def __str__(self) -> str:
        return self.name

    @property
    def state(self) -> DecodeState:
        return state_at(self.seen, self.m, self.largest, self.tail, self.budget, self.parameters)


CASES = [
    Case("long-tail", 1_000_000, 60, 9, 300, 400),
    Case("many-trunks", 2**24 + 9, 400, 5, 64, 700),
    Case("long-trunks", 2**31 + 40, 12, 90, 70, 300, replace(QUIET, breath_protection="sink+recent")),
    Case("far", 2**32 + 100, 150, 6, 130, 350),
]


@pytest.mark.spec("CC-STEP", "CC-TAIL", "CC-DECAY")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_forward(decoder: Backend, case: Case) -> None:
    """Before a breath only D changes, and the tail grows by a token of a far id."""
    before, p = case.state, replace(case.parameters, T_breath=100)
    after = decode_step(before, int(FAR_IDS[-1]), 0.25, ENDS, p, decoder)
    assert not list(decode_checks.forward(before, after, int(FAR_IDS[-1]), 0.25, p))


@pytest.mark.spec("CC-BREATH", "CC-TAIL-TRUNKS", "CC-SEEN-COUNT", "CC-REEVICT")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_breath(decoder: Backend, case: Case) -> None:
    before, p = case.state, case.parameters
    after = breath(before, ENDS, p, decoder)
    assert not list(decode_checks.breath(before, after, ENDS, p, decoder))
    assert len(after.live.positions) < len(before.stored), "something goes"


@pytest.mark.spec("CC-STEP")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_breathes(decoder: Backend, case: Case) -> None:
    """It is a forward, and then a breath: nothing has waited for it."""
    before, p = replace(case.state, step=99), replace(case.parameters, T_breath=100)
    quiet = decode_step(before, 3, 0.5, ENDS, replace(p, T_breath=1000), decoder)
    assert decode_checks.same_bits(decode_step(before, 3, 0.5, ENDS, p, decoder), breath(quiet, ENDS, p, decoder))


STEPS = [127, 255, 32_767, 65_535, 2**24 + 1, 2**31 - 1, 2**32 - 1, 2**53 + 1]


@pytest.mark.spec("CC-STEP")
@pytest.mark.parametrize("T_breath", [3, 7])
@pytest.mark.parametrize("step", STEPS)
def test_breaths_of_a_long_conversation(decoder: Backend, step: int, T_breath: int) -> None:
    """A dozen steps over a width: each T_breath-th breathes, and no other."""
    p = replace(QUIET, T_breath=T_breath, N_sink=1, W_recent=2)
    state = replace(state_at(2**24, 6, 3, 2, 9, p), step=step - 5)
    for at in range(step - 4, step + 8):
        state = decode_step(state, 3, 0.5, ENDS, p, decoder)
        assert state.step == at
        assert (state.tail_ids == ()) == (at % T_breath == 0)


@pytest.mark.spec("CC-SEGMENT")
@pytest.mark.parametrize(("seen", "H", "H_kv"), [(1_500, 9, 3), (2**31 - 60, 8, 4), (2**32 - 60, 10, 5)])
def test_a_turn(decoder: Backend, seen: int, H: int, H_kv: int) -> None:
    """120 tokens behind 60 trunks and a tail; sources lie in all of them."""
    p = replace(PAPER, C=48, T_max=9, N_sink=2, W_recent=20, M_min=0.125, tau_edge=0.01)
    before = state_at(seen, 60, 7, 40, 260, p)
    stored = before.stored
    inputs = addressed(Shape("turn", H, H_kv, 64, 120, p, before=len(stored)))
    ids = np.concatenate([np.tile(FAR_IDS, 5), 3 + np.arange(90) % 31])
    positions = np.concatenate([stored, seen + np.arange(120)])
    found = decoder.require_crystal().coattention(inputs.q, inputs.k, positions, p, inputs.scaling, None)
    norms = decoder.require_breath().inverse_key_norms(np.ascontiguousarray(inputs.k[:, len(stored) :]))
    after = extend(before, inputs.q, inputs.k, ids, ENDS, p, decoder, scaling=inputs.scaling)
    assert not list(decode_checks.segment(before, after, found, ids, norms, ENDS, p, decoder))
