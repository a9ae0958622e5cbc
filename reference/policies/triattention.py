"""TriAttention scores tokens by calibrated query statistics, and evicts at 128 tokens above the budget."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from reference.calibration import Calibration, Identity
from reference.policies.attention import wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import WithoutRecords, host_rows
from reference.policies.selectors import top_units
from reference.triattention import Mode, distance_score, joined, z_scores
from spec.arrays import BoolVector, Float64, Matrix, Vector
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import Cadence, DeviceArray, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity
from spec.validate import check_whole

__all__ = ["TriAttention", "largest_z_scores", "triattention"]

GRANULARITY: Mapping[Mode, Granularity] = {
    "global": Granularity.MODEL, "head": Granularity.HEAD, "layer and head": Granularity.HEAD,
}


def largest_z_scores(
    k: DeviceArray, t: int, mean: Float64[Matrix, "H d"], magnitude: Float64[Matrix, "H half"],
    inv_freq: Float64[Vector, " half"], factor: float, pinned: int,
) -> Float64[Matrix, "H_kv n"]:
    """Return each key's largest z-score over the query heads of a KV head. The score of a pinned token is NaN.

    Implements: TA-SCORE, TA-RANKING
    """
    candidates = np.arange(k.shape[1]) >= pinned
    heads = zip(wide(k), np.split(mean, len(k)), np.split(magnitude, len(k)), strict=True)
    scores = (distance_score(keys, t, head_mean, size, inv_freq, factor) for keys, head_mean, size in heads)
    return np.stack([z_scores(score, candidates).max(axis=0) for score in scores])


@dataclass(frozen=True)
class TriAttention(WithoutRecords):
    """Scorer that uses calibrated query statistics. The scorer reads only cached keys and stores no records."""

    calibration: Calibration
    mode: Mode
    pin_prompt: int
    needs: Needs = Needs("all", query_rows=0, budget=True)
    score: Callable[..., DeviceArray] = largest_z_scores

    @property
    def provided(self) -> Provided:
        return Provided(sets=frozenset({GRANULARITY[self.mode]}), unscored=(self.pin_prompt, 0), no_steps="")

    @property
    def layerwise(self) -> bool:
        """Return True if the mode is "layer and head". The modes "global" and "head" combine scores of all layers."""
        return self.mode == "layer and head"

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Implements: TA-POLICY"""
        if observation.B is not None and self.pin_prompt > observation.B:
            raise SpecError(
                "pin_prompt", self.pin_prompt,
                f"exceeds the budget of {observation.B} tokens; use a larger budget or a smaller pin_prompt",
            )
        return self.step(None, observation)

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Return one row of scores per group: the KV heads' largest z-scores, combined according to the mode.

        The first `pin_prompt` slots are the pinned tokens.

        Implements: TA-POLICY
        """
        rows = self.layers(observation.layers, observation.seen)
        best = host_rows(rows).reshape(len(rows), *rows[0].shape)
        values = joined(best, self.mode)
        heads = 1 if self.mode == "global" else best.shape[1]
        return Scores(values, np.arange(values.shape[1] + 1), heads=heads)

    def layers(self, views: Mapping[int, LayerView], t: int) -> list[DeviceArray]:
        """Return each layer's largest z-scores over query heads, (H_kv, n). The score of a pinned token is NaN."""
        calibration, rope, known, rows = self.calibration, self.calibration.identity, self.calibration.layers, []
        if not (set(views) <= set(known) if self.layerwise else tuple(views) == known):
            raise SpecError(
                "calibration", known,
                f"are the calibrated layers, but the cache has the layers {tuple(views)}; run `kvspec calibrate`",
            )
        for layer, view in views.items():
            shape, at = tuple(view.k.shape), known.index(layer)
            mean, magnitude = calibration.mean[at], calibration.magnitude[at]
            if len(mean) % shape[0] or mean.shape[1] != shape[2]:
                raise SpecError(
                    "calibration", calibration.mean.shape,
                    f"does not fit keys with shape {shape}; run `kvspec calibrate` with this model",
                )
            rows.append(self.score(view.k, t, mean, magnitude, rope.inv_freq, rope.factor, self.pin_prompt))
        return rows


@named(
    "triattention", "TriAttention (arXiv 2604.04921)",
    "tokens that later queries would attend to most, predicted from the query statistics of a calibration file",
    decided={"mode": "global"}, model_constants=frozenset({"served"}),
)
@named(
    "triattention-by-head", "TriAttention (arXiv 2604.04921)",
    "tokens with the best triattention scores; heads with the same index in all layers share one set of tokens",
    decided={"mode": "head"}, model_constants=frozenset({"served"}),
)
@named(
    "triattention-by-layer-and-head", "TriAttention (arXiv 2604.04921)",
    "tokens with the best triattention scores; each head of each layer has a separate set of tokens",
    decided={"mode": "layer and head"}, model_constants=frozenset({"served"}),
)
def triattention(
    calibration: Calibration, served: Identity, mode: str = "global", pin_prompt: int = 0, slack: int = 128,
) -> Policy:
    """Return TriAttention: each group is reduced to B tokens after the prompt, and again after every `slack` tokens.

    `mode="global"` is the baseline 1d in the paper Set-Conditioned Diversity. In the official code the default mode is
    "head". The official code breaks ties by noise of up to 1e-6. If tokens tie, kvspec keeps the token at the lower
    position. The official code never evicts at the end of a prompt. Some ports of TriAttention protect the last 128
    tokens, or use the sample standard deviation.

    Implements: TA-POLICY

    Args:
        calibration: calibration of the served model.
        served: identity of the served model and its RoPE.
        mode: part of the model that has a separate set of kept tokens (a group). With "global" the whole model is one
            group. With "head" the KV heads with the same index in all layers are one group. With "layer and head" each
            KV head of each layer is a separate group.
        pin_prompt: number of first tokens that are never evicted. B includes these tokens.
        slack: after a decode step, the policy evicts if a group has at least `slack` tokens more than B.

    Raises:
        SpecError: if the calibration is for a different model or RoPE, or lacks query statistics. The error is also
            raised if the mode is unknown, or if pin_prompt or slack is out of range.
    """
    calibration.check(served)
    if not calibration.magnitude.shape[2]:
        reason = "has no query statistics; `kvspec calibrate TEXT` writes statistics if the model rotates in halves"
        raise SpecError("calibration", calibration.digest, reason)
    if mode not in GRANULARITY:
        raise SpecError("mode", mode, f"must be one of {', '.join(GRANULARITY)}")
    check_whole("pin_prompt", pin_prompt)
    check_whole("slack", slack, 1)
    form = cast(Mode, mode)
    return Policy(
        "triattention", TriAttention(calibration, form, pin_prompt), even, top_units, SinkAndRecent(pin_prompt, 0),
        Cadence(every=1, excess=slack), GRANULARITY[form], least=None,
    )
