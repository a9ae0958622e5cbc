"""Learned scores from a file: what they compute, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.strategies.policy_inputs import decided, drawn
from reference.policies import policy_from_score
from reference.policies.learned import LinearScores, read_scores, write_scores
from spec.errors import SpecError

pytestmark = [pytest.mark.spec("PO-THRESHOLD"), pytest.mark.usefixtures("reference_items")]

INPUTS = drawn(5, n=14, L=2, heads=(3, 3))


def drawn_scores(G: int = 6, d: int | None = None) -> LinearScores:
    rng, size = np.random.default_rng(3), np.asarray(INPUTS.layers[0].k).shape[2] if d is None else d
    return LinearScores(rng.normal(size=(G, size)), rng.normal(size=(G, size)), rng.normal(size=G))


def test_a_file_keeps_what_the_function_scores_best(tmp_path: Path) -> None:
    write_scores(drawn_scores(), tmp_path / "scores.npz")
    scores = read_scores(tmp_path / "scores.npz")
    expected = []
    for g, (k, v) in enumerate(
        (k, v) for view in INPUTS.layers for k, v in zip(np.asarray(view.k), np.asarray(view.v), strict=True)
    ):
        found = [sum(map(float, scores.w_k[g] * k[j] + scores.w_v[g] * v[j])) + float(scores.b[g]) for j in range(14)]
        expected.append(sorted(sorted(range(14), key=lambda j: -found[j])[:5]))
    assert decided(policy_from_score(scores, needs=scores.needs), INPUTS, 5) == expected


def test_scores_of_another_model_are_refused() -> None:
    for other in (drawn_scores(G=5), drawn_scores(d=3)):
        with pytest.raises(SpecError, match="a row for each KV head"):
            decided(policy_from_score(other, needs=other.needs), INPUTS, 5)


@pytest.mark.parametrize(
    "fields",
    [
        {"w_k": np.ones((2, 3)), "w_v": np.ones((2, 4)), "b": np.ones(2)},
        {"w_k": np.ones((2, 3)), "w_v": np.ones((2, 3)), "b": np.ones(3)},
        {"w_k": np.ones((2, 3)), "w_v": np.full((2, 3), np.inf), "b": np.ones(2)},
        {"w_k": np.ones((2, 3)), "b": np.ones(2)},
    ],
)
def test_a_file_that_is_not_one_of_scores_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    np.savez(tmp_path / "scores.npz", **fields)
    with pytest.raises(SpecError):
        read_scores(tmp_path / "scores.npz")


@pytest.mark.parametrize("write", [lambda path: path.write_text("w_k"), lambda path: None])
def test_what_is_no_file_of_arrays_is_refused(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "scores.npz")
    with pytest.raises(SpecError, match="file with w_k, w_v, b"):
        read_scores(tmp_path / "scores.npz")
