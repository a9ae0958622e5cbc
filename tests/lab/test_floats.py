"""Bounds of floats: no input exceeds a bound, Gappa proves each bound with a script, and too small bounds are caught.

Tests that need Gappa or python-flint are skipped without them. `nox -s lab -- floats` installs python-flint.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from conformance import tolerances
from conformance.oracles import s1
from conformance.tolerances import Interval, list_is_realisable
from lab.proofs.floats import __main__ as gappa

needs_gappa = pytest.mark.skipif(bool(gappa.missing()), reason=gappa.missing() or "Gappa is there")
try:
    from lab.proofs.floats import search
except ImportError:
    CASES: list[Any] = [pytest.param(None, marks=pytest.mark.skip(reason="python-flint: nox -s lab -- floats"))]
else:
    CASES = [pytest.param(case, id=case.item, marks=pytest.mark.spec(case.item)) for case in search.CASES]
BY_ITEM = {case.id: case.values[0] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_no_input_exceeds_a_bound(case: Any) -> None:
    actual, inputs = search.worst(case, 20)
    assert 0 <= actual <= 1, inputs


TOO_SMALL: dict[str, Callable[..., Any]] = {
    "CC-DECAY": lambda D, M, p, sizes: tolerances.decay_radius(np.array(D)) / 2,
    "CC-RARITY": lambda c, sizes: 8 * 2.0**-53 * sizes,
    # These are earlier bounds: without a threshold for sigma, and with norms of the cosine that can only grow.
    "CC-CRYSTALLIZATION": lambda degree, p, sizes: 1e-6 if min(degree) != max(degree) else 1.0,
    "CC-INTRA": lambda A, B, e, sizes: (
        1.01 * math.expm1(4 * math.log1p(e) + 1e-12) * s1.cosine(s1.row_normalise(A, 1e-8), 0, 1)
    ),
}


@pytest.mark.parametrize("item", [pytest.param(item, marks=pytest.mark.spec(item)) for item in TOO_SMALL])
def test_a_bound_that_is_too_small_is_caught(item: str) -> None:
    if item not in BY_ITEM:
        pytest.skip("python-flint is not here: nox -s lab -- floats")
    assert search.worst(replace(BY_ITEM[item], radius=TOO_SMALL[item]), 200)[0] > 1


@needs_gappa
@pytest.mark.parametrize(
    "proof", [pytest.param(one, id=f"{one.name}-{at}", marks=pytest.mark.spec(one.item))
              for at, one in enumerate(gappa.PROOFS)]
)
def test_gappa_proves_the_bound_and_not_its_half(proof: gappa.Proof) -> None:
    assert all(gappa.proved(proof))
    assert not all(gappa.proved(proof, 0.5))


@pytest.mark.spec("CC-INTRA", "CC-CROSS")
def test_a_list_is_realisable_where_some_float32_of_the_boxes_choose_it() -> None:
    """Check all boxes of up to two neighbouring float32 among four around tau, with all weights in the boxes."""
    grid = [float(np.float32(0.3) + np.float32(2.0**-25 * step)) for step in range(4)]
    ends = [(a, b) for a in range(4) for b in range(a, min(a + 2, 4))]
    lists = [[], *([j] for j in range(3)), *([i, j] for i in range(3) for j in range(3) if i != j)]
    for boxed in product(ends, repeat=3):
        boxes = {j: Interval(grid[a], grid[b]) for j, (a, b) in enumerate(boxed)}
        some = {
            tuple(j for j, _ in s1.strongest(dict(enumerate(grid[at] for at in values)), 2, grid[1]))
            for values in product(*(range(a, b + 1) for a, b in boxed))
        }
        assert [chosen for chosen in lists if list_is_realisable(chosen, boxes, 2, grid[1])] == [
            chosen for chosen in lists if tuple(chosen) in some
        ]


@pytest.mark.law("figures-are-counted-right")
def test_the_pages_figures_are_those_of_the_command() -> None:
    text = gappa.README.read_text(encoding="utf-8")
    actual = {("CC-TAIL-D", "BOUNDS"): 0.125, ("CC-SCORE", "normalised_radius"): 4.04e-5}
    page = gappa.rewritten(text, actual)
    changed = [line for line in page.splitlines() if line not in text.splitlines()]
    assert [line.split("|")[-2] for line in changed] == [" 0.12 ", " 4e-05 "]
    assert list(gappa.stale(page, actual)) == []
    assert [line.partition(":")[0] for line in gappa.stale(text, actual)] == ["CC-TAIL-D", "CC-SCORE"]


@pytest.mark.spec("CC-TAIL-D")
def test_the_search_for_the_tail_finds_both_roundings() -> None:
    """Check two orders of multiplication and division, which together reach more than half of the bound."""
    if "CC-TAIL-D" not in BY_ITEM:
        pytest.skip("python-flint is not here: nox -s lab -- floats")
    assert 0.45 < search.worst(BY_ITEM["CC-TAIL-D"], 400)[0] < 0.6
