"""NestedKV's windows know nothing of the prompt before them: no sum runs over it."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install 'kvspec[numba]'")

from accelerated.numba_cpu.nestedkv import anomalies, measured

pytestmark = pytest.mark.judges("numba")


W, B = 64, 128


def current(k: Any) -> Any:
    """a_c (n,) of one head's keys."""
    inverse, blocks, stable = measured(k, B)
    return anomalies(k, inverse, blocks, stable, B, W)[2]


@pytest.mark.spec("NK-CURRENT")
@pytest.mark.parametrize("n", [3 * W, 20_000])
def test_a_window_has_the_same_bits_after_any_prompt(n: int) -> None:
    """The last tokens behind a prompt of another direction, and alone: after their first window nothing differs."""
    rng = np.random.default_rng(4)
    before = (rng.standard_normal((n - n % W, 16)) + 5).astype(np.float32)
    tail = (rng.standard_normal((3 * W + 7, 16)) - 5).astype(np.float32)
    alone, behind = current(tail), current(np.concatenate([before, tail]))[-len(tail) :]
    assert np.array_equal(behind[W - 1 :], alone[W - 1 :])
    assert not np.array_equal(behind[: W - 1], alone[: W - 1])


@pytest.mark.spec("NK-EPISODIC", "NK-ANOMALY")
@pytest.mark.parametrize(("rise", "directed"), [(1.5 * 2.0**-16, False), (1.25 * 2.0**-15, True)])
def test_a_block_whose_keys_cancel_has_no_direction(rise: float, directed: bool) -> None:
    """Unit keys (1, 0) and (-1, rise): the mean of the two, half of rise, MUST exceed 2^-16, not their sum."""
    k = np.array([[1.0, 0.0], [-1.0, rise]], np.float32)
    episodic = anomalies(k, *measured(k, 2), 2, 2)[1]
    assert (episodic[1] == -k[1, 1]) == directed == bool(episodic.any())


@pytest.mark.spec("NK-CURRENT", "NK-ANOMALY")
@pytest.mark.parametrize(("rise", "directed"), [(1.5 * 2.0**-16, False), (1.25 * 2.0**-15, True)])
@pytest.mark.parametrize(("n", "window"), [(40, 2), (2, 64)])
def test_a_window_whose_keys_cancel_has_no_direction(rise: float, directed: bool, n: int, window: int) -> None:
    """The last two keys again; their mean decides wherever the window ends, and while it is not full."""
    k = np.tile(np.array([[1.0, 0.0], [-1.0, rise]], np.float32), (n // 2, 1))
    found = anomalies(k, *measured(k, 2), 2, window)[2]
    assert (found[-1] == -k[1, 1]) == directed == bool(found[-1])
