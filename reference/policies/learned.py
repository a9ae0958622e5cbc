"""Scores that were learned elsewhere, in a file: each KV head has a linear function of a token's key and value."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reference.policies.attention import wide
from spec.arrays import Float64, Matrix, Vector
from spec.errors import SpecError
from spec.policy import Needs, Observation

__all__ = ["LinearScores", "read_scores", "write_scores"]

_FIELDS = ("w_k", "w_v", "b")


@dataclass(frozen=True)
class LinearScores:
    """For `policy_from_score`: w_k (G, d), w_v (G, d) and b (G,) of the G kept sets, layer major."""

    w_k: Matrix
    w_v: Matrix
    b: Vector
    needs: Needs = Needs("all", 0, values=True)

    def __post_init__(self) -> None:
        if self.w_k.ndim != 2 or self.w_v.shape != self.w_k.shape or self.b.shape != self.w_k.shape[:1]:
            shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in _FIELDS)
            raise SpecError("scores", shapes, "must be w_k (G, d), w_v (G, d) and b (G,)")
        if not all(np.isfinite(getattr(self, name)).all() for name in _FIELDS):
            raise SpecError("scores", "infinite or NaN", "must be finite")

    def __call__(self, observation: Observation) -> Float64[Matrix, "G n"]:
        """w_k k_j + w_v v_j + b, keys as they are cached.

        Raises:
            SpecError: for another number of kept sets, or another size of heads.
        """
        views = observation.layers.values()
        k, v = (np.concatenate([wide(getattr(view, part)) for view in views]) for part in "kv")
        if (needed := (len(k), k.shape[2])) != self.w_k.shape:
            raise SpecError("scores", self.w_k.shape, f"must have a row for each KV head of its size, {needed}")
        scores: Matrix = np.einsum("gd,gnd->gn", self.w_k, k) + np.einsum("gd,gnd->gn", self.w_v, v) + self.b[:, None]
        return scores


def write_scores(scores: LinearScores, path: str | Path) -> None:
    """As a `.npz` file of three arrays."""
    np.savez(path, **{name: getattr(scores, name) for name in _FIELDS})


def read_scores(path: str | Path) -> LinearScores:
    """What `write_scores`, or a training of your own, wrote.

    Raises:
        SpecError: for a file without the three arrays, or as LinearScores.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            w_k, w_v, b = (np.asarray(arrays[name], dtype=np.float64) for name in _FIELDS)
    except (OSError, KeyError, ValueError) as error:
        raise SpecError("path", str(path), f"must be an .npz file with {', '.join(_FIELDS)}") from error
    return LinearScores(w_k, w_v, b)
