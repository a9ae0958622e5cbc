"""The functions of decode: states, tails, protection at a breath, refusals."""

from dataclasses import replace
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import tolerances
from conformance.checks import decode_checks
from conformance.checks.refusals import refused
from conformance.oracles import decode
from conformance.strategies.decoding import decode_parameters, flags, inverse_norms, sixteenths
from conformance.suite.test_decode import Situation, one_trunk, situations
from conformance.suite.test_segments import ENDS
from reference.crystalcache import activation, breath, empty_state, extend, live, tail
from spec.arrays import Vector
from spec.budget import Budget
from spec.decode import TrunkWeights, check_state
from spec.errors import SpecError
from spec.parameters import PAPER, TINY, CrystalCacheParameters

pytestmark = pytest.mark.usefixtures("reference_items")


@pytest.mark.spec("CC-SEEN-COUNT")
@given(parts=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=5))
def test_counts_run_over_all_tokens_seen(parts: list[list[int]]) -> None:
    """Part by part they are the counts of everything; a new token's count has the other new ones in it."""
    ids = counts = np.empty(0, dtype=np.int64)
    everything: list[int] = []
    for part in parts:
        old = ids.tolist(), counts.tolist()
        everything += part
        new_ids, new_counts, c = live.count_seen(ids, counts, np.array(part, dtype=np.int64))
        assert (ids.tolist(), counts.tolist()) == old
        ids, counts = new_ids, new_counts
        assert ids.tolist() == sorted(set(everything))
        assert counts.tolist() == [everything.count(token) for token in ids.tolist()]
        assert c.tolist() == [everything.count(token) for token in part]


@pytest.mark.spec("CC-TAIL")
@given(situation=situations(), token=st.integers(0, 8), norm=st.sampled_from([0.5, float("inf")]))
def test_a_token_waits_in_the_tail(situation: Situation, token: int, norm: float) -> None:
    """It is stored behind everything, counts as seen and as a step, and changes no trunk."""
    before, _ = situation
    after = tail.append(before, token, norm)
    assert after.stored.tolist() == [*before.stored.tolist(), before.seen]
    assert (after.seen, after.step) == (before.seen + 1, before.step + 1)
    assert after.tail_ids[-1:] == (token,)
    assert after.tail_inverse_norms[-1:] == (norm,)
    assert after.live is before.live
    assert after.W is before.W
    assert after.ids is before.ids
    check_state(after)


@pytest.mark.spec("CC-TAIL")
@pytest.mark.parametrize(
    ("token", "norm", "argument"),
    [(-1, 1.0, "token_id"), (1, 0.0, "inverse_norm"), (1, -2.0, "inverse_norm"), (1, float("nan"), "inverse_norm")],
)
def test_what_is_no_token_is_refused(token: int, norm: float, argument: str) -> None:
    with refused(argument, {"token_id": token, "inverse_norm": norm}[argument]):
        tail.append(live.empty_state(Budget(count=8)), token, norm)


@pytest.mark.spec("CC-TAIL-D")
@given(mu=st.integers(0, 40), sigma=st.integers(1, 40), p=decode_parameters())
def test_a_trunk_without_an_edge_has_D_of_degree_0(mu: int, sigma: int, p: CrystalCacheParameters) -> None:
    """At most 0.5, and 0.5 where the mean degree is 0."""
    found = tail.edgeless_D(mu / 8, sigma / 8, p)
    assert tolerances.close("CC-TAIL-D", [found], [decode.edgeless_D(mu / 8, sigma / 8, p)])
    assert found <= 0.5
    if p.graph == "degree" and mu == 0:
        assert found == 0.5


@pytest.mark.spec("CC-TAIL-D")
@pytest.mark.parametrize("s", [5.0, 40.0])
@pytest.mark.parametrize("mu", [0.125, 3.125, 7.0, 17.0])
def test_D_of_degree_0_in_decimals(s: float, mu: float) -> None:
    """x = s mu / sigma from 1.7 to 1813: D runs through all sizes, down to 0."""
    with localcontext() as digits:
        digits.prec = 60
        power = (-Decimal(s) * Decimal(mu) / Decimal("0.375")).exp()
        want = float(power / (1 + power))
    assert tolerances.close("CC-TAIL-D", [tail.edgeless_D(mu, 0.375, replace(PAPER, s=s))], [want])


@pytest.mark.spec("CC-LIVE")
@given(situation=situations(), data=st.data())
def test_what_is_kept_lives_and_the_rest_is_forgotten(situation: Situation, data: st.DataObject) -> None:
    """Any tokens may go; dead trunks take their edges along, live ones keep their numbers' order."""
    before, _ = situation
    n, m = len(before.live.positions), len(before.D)
    kept = np.flatnonzero(data.draw(flags(n), label="kept"))
    D = data.draw(sixteenths(m), label="D")
    after = live.keep(before, kept, D)
    want = decode_checks.model(before)
    decode.keep(want, set(before.live.positions[kept].tolist()), D.tolist())
    assert not list(decode_checks.state(after, want))
    check_state(after)
    if len(kept) == n:
        assert decode_checks.same_bits(after, replace(before, D=D))


@pytest.mark.spec("CC-LIVE-PROTECTED")
@given(situation=situations())
def test_live_tokens_protect_their_trunk(situation: Situation) -> None:
    """A trunk is safe iff one of its live positions lies in the sink or the window."""
    state, p = situation
    found = breath.protected_trunks_of(state.live, state.seen, p.N_sink, p.W_recent)
    assert found.tolist() == decode.in_windows(decode_checks.model(state), p)


