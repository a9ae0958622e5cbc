"""Signatures and cosines of set-conditioned diversity: to the bit of brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.assurance.oracles import signatures as signed
from conformance.assurance.policy_cases import plain_values
from conformance.oracles import diversity as brute
from conformance.plugin import sparingly
from conformance.strategies.numbers import seeds
from conformance.strategies.policy_inputs import drawn
from reference import diversity

pytestmark = pytest.mark.usefixtures("reference_items")


@pytest.mark.spec("DV-COSINE")
def test_no_token_has_no_cosine() -> None:
    assert diversity.cosines(np.empty((0, 3))).shape == (0, 0)


@pytest.mark.spec("DV-COSINE")
@given(seed=seeds, d=st.integers(1, 40))
def test_sums_go_from_the_first_channel_to_the_last(seed: int, d: int) -> None:
    """The same bits as a loop over numbers."""
    u = np.random.default_rng(seed).standard_normal((5, d)) * 3
    V = diversity.unit_rows(u)
    assert V.tolist() == [signed.unit(row) for row in u.tolist()]
    assert diversity.cosines(V).tolist() == [[brute.cosine(a, b) for b in V.tolist()] for a in V.tolist()]


@pytest.mark.spec("DV-SIGNATURE")
@pytest.mark.parametrize("mode", ["flat", "layer", "head"])
@sparingly
@given(seed=seeds)
def test_signatures_have_the_bits_of_brute_force(mode: diversity.Signature, seed: int) -> None:
    inputs = drawn(seed)
    found = diversity.signatures([np.asarray(view.v) for view in inputs.layers], mode)
    assert found.tolist() == signed.signatures(plain_values(inputs), mode)
