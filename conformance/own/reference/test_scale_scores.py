"""What policies score by at full size: windows of hundreds of queries, wide kernels, many layers and candidates."""

import numpy as np
import pytest

from conformance.assurance.oracles import policies as oracle
from conformance.assurance.oracles import signatures as signed
from conformance.assurance.oracles import triattention
from conformance.assurance.oracles.lagkv import lagkv as brute_lagkv
from conformance.oracles.scale import selectors
from conformance.strategies.numbers import Numbers
from conformance.strategies.scale_attention import Shape, laddered
from conformance.tolerances import scores_agree
from reference.diversity import Signature, signatures
from reference.policies.attention import accumulated_attention, average_pool, max_pool, observed_attention
from reference.policies.lagkv import lagkv_score
from reference.triattention import z_scores
from spec.policy import LayerView

pytestmark = pytest.mark.usefixtures("reference_items")

SIZES = [17, 33, 65, 129, 257, 1_025, 5_000]


@pytest.mark.spec("PO-OBSERVED-ATTENTION")
@pytest.mark.parametrize("shape", [
    Shape("three-of-nine", 9, 3, 64, 700), Shape("twenty", 20, 20, 64, 300),
    Shape("capped", 8, 1, 64, 400, softcap=30.0),
], ids=str)
def test_attention_of_hundreds_of_queries(shape: Shape) -> None:
    """All together, in windows of any length, and the later ones alone."""
    inputs = laddered(shape)
    q, k = inputs.q, inputs.k
    want = selectors.attended(q, k, inputs.scaling, inputs.softcap)
    view = LayerView(q, k, None, inputs.scaling, inputs.softcap)
    late = LayerView(np.ascontiguousarray(q[:, 10:]), k, None, inputs.scaling, inputs.softcap)
    for shown, first in ((view, 0), (late, 10)):
        sums = want[:, first:].sum(axis=1)
        assert all(map(scores_agree, accumulated_attention(shown), sums.tolist()))
    for W in (33, 65, 129, 257, shape.n):
        found, last = observed_attention(view, W), want[:, -W:]
        assert found.shape == last.shape
        assert scores_agree(found.ravel(), last.ravel().tolist())


@pytest.mark.spec("PO-POOL")
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kernel", [7, 17, 33, 65, 129])
def test_pools_of_long_rows(n: int, kernel: int) -> None:
    """Every entry differs from those around it, so that none of them can be left out; two rows, none of the other."""
    x = 1 + Numbers(n).fractions(2 * n).reshape(2, n)
    for row, largest, average in zip(x.tolist(), max_pool(x, kernel), average_pool(x, kernel), strict=True):
        assert largest.tolist() == oracle.pool(row, kernel, "max")
        assert scores_agree(average, oracle.pool(row, kernel, "average"))


@pytest.mark.spec("PO-LAGKV")
@pytest.mark.parametrize(("n", "lag"), [(66_000, 128), (1_500, 300), (700, 2)])
def test_ranks_of_many_partitions(n: int, lag: int) -> None:
    """Hundreds of partitions, and some of hundreds of tokens; keys and values of their own."""
    k, v = (Numbers(n + at).fractions(n * 3).reshape(1, n, 3) for at in (0, 1))
    (found,) = lagkv_score(LayerView(k[:, :0], k, v, 1.0, None), 4, lag)
    (want,) = brute_lagkv({"k": k.tolist(), "v": v.tolist()}, 4, lag)
    tail = 4 + ((n - 4) // lag - 1) * lag
    assert found[4:tail].tolist() == want[4:tail]
    assert (np.diff(found[tail:]) == 1).all()
    assert found[tail] == 1


@pytest.mark.spec("TA-RANKING")
@pytest.mark.parametrize("n", [*SIZES, 66_000])
def test_z_scores_over_thousands_of_candidates(n: int) -> None:
    """Scores that rise, so that no part of them has the moments of all; one token in ten is pinned."""
    numbers = Numbers(n)
    X = numbers.fractions(3 * n).reshape(3, n) + np.linspace(0, 3, n) ** 2
    pinned = numbers.integers(0, 10, n) == 0
    for row, got in zip(X.tolist(), z_scores(X, ~pinned), strict=True):
        assert scores_agree(got, triattention.z_score(row, pinned.tolist()))


@pytest.mark.spec("DV-SIGNATURE")
@pytest.mark.parametrize(("L", "H_kv"), [(2, 33), (9, 4), (36, 8), (80, 8), (126, 3)])
@pytest.mark.parametrize("mode", ["flat", "layer", "head"])
def test_signatures_of_many_layers_and_heads(mode: Signature, L: int, H_kv: int) -> None:
    """To the bit; every part has values of its own."""
    values = Numbers(L * H_kv).fractions(L * H_kv * 3 * 5).reshape(L, H_kv, 3, 5) - 0.4
    found = signatures(list(values), mode)
    assert found.tolist() == signed.signatures(values.tolist(), mode)
