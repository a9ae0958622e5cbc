"""Policies that evict from each piece of a prompt alone: shares, protection, refusals and texts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods.method import method_of
from conformance.oracles.choices import fits
from conformance.plugin import sparingly
from conformance.strategies.policy_inputs import Inputs, decided, drawn, of_model
from reference.policies import in_pieces, keydiff, policy_from_text
from reference.policies.layers import decides_again, is_layerwise
from reference.policies.names import make_policy
from reference.policies.parts import equal_parts
from reference.policies.pieces import piece_shares
from reference.policies.texts import text_of
from spec.errors import SpecError

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-PIECES")]

N = 23


def piece(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Return the tokens of a piece as a prompt."""
    layers = [replace(view, q=view.q[:, start:stop], k=view.k[:, start:stop], v=np.asarray(view.v)[:, start:stop])
              for view in inputs.layers]
    return replace(inputs, layers=layers, token_ids=inputs.token_ids[start:stop])


@sparingly
@given(
    protected=st.lists(st.booleans(), min_size=1, max_size=30), c=st.integers(1, 12), more=st.integers(0, 30),
)
def test_shares_of_pieces_have_the_protected_tokens_and_the_sum_of_the_share(
    protected: list[bool], c: int, more: int,
) -> None:
    mask = np.array(protected)
    b = int(mask.sum()) + more
    shares = piece_shares(b, mask, c)
    held = np.add.reduceat(mask.astype(int), np.arange(0, len(mask), c))
    sizes = np.minimum(c, len(mask) - np.arange(0, len(mask), c))
    assert shares.sum() == min(b, len(mask))
    assert (held <= shares).all()
    assert (shares <= sizes).all()
    exact = (shares.sum() - held.sum()) * (sizes - held) / max(1, (sizes - held).sum())
    assert (abs(shares - held - exact) < 1).all()


@pytest.mark.parametrize("text", [
    "snapkv:W=3", "keydiff/recent=2/sink=1", "h2o/every=none/select=half", "lagkv:lag=4:N_sink=1",
])
def test_a_piece_keeps_what_it_keeps_as_a_whole_prompt(text: str) -> None:
    whole, pieces = make_policy(text, {}), make_policy(f"{text}/pieces=8", {})
    for seed in range(4):
        inputs = drawn(seed, 24, 2, (2, 2))
        wanted = [decided(whole, piece(inputs, at, at + 8), 5) for at in (0, 8, 16)]
        found = decided(pieces, inputs, 15)
        assert found == [
            [8 * at + i for at, kept in enumerate(parts) for i in kept] for parts in zip(*wanted, strict=True)
        ]


@pytest.mark.parametrize("text", [
    "snapkv:W=3/pieces=7", "knorm/pieces=9/layers=pyramid:beta=3",
    "keydiff/sink=1/recent=2/pieces=10/heads=quota:safeguard=0.5",
    "criticalkv:W=2/pieces=6", "snapkv:W=2/diverse=0.5:signature=head/pieces=8", "capkv:N_sink=1:N_future=5/pieces=6",
    "adakv:W=2/pieces=11/values=1", "streamingllm:N_sink=1/sets=layer/pieces=6", "tova/every=none/pieces=5/recent=1",
    "expected-attention:N_sink=1:N_future=5/pieces=12", "random-tokens/pieces=5", "leverage/recent=3/pieces=9",
    "q-filters/pieces=6", "expected-attention-stats:N_sink=1:N_future=5/pieces=12",
])
def test_kept_sets_are_those_of_the_oracle_of_parts(text: str) -> None:
    method = method_of(text)
    for seed in range(3):
        inputs = drawn(seed, N, 2, (2, 2))
        policy = method.reference(inputs)
        B = max(1, int(policy.protection(N).sum())) + seed
        wanted = method.brute.kept(inputs, B, **method.constants, **method.readings)
        assert all(map(fits, decided(policy, inputs, B), wanted)), (seed, B)
    data = of_model(text, inputs)
    assert equal_parts(policy_from_text(text_of(policy, data), data), policy)
    assert text_of(policy, data).endswith(text[text.index("/pieces"):].split("/")[1])


@pytest.mark.parametrize("budget", [1, 5])
def test_a_small_budget_is_raised_to_the_protected_tokens_of_all_pieces(budget: int) -> None:
    kept = decided(make_policy("snapkv:W=2/pieces=8", {}), drawn(1, N, 2, (2, 1)), budget)
    assert kept == [[6, 7, 14, 15, 21, 22]] * 4


def test_one_piece_is_the_whole_prompt() -> None:
    inputs = drawn(3, N, 2, (2, 2))
    for c in (N, 99):
        assert decided(make_policy(f"snapkv:W=3/pieces={c}", {}), inputs, 9) == decided(
            make_policy("snapkv:W=3", {}), inputs, 9)


def test_a_policy_in_pieces_decides_each_layer_alone_and_no_later_turn() -> None:
    policy = make_policy("snapkv:W=3/pieces=8", {})
    assert is_layerwise(policy)
    assert not decides_again(policy)
    assert policy.scorer.needs.query_rows is None
    assert in_pieces(keydiff(), 8).scorer.needs.query_rows == 0


@pytest.mark.parametrize(("text", "way_out"), [
    ("keydiff/pieces=0", "at least 1"), ("chunkkv/pieces=64", "a scorer of tokens"),
    ("streamingllm/pieces=64", "sets=layer"), ("kvzip/pieces=64", "a different scorer"),
    ("defensivekv/pieces=64", "a different scorer"), ("snapkv/block=16/pieces=64", "leave block= and crush= out"),
    ("kvcrush/pieces=64", "leave block= and crush= out"),
    ("keydiff/every=64/pieces=64", "leave pieces= or the cadence out"),
    ("pyramidkv/pieces=64", "layers=even"), ("cake/pieces=64", "layers=even"),
    ("crystalcache/pieces=64", "accepts no parts"), ("nestedkv/pieces=64:c=3", "not a constant"),
])
def test_a_part_that_does_not_fit_is_refused_when_the_policy_is_made(text: str, way_out: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_policy(text, of_model(text, drawn(0, 9)))
    assert way_out in refused.value.bound
