"""TriAttention: wrong readings."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of, method_instead_of
from reference.calibration import Calibration, load_calibration
from reference.policies import triattention
from reference.policies.budgets import even
from reference.policies.triattention import TriAttention
from reference.triattention import STD_MIN, band_statistics, distance_score, joined, z_scores
from spec.errors import SpecError
from spec.policy import Policy

__all__: list[str] = []


@instead_of(band_statistics, "TA-STATISTICS")
def neighbouring_channels(q: Array) -> Any:
    """A band is two neighbouring channels."""
    order = np.concatenate([np.arange(0, q.shape[2], 2), np.arange(1, q.shape[2], 2)])
    return band_statistics(q)[0], band_statistics(q[:, :, order])[1]


@instead_of(band_statistics, "TA-STATISTICS")
def size_of_the_mean(q: Array) -> Any:
    """The size of a band is that of its mean query."""
    mean, _ = band_statistics(q)
    first, second = np.split(mean, 2, axis=1)
    return mean, np.hypot(first, second)


@method_instead_of(Calibration, "check", "TA-CALIBRATION")
def any_model_of_this_rotation(calibration: Any, served: Any) -> None:
    """The model's name is not compared."""
    Calibration.check(calibration, replace(served, model=calibration.identity.model))


@method_instead_of(Calibration, "check", "TA-CALIBRATION")
def any_factor(calibration: Any, served: Any) -> None:
    """The factor inside the rotary tables is not compared."""
    Calibration.check(calibration, replace(served, factor=calibration.identity.factor))


@instead_of(load_calibration, "TA-CALIBRATION")
def in_single_precision(path: Any) -> Calibration:
    """Statistics come back as float32 numbers."""
    found = load_calibration(path)
    return replace(
        found, mean=found.mean.astype(np.float32).astype(np.float64),
        magnitude=found.magnitude.astype(np.float32).astype(np.float64),
    )


@instead_of(distance_score, "TA-SCORE")
def from_the_last_token(
    c: Array, t: int, mean: Array, magnitude: Array, inv_freq: Array, factor: float,
) -> Array:
    """Offsets count from the last token's position, one less than the tokens seen."""
    return distance_score(c, t - 1, mean, magnitude, inv_freq, factor)


@instead_of(distance_score, "TA-SCORE")
def without_the_norm_term(
    c: Array, t: int, mean: Array, magnitude: Array, inv_freq: Array, factor: float,
) -> Array:
    """What the mean query does not explain is left out."""
    first, second = np.split(mean, 2, axis=1)
    return distance_score(c, t, mean, np.hypot(first, second), inv_freq, factor)


@instead_of(distance_score, "TA-SCORE")
def factor_left_in_the_keys(
    c: Array, t: int, mean: Array, magnitude: Array, inv_freq: Array, factor: float,
) -> Array:
    """Keys keep the attention factor when they are turned back."""
    return distance_score(c * factor, t, mean, magnitude, inv_freq, factor)


@instead_of(distance_score, "TA-SCORE")
def the_next_query_alone(
    c: Array, t: int, mean: Array, magnitude: Array, inv_freq: Array, factor: float,
) -> Array:
    """No mean over later queries: the score at t + 1."""
    half = len(inv_freq)
    key, query = c[:, :half] - 1j * c[:, half:], mean[:, :half] + 1j * mean[:, half:]
    turn = np.exp(1j * inv_freq * (t + 1))
    rest = np.abs(key) @ (magnitude - np.abs(query)).T
    score: Array = factor * ((key @ (turn * query).T).real + rest).T
    return score


@instead_of(z_scores, "TA-RANKING")
def sample_deviation(X: Array, candidates: Array) -> Array:
    """The divisor of the variance is one less than the tokens."""
    m = max(2, int(candidates.sum()))
    narrow: Array = z_scores(X, candidates) * np.sqrt((m - 1) / m)
    return narrow


@instead_of(z_scores, "TA-RANKING")
def pinned_tokens_in_the_mean(X: Array, candidates: Array) -> Array:
    """Mean and deviation are of all tokens, pinned ones too."""
    z = z_scores(X, np.ones_like(candidates))
    z[:, ~candidates] = np.nan
    return z


@instead_of(z_scores, "TA-RANKING")
def constant_rows_by_one(X: Array, candidates: Array) -> Array:
    """A row whose deviation is below 1e-6 is divided by 1."""
    z = z_scores(X, candidates)
    flat = X[:, candidates].std(axis=1) < STD_MIN if candidates.any() else np.zeros(len(X), dtype=np.bool_)
    z[flat] *= STD_MIN
    return z


@instead_of(joined, "TA-RANKING")
def mean_of_all_heads(best: Array, mode: Any) -> Array:
    """The global row is the mean of all heads."""
    mean: Array = best.reshape(-1, best.shape[2]).mean(axis=0, keepdims=True)
    return mean if mode == "global" else joined(best, mode)


@instead_of(joined, "TA-RANKING")
def largest_layer_of_a_head(best: Array, mode: Any) -> Array:
    """A head index takes its largest layer, not their mean."""
    return np.tile(best.max(axis=0), (len(best), 1)) if mode == "head" else joined(best, mode)


@instead_of(triattention, "TA-POLICY")
def the_pinned_prompt_beside_the_budget(
    calibration: Any, served: Any, mode: Any = "global", pin_prompt: int = 0, slack: int = 128,
) -> Policy:
    """The prompt comes on top of B."""
    policy = triattention(calibration, served, mode, pin_prompt, slack)
    return replace(policy, budgets=lambda total, scores: even(total, scores) + pin_prompt)


@instead_of(triattention, "TA-POLICY")
def one_token_late(
    calibration: Any, served: Any, mode: Any = "global", pin_prompt: int = 0, slack: int = 128,
) -> Policy:
    """A decision waits until more than the slack is above B."""
    policy = triattention(calibration, served, mode, pin_prompt, slack)
    return replace(policy, cadence=replace(policy.cadence, excess=slack + 1))


@instead_of(triattention, "TA-POLICY")
def a_prompt_that_does_not_fit_is_cut(
    calibration: Any, served: Any, mode: Any = "global", pin_prompt: int = 0, slack: int = 128,
) -> Policy:
    """A pinned prompt above B is not refused: its first B tokens are kept, as in the official code."""
    policy = triattention(calibration, served, mode, pin_prompt, slack)
    return replace(policy, scorer=_Cut(calibration, mode, pin_prompt))


class _Cut(TriAttention):
    def __call__(self, observation: Any, protected: Array, /) -> Any:
        try:
            return super().__call__(observation, protected)
        except SpecError:
            return super().__call__(replace(observation, B=None), protected)
