"""Whole chunks by the scores of single tokens, and the entropy gate: choices, refusals and texts."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods.chunks import chunk_sets, entropy
from conformance.methods.method import method_of
from conformance.oracles.choices import fits
from conformance.plugin import sparingly
from conformance.strategies.policy_inputs import decided, drawn, of_model
from conformance.tolerances import close
from reference.policies import chunkkv, in_chunks, keydiff, policy_from_text
from reference.policies.chunks import HeadSums, best_chunks, chunk_entropy
from reference.policies.layers import decides_again, is_layerwise
from reference.policies.names import make_policy
from reference.policies.parts import equal_parts
from reference.policies.texts import text_of
from spec.errors import SpecError
from spec.retention import Granularity

pytestmark = [pytest.mark.usefixtures("reference_items"), pytest.mark.spec("PO-CHUNKS")]

N = 23
_scores = st.lists(st.integers(-6, 9).map(float), min_size=1, max_size=24)


@sparingly
@given(row=_scores, seed=st.integers(0, 99), c=st.integers(1, 7), gate=st.integers(0, 6), more=st.integers(0, 24))
def test_choices_are_those_of_the_oracle(row: list[float], seed: int, c: int, gate: int, more: int) -> None:
    protected = np.random.default_rng(seed).random(len(row)) < 0.2
    B = int(protected.sum()) + more
    found = best_chunks(np.array(row), B, protected, c, min(gate, c - 1)).tolist()
    assert found == chunk_sets(
        [None if pin else x for x, pin in zip(row, protected, strict=True)], B, c, min(gate, c - 1))
    assert len(found) == min(B, len(row))


@sparingly
@given(_scores)
def test_the_entropy_is_between_a_single_token_and_equal_tokens(row: list[float]) -> None:
    found = chunk_entropy(np.array(row))
    assert close("PO-CHUNKS", [found], [entropy(row)])
    assert 0 <= found <= 1
    assert found == chunk_entropy(np.array(row[::-1]))


def test_the_entropy_of_known_scores() -> None:
    assert chunk_entropy(np.array([3.0, 3.0, 3.0])) == 1
    assert chunk_entropy(np.array([0.0, 7.0, 0.0])) == 0
    assert chunk_entropy(np.array([-1.0, -1.0])) == 0  # both are raised to 0
    assert close("PO-CHUNKS", [chunk_entropy(np.array([-2.0, 0.0, 0.0]))], [math.log(2) / math.log(3)])


@pytest.mark.parametrize("text", [
    "snapkv:W=3/chunks=4:gate=2", "keydiff/chunks=5", "knorm/sink=1/recent=2/chunks=4:gate=1",
    "tova/every=none/chunks=3", "snapkv:W=2/values=2/chunks=4/floor=9",
    "nestedkv:N_sink=1:W=2:beta=3.0/heads=even/chunks=4:gate=1",
    "snapkv:W=3/chunks=4/layers=pyramid:beta=3", "random-tokens/chunks=3:gate=1", "snapkv:W=2/chunks=3:gate=1/pieces=9",
    "streamingllm:N_sink=1/chunks=4", "expected-attention:N_sink=1:N_future=5/chunks=4:gate=3",
])
def test_kept_sets_are_those_of_the_oracle_of_parts(text: str) -> None:
    method = method_of(text)
    for seed in range(3):
        inputs = drawn(seed, N, 2, (2, 2))
        policy = method.reference(inputs)
        wanted = method.brute.kept(inputs, 9 + seed, **method.constants, **method.readings)
        found = decided(policy, inputs, 9 + seed)
        assert len(found) == len(wanted)
        assert all(map(fits, found, wanted)), seed
    data = of_model(text, inputs)
    assert equal_parts(policy_from_text(text_of(policy, data), data), policy)


def test_whole_chunks_of_equal_length_are_those_of_chunkkv() -> None:
    """Compare with ChunkKV: the sum of the heads of the last queries, in chunks before the window."""
    for seed in range(4):
        inputs = drawn(seed, 19, 2, (2, 1))
        own = make_policy("snapkv:W=3:kernel=1/chunks=4", {})
        assert decided(own, inputs, 11) == decided(chunkkv(4, 3), inputs, 11)


def test_heads_of_a_layer_keep_the_same_tokens_and_layers_decide_alone() -> None:
    policy = in_chunks(keydiff(), 4, 2)
    assert policy.granularity is Granularity.LAYER
    assert is_layerwise(policy)
    assert decides_again(policy)
    of_layers = make_policy("tova/every=none/chunks=4", {}).scorer
    assert [scorer.by_head for scorer in (policy.scorer, of_layers) if isinstance(scorer, HeadSums)] == [True, False]


@pytest.mark.parametrize(("text", "way_out"), [
    ("keydiff/chunks=0", "at least 1"), ("keydiff/chunks=4:gate=4", "below the 4 tokens of a chunk"),
    ("keydiff/chunks=4:gate=-1", "at least 0"), ("chunkkv/chunks=4", "a scorer of tokens"),
    ("h2o/every=none/chunks=4", "a scorer of tokens"),
    ("keydiff/every=16/chunks=4", "leave chunks= or the cadence out"),
    ("adakv/chunks=4", "use even"), ("snapkv/chunks=4/block=16", "single tokens"),
    ("streamingllm/sets=head/chunks=4", "use sets=layer"), ("snapkv/chunks=4/diverse=0.5", "their scores alone"),
])
def test_a_part_that_does_not_fit_is_refused_when_the_policy_is_made(text: str, way_out: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_policy(text, of_model(text, drawn(0, 9)))
    assert way_out in refused.value.bound