@pytest.mark.spec("CC-BREATH-PROTECTED")
@given(situation=situations())
def test_who_is_safe_at_a_breath(situation: Situation) -> None:
    """No token in the paper's form; without sink and window no token in the other form."""
    state, p = situation
    for form in ("none", "sink+recent"):
        q = replace(p, breath_protection=form)
        found = breath.breath_protection(state, q).tolist()
        assert found == decode.protected(decode_checks.model(state), q)
    bare = replace(p, breath_protection="sink+recent", N_sink=0, W_recent=0)
    assert not breath.breath_protection(state, bare).any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("D", {"D": np.array([1.5])}), ("offsets", {"D": np.array([0.5, 0.5])}), ("counts", {"seen": 9}),
        ("positions", {"live": {"positions": np.array([0, 1, 1, 2])}}),
        ("positions", {"live": {"positions": np.array([0, 1, 2, 9])}, "tail_ids": (1,), "tail_inverse_norms": (1.0,)}),
        ("impact", {"live": {"impact": np.ones(3)}}), ("impact", {"live": {"impact": np.full(4, np.nan)}}),
        ("trunk_impact", {"live": {"trunk_impact": np.array([np.inf])}}),
        ("inverse_norms", {"live": {"inverse_norms": np.array([1.0, -1.0, 1.0, 1.0])}}),
        ("inverse_norms", {"live": {"inverse_norms": np.full(4, np.nan)}}), ("D", {"D": np.array([np.nan])}),
        ("counts", {"counts": np.array([4, 0]), "ids": np.array([3, 5])}),
        ("counts", {"counts": np.array([2, 2]), "ids": np.array([5, 5])}),
        ("tail_inverse_norms", {"tail_inverse_norms": (1.0,)}),
        ("offsets", {"live": {"offsets": np.array([0, 0, 4])}, "D": np.array([0.5, 0.5])}),
        ("W", {"W": TrunkWeights(np.array([0, 1]), np.array([0]), np.array([0.5]))}),
        ("W", {"W": TrunkWeights(np.array([0, 2]), np.array([0]), np.array([0.5]))}),
    ],
)
def test_a_state_that_cannot_be_is_refused(name: str, change: dict[str, object]) -> None:
    """A loader asks `check_state`, which names the field."""
    state = one_trunk(0.5, 1.0)
    parts = {key: replace(state.live, **value) if isinstance(value, dict) else value for key, value in change.items()}
    with pytest.raises(SpecError, match=f"^{name} = "):
        check_state(replace(state, **parts))  # type: ignore[arg-type]


@pytest.mark.spec("CC-ETA")
@given(norms=st.integers(0, 8).flatmap(inverse_norms))
def test_eta_is_a_share_of_the_largest_finite_norm(norms: Vector) -> None:
    """In (0, 1], 1 at the maximum and for zero keys."""
    assert activation.normalised_inverse_norms(norms).tolist() == decode.eta(norms.tolist())


@pytest.mark.spec("CC-SEGMENT", "CC-START")
def test_before_the_first_token_there_is_nothing() -> None:
    """No token, no trunk, no pair; mu = 0 and sigma = 1, so that a trunk without an edge has D = 0.5."""
    state = empty_state(Budget(count=3))
    live = state.live
    for array in (live.positions, live.impact, live.inverse_norms, live.trunk_impact, state.D, state.W.indices,
                  state.W.weights, state.ids, state.counts, state.stored):
        assert array.tolist() == []
    assert live.offsets.tolist() == state.W.indptr.tolist() == [0]
    assert (state.budget, state.seen, state.step, state.mu, state.sigma) == (Budget(count=3), 0, 0, 0.0, 1.0)
    assert {array.dtype for array in (live.positions, live.offsets, state.ids, state.counts)} == {np.dtype(np.int64)}


@pytest.mark.spec("CC-SEGMENT")
def test_a_segment_that_cannot_be_is_refused() -> None:
    """Before anything changes: one token is a step; keys must be those stored and those of the segment."""
    state = replace(empty_state(Budget(count=8)), seen=1, step=1, tail_ids=(3,), tail_inverse_norms=(1.0,))
    q, k = np.ones((1, 2, 2)), np.ones((1, 3, 2))
    good: dict[str, Any] = {
        "state": state, "q": q, "k": k, "token_ids": np.array([1, 2]), "sentence_ends": ENDS, "parameters": TINY,
    }
    assert extend(**good).seen == 3
    bad: list[tuple[str, dict[str, Any]]] = [
        ("q", {"q": [1.0]}), ("k", {"k": k[0]}), ("k", {"k": k[:, :2]}),
        ("token_ids", {"q": q[:, :1], "token_ids": np.array([1])}),
        ("token_ids", {"token_ids": np.array([1, -2])}), ("token_ids", {"token_ids": np.array([1, 2, 3])}),
        ("sentence_ends", {"sentence_ends": frozenset()}), ("scaling", {"scaling": 0.0}),
        ("k", {"k": np.full((1, 3, 2), np.inf)}),
    ]
    for name, changes in bad:
        with pytest.raises(SpecError, match=f"^{name} = "):
            extend(**{**good, **changes})
