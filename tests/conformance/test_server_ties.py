"""Rule 4 in bfloat16: rounding changes many tokens near the smallest kept score, and each copy shows some of them."""

import numpy as np
import pytest

from conformance.server_suite.ties import judged_differences
from tests.conformance.test_server_suite import exchange_token

SETS, N, KEPT, NOISE, COPIES = 90, 60, 12, 0.05, 8


def kept(scores: np.ndarray, noise: float, rng: np.random.Generator) -> list[list[list[int]]]:
    """Return the sets of KEPT tokens with the largest scores after rounding, as one layer with SETS heads."""
    rounded = scores + noise * rng.normal(size=scores.shape)
    return [np.sort(np.argsort(-rounded, axis=1)[:, :KEPT], axis=1).tolist()]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("noise", "exchanged", "accused"), [
    (NOISE, False, False), (NOISE / 4, False, False), (1.3 * NOISE, False, False), (NOISE, True, True),
    (20 * NOISE, False, True),
])
def test_many_tokens_near_a_tie_are_no_error(noise: float, exchanged: bool, accused: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(SETS, N))
    copies = ([kept(scores, NOISE, rng)] for _ in range(COPIES))
    (stated,) = kept(scores, noise, rng)
    stated = exchange_token(stated, N) if exchanged else stated
    clear, tied = judged_differences([[stated]], [kept(scores, 0.0, rng)], range(N), copies, False)
    assert bool(clear) is accused
    assert not (clear and tied)
