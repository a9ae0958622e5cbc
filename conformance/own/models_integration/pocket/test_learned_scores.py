"""The toy of docs/examples that learns scores."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.spec("PO-THRESHOLD")

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "learned_scores.py"


def test_the_toy_learns_which_tokens_are_evidence() -> None:
    """Of six needles that it has not seen, most of their tokens are among the third that score best."""
    spec = importlib.util.spec_from_file_location("learned_scores", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    scores = toy.learned(samples=12, length=256)
    model, tokenizer = toy.load_pocket()
    kept = []
    for index in range(6):
        sample = toy.draw_sample("needle", tokenizer, 256, index, seed=2)
        X = toy.features(model, sample.context_ids)
        weights = np.concatenate([scores.w_k, scores.w_v, scores.b[:, None]], axis=1)
        best = np.argsort(-np.einsum("gd,gnd->gn", weights, X), axis=1)[:, : 256 // 3]
        kept += [np.isin(np.arange(*sample.needle), row).mean() for row in best]
    assert np.mean(kept) > 0.7
