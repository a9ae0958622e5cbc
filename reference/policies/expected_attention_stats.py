"""Expected Attention with query statistics of a calibration, in place of the statistics of the prompt's queries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.calibration import Calibration, Identity
from reference.policies.budgets import even
from reference.policies.expected_attention import weights_from_statistics
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import check_positive, stacked
from reference.policies.selectors import top_tokens
from spec.arrays import BoolVector, Float64, Matrix
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity
from spec.validate import check_whole

__all__ = ["ExpectedAttentionStats", "expected_attention_stats"]


@dataclass(frozen=True)
class ExpectedAttentionStats:
    """Scorer of Expected Attention for calibrated queries, from the cached keys and values.

    The one declared query only shows how many query heads share a KV head. No score depends on the query.
    """

    calibration: Calibration
    N_sink: int
    N_future: int
    needs: Needs = Needs("all", 1, values=True)
    separable: bool = True
    score: Callable[..., DeviceArray] = weights_from_statistics
    layerwise: ClassVar[bool] = True

    @property
    def provided(self) -> Provided:
        return Provided(unscored=(self.N_sink, 0))

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        views, seen, first = observation.layers, observation.seen, observation.first
        return stacked(observation, [self.score_layer(layer, view, seen, first) for layer, view in views.items()])

    def score_layer(self, layer: int, view: LayerView, seen: int, first: int = 0) -> Float64[Matrix, "h n"]:
        """Return the scores of a layer. The first N_sink tokens have the score NaN.

        Implements: PO-EXPECTED-ATTENTION-STATS
        """
        scores = np.full(view.k.shape[:2], np.nan)
        if view.k.shape[1] > self.N_sink:
            scores[:, self.N_sink :] = self.weights(layer, view, seen, first)
        return scores

    def weights(self, layer: int, view: LayerView, seen: int, first: int = 0) -> DeviceArray:
        """Return the scores of the tokens after the sinks, (h, n - N_sink).

        A view has all KV heads of a layer, or the one KV head with the index `first` among all KV heads.

        Implements: PO-EXPECTED-ATTENTION-STATS

        Raises:
            SpecError: if the values were not captured, or if the calibration has no statistics of this layer or
                statistics of a different shape.
        """
        if view.v is None:
            raise SpecError("v", None, "is needed, because Expected Attention uses the values")
        calibration, group = self.calibration, view.q.shape[0] // view.k.shape[0]
        if layer not in calibration.layers:
            raise SpecError("calibration", calibration.layers, f"has no layer {layer}; run `kvspec calibrate`")
        at, H, (heads, _, d) = calibration.layers.index(layer), calibration.mean.shape[1], view.k.shape
        if H % (heads * group) or d != calibration.mean.shape[2]:
            raise SpecError(
                "calibration", calibration.mean.shape,
                f"does not fit keys with shape {tuple(view.k.shape)}; run `kvspec calibrate` with this model",
            )
        assert calibration.covariance is not None
        start = first * group % H if heads * group < H else 0
        layer_heads, rope = slice(start, start + heads * group), calibration.identity
        return self.score(
            calibration.mean[at, layer_heads], calibration.covariance[at, layer_heads], view.k[:, self.N_sink :],
            view.v[:, self.N_sink :], np.arange(seen, seen + self.N_future), rope.inv_freq, rope.factor, view.scaling,
            view.sinks,
        )


@named(
    "expected-attention-stats", "Devoto et al., Expected Attention (arXiv 2510.00636)",
    "tokens that Gaussian future queries would attend to most; the query statistics are those of a calibration file",
    model_constants=frozenset({"served"}),
)
def expected_attention_stats(
    calibration: Calibration, served: Identity, N_sink: int = 4, N_future: int = 512,
) -> Policy:
    """Return Expected Attention with the mean and the covariance of the queries from a calibration.

    The kept tokens do not depend on the queries of the prompt. The files of the authors leave out the first four tokens
    of each text and divide the covariance by the number of queries minus 1. `kvspec calibrate --covariance` uses all
    tokens, and divides by the number of queries.

    Raises:
        SpecError: if the calibration is for a different model or RoPE, or has no covariance, if N_sink is negative, or
            if N_future is not positive.
    """
    calibration.check(served)
    if calibration.covariance is None:
        raise SpecError(
            "calibration", calibration.digest, "has no covariance: `kvspec calibrate TEXT --covariance` writes it",
        )
    check_whole("N_sink", N_sink)
    scorer = ExpectedAttentionStats(calibration, N_sink, check_positive("N_future", N_future))
    return Policy(
        "expected-attention-stats", scorer, even, top_tokens, SinkAndRecent(N_sink, 0), granularity=Granularity.HEAD,
    )
