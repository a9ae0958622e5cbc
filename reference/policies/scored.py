"""Functions that make a policy from a scoring function, and that store the weights of a learned linear score."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

import numpy as np

from reference.policies.attention import wide
from reference.policies.budgets import Above, even
from reference.policies.protections import SinkAndRecent
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Float64, Matrix, Vector
from spec.composition import Provided
from spec.errors import SpecError
from spec.files import ARCHIVE_ERRORS, check_unpacked
from spec.policy import SEGMENT_END, Needs, Observation, Policy, Promises, Protection, Scores
from spec.retention import Granularity

__all__ = ["EVERYTHING", "LinearScores", "policy_from_score", "read_scores", "write_scores"]


EVERYTHING = Needs("all", None, values=True, token_ids=True)
"""`Needs` of a scoring function that reads every tensor.

All tensors stay in memory until the prompt has been processed.
"""
NOTHING = SinkAndRecent(0, 0)
_SETS = "must be kvspec.Granularity.MODEL, LAYER or HEAD"
_PROMISES = Promises(
    budget_exact="yes", protection_holds="yes", no_op_at_full_budget="yes", higher_score_never_loses="yes"
)
"""What a policy from a scoring function guarantees without a threshold. The function's author may guarantee more."""


@dataclass(frozen=True)
class _Function:
    """Scorer of single tokens that calls a user's scoring function."""

    score: Callable[[Observation], Matrix]
    needs: Needs
    granularity: Granularity
    separable: bool

    @property
    def provided(self) -> Provided:
        no_steps = "has a scoring function of prompts: leave the cadence out, or write a scorer with the method step"
        return Provided(sets=frozenset({self.granularity}), no_steps=no_steps)

    @property
    def layerwise(self) -> bool:
        return self.separable

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        shape, scores = (observation.groups, len(protected)), np.asarray(self.score(observation))
        if scores.shape != shape or scores.dtype.kind not in "fiub":
            given = f"{scores.dtype} {scores.shape}"
            reason = f"must be an array of numbers with shape (kept sets, tokens) = {shape}"
            raise SpecError("score", given, f"{reason}; the argument granularity determines the kept sets")
        values: Float64[Matrix, "g n"] = scores.astype(np.float64)
        if np.isnan(values[:, ~protected]).any():
            group, token = (int(at) for at in np.argwhere(np.isnan(values) & ~protected)[0])
            raise SpecError("score", "NaN", f"must be a number for token {token} of kept set {group}")
        by_head = self.granularity is Granularity.HEAD and self.needs.layers == "all"
        heads = len(next(iter(observation.layers.values())).k) if by_head else 1
        return Scores(values, np.arange(len(protected) + 1), heads=heads)


def policy_from_score(
    score: Callable[[Observation], Matrix], *, needs: Needs = EVERYTHING,
    granularity: Granularity = Granularity.HEAD, protection: SinkAndRecent = NOTHING,
    threshold: float | None = None, separable: bool = False,
) -> Policy:
    """Make a policy that keeps the tokens with the highest scores. If two tokens tie, the earlier token is kept.

        def knorm(observation):
            return np.concatenate([-np.linalg.norm(view.k, axis=2) for view in observation.layers.values()])

        POLICY = kvspec.policy_from_score(knorm, needs=Needs("all"))

    Args:
        score: function that takes a `spec.policy.Observation` and returns an array of scores. The shape of the array is
            (number of sets of kept tokens, number of tokens). The sets of kept tokens are ordered by layer, then by KV
            head. The policy is named after the function.
        needs: tensors that `score` uses. If `score` uses an undeclared tensor, `SpecError` is raised. Fewer captured
            tensors take less time and memory.
        granularity: part of the model that has a separate set of kept tokens: `kvspec.Granularity.MODEL`, `LAYER` or
            `HEAD`. With `MODEL` the array has one row. `observation.groups` is the number of sets.
        protection: first and last tokens that are never evicted. If the budget is smaller than the number of protected
            tokens, all protected tokens are kept.
        threshold: largest score that is evicted. All unprotected tokens with a score up to `threshold` are evicted,
            even if fewer tokens than the budget remain.
        separable: True if the scores of each layer and KV head depend only on tensors of this layer and KV head. If
            `separable` is True, the policy also evicts at the end of later turns.

    Raises:
        SpecError: if an argument has a wrong type, or if the threshold is NaN. The returned policy raises `SpecError`
            if the scores have a wrong shape or dtype, or if an unprotected token has the score NaN.
    """
    rules = {
        "score": (callable(score), score, "must be a function that takes an observation and returns scores"),
        "needs": (isinstance(needs, Needs), needs, 'must be a kvspec.Needs, such as kvspec.Needs("all")'),
        "granularity": (isinstance(granularity, Granularity), granularity, _SETS),
        "protection": (isinstance(protection, Protection), protection, "must be a kvspec.SinkAndRecent"),
        "threshold": (threshold is None or _is_number(threshold), threshold, "must be a number, or None"),
        "separable": (isinstance(separable, bool), separable, "must be True or False"),
    }
    for argument, (fits, value, reason) in rules.items():
        if not fits:
            raise SpecError(argument, value, reason)
    name = getattr(score, "__name__", type(score).__name__)
    scorer = _Function(score, needs, granularity, separable)
    policy = Policy(name, scorer, even, top_units, protection, SEGMENT_END, granularity, promises=_PROMISES)
    if threshold is None:
        return policy
    promises = replace(_PROMISES, budget_exact="no", no_op_at_full_budget="no")
    return replace(policy, budgets=Above(threshold), promises=promises)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


