"""VaSE: its numbers, its race and its distribution, against brute force and a published known answer."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.brute import HALF, KERNEL, N_SINK, SEED, W, plain
from conformance.assurance.oracles import vase as brute
from conformance.assurance.oracles.policies import window
from conformance.assurance.policy_steps import PROMPT, STEPS, decoded, long
from conformance.own.reference.test_decoding import one_head
from conformance.plugin import sparingly
from conformance.strategies.policy_inputs import decided, drawn
from conformance.tolerances import scores_agree
from reference import policies
from reference.policies.vase import ranges_first, uniform_numbers, value_range, window_attention
from spec.errors import SpecError
from spec.policy import Scores

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-VASE")]

seeds = st.integers(0, 2**32 - 1)
DRAWS = 6000


@pytest.mark.spec("PO-UNIFORM")
def test_the_oracle_has_the_published_known_answer() -> None:
    """Random123, kat_vectors: philox4x64 with 10 rounds of zeros."""
    assert brute.philox([0] * 4, [0, 0]) == [
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    ]


@pytest.mark.spec("PO-UNIFORM")
@sparingly
@given(seed=st.integers(0, 2**64 - 1), group=st.integers(0, 2**40), seen=st.integers(1, 2**40), n=st.integers(1, 70))
def test_numbers_are_those_of_brute_force(seed: int, group: int, seen: int, n: int) -> None:
    assert uniform_numbers(seed, group, seen, n).tolist() == brute.uniforms(seed, group, seen, n)


@sparingly
@given(seed=seeds, rows=st.integers(1, 9))
def test_scores_lie_within_their_bounds(seed: int, rows: int) -> None:
    for view in drawn(seed).layers:
        layer, past = plain(view), window(plain(view), rows)
        assert all(map(scores_agree, window_attention(view, rows, 3), brute.attention(layer, rows, 3)))
        expected = [row[:past] for row in brute.ranges(layer, rows)]
        assert all(map(scores_agree, value_range(view.v)[:, :past], expected))


def test_windows_of_many_queries() -> None:
    view = drawn(3, n=200, L=1, heads=(2, 2)).layers[0]
    for rows in (33, 65, 129):
        assert all(map(scores_agree, window_attention(view, rows, 5), brute.attention(plain(view), rows, 5)))


@sparingly
@given(seed=seeds, B=st.integers(W + N_SINK, 12))
def test_steps_draw_by_position_and_by_the_tokens_seen(seed: int, B: int) -> None:
    def simulate(layer: dict[str, object], g: int, B: int) -> list[list[int]]:
        live, history = list(range(PROMPT)), []
        for seen in range(PROMPT, PROMPT + STEPS + 1):
            live = live if seen == PROMPT else [*live, seen - 1]
            if seen == PROMPT or (seen % W == 0 and len(live) > B):
                one = one_head(layer, g, live, seen)
                (slots,) = brute.vase(one, groups[id(layer)] + g, seen, [live], B, W, KERNEL, N_SINK, HALF, SEED)
                live = [live[slot] for slot in slots]
            history.append(live)
        return history

    inputs = long(seed)
    layers = [plain(view) for view in inputs.layers]
    groups = {id(layer): at * inputs.H_kv for at, layer in enumerate(layers)}
    expected = [list(step) for step in zip(
        *(simulate(layer, g, B) for layer in layers for g in range(inputs.H_kv)), strict=True
    )]
    assert decoded(policies.vase(W, KERNEL, N_SINK, HALF, SEED), inputs, B) == expected


def test_a_sample_is_drawn_in_proportion_without_replacement() -> None:
    """Two of four tokens: each pair as often as two draws by hand give it, within five standard deviations."""
    a, found = [0.5, 0.3, 0.15, 0.05], dict[tuple[int, ...], int]()
    for seed in range(DRAWS):
        race = np.array([a]) / -np.log(uniform_numbers(seed, 0, 9, 4))
        scores = Scores(np.zeros((1, 4)), np.arange(5), second=race)
        chosen = ranges_first(scores, np.array([2]), np.zeros(4, dtype=np.bool_), Fraction(0), 0)
        pair = tuple(chosen.positions.tolist())
        found[pair] = found.get(pair, 0) + 1
    for first, second in [(i, j) for i in range(4) for j in range(i + 1, 4)]:
        share = sum(a[x] * a[y] / (1 - a[x]) for x, y in permutations((first, second)))
        assert abs(found[first, second] - DRAWS * share) < 5 * math.sqrt(DRAWS * share * (1 - share))


def test_another_seed_draws_another_set_and_the_same_the_same() -> None:
    inputs = drawn(3, n=60, L=1)
    one, again, other = (decided(policies.vase(4, 3, 1, HALF, seed), inputs, 20) for seed in (1, 1, 2))
    assert one == again != other


def test_a_constant_out_of_range_is_refused() -> None:
    with pytest.raises(SpecError, match="W = 0"):
        policies.vase(0)
    with pytest.raises(SpecError, match="share = Fraction"):
        policies.vase(share=Fraction(2))
    with pytest.raises(SpecError, match="seed = -1"):
        policies.vase(seed=-1)
    with pytest.raises(SpecError, match="sink = -1"):
        policies.vase(N_sink=-1)