_FIELDS = ("w_k", "w_v", "b")


@dataclass(frozen=True)
class LinearScores:
    """Linear scoring function for `policy_from_score`, with weights w_k (G, d), w_v (G, d), b (G,) for G groups."""

    w_k: Matrix
    w_v: Matrix
    b: Vector
    needs: Needs = Needs("all", query_rows=0, values=True)

    def __post_init__(self) -> None:
        if self.w_k.ndim != 2 or self.w_v.shape != self.w_k.shape or self.b.shape != self.w_k.shape[:1]:
            shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in _FIELDS)
            raise SpecError("scores", shapes, "must be w_k (G, d), w_v (G, d) and b (G,)")
        if not all(np.isfinite(getattr(self, name)).all() for name in _FIELDS):
            raise SpecError("scores", "infinite or NaN", "must be finite")

    def __call__(self, observation: Observation) -> Float64[Matrix, "G n"]:
        """Return the scores w_k k_j + w_v v_j + b of all tokens j. The keys k_j are the cached keys, after RoPE.

        Raises:
            SpecError: if the weights do not fit the model's number of KV heads or its head size.
        """
        views = observation.layers.values()
        k, v = (np.concatenate([wide(getattr(view, part)) for view in views]) for part in "kv")
        if (needed := (len(k), k.shape[2])) != self.w_k.shape:
            raise SpecError(
                "scores", self.w_k.shape, f"must have the shape (KV heads of all layers, channels) = {needed}"
            )
        scores: Matrix = np.einsum("gd,gnd->gn", self.w_k, k) + np.einsum("gd,gnd->gn", self.w_v, v) + self.b[:, None]
        return scores


def write_scores(scores: LinearScores, path: str | Path) -> None:
    """Write the weights to `path`, an `.npz` file with the arrays `w_k`, `w_v` and `b`."""
    np.savez(path, **{name: getattr(scores, name) for name in _FIELDS})


def read_scores(path: str | Path) -> LinearScores:
    """Read a linear score from an `.npz` file with the arrays `w_k`, `w_v` and `b`, as written by `write_scores`.

    Raises:
        SpecError: if the file lacks one of the three arrays, or if the arrays have invalid shapes or values.
    """
    try:
        check_unpacked(path)
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            given = [arrays[name] for name in _FIELDS]
        if any(array.dtype.kind not in "fiu" for array in given):
            raise ValueError("they must have real numbers")
        w_k, w_v, b = (np.asarray(array, dtype=np.float64) for array in given)
    except (OSError, KeyError, TypeError, ValueError, EOFError, *ARCHIVE_ERRORS) as error:
        raise SpecError("path", str(path), f"must be an .npz file with {', '.join(_FIELDS)}: {error}") from error
    return LinearScores(w_k, w_v, b)
