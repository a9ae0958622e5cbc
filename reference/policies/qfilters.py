"""Q-Filters: a key's score is its projection on the main direction of the model's queries, measured once per model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.calibration import Calibration, Identity
from reference.policies.attention import group_mean, wide
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import WithoutRecords, stacked
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Cube, Float64, Matrix
from spec.composition import Provided
from spec.errors import SpecError
from spec.policy import DeviceArray, LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity

__all__ = ["QFilters", "filter_score", "q_filters", "query_filters"]


def query_filters(q: Float64[Cube, "H m d"], H_kv: int) -> Float64[Matrix, "H_kv d"]:
    """Return the filter of each KV head: the main direction of the queries, averaged over the query heads of a group.

    The main direction of a query head is the first right singular vector of its m queries after RoPE. The sign of the
    direction makes the projection of the mean query positive.

    Implements: PO-Q-FILTERS

    Source: Q-Filters, Section 3.
    """
    main = np.linalg.eigh(np.matmul(q.transpose(0, 2, 1), q))[1][:, :, -1]
    turned = main * np.where(np.einsum("hmd,hd->h", q, main) < 0, -1.0, 1.0)[:, None]
    filters: Matrix = group_mean(turned, H_kv)
    return filters


def filter_score(k: DeviceArray, filters: Float64[Matrix, "H_kv d"]) -> Float64[Matrix, "H_kv n"]:
    """Return the projection of each cached key on the filter of its KV head.

    Implements: PO-Q-FILTERS

    Source: Q-Filters, Section 3.
    """
    projections: Matrix = np.einsum("hnd,hd->hn", wide(k), filters)
    return projections


@dataclass(frozen=True)
class QFilters(WithoutRecords):
    """Scorer with one calibrated direction for each layer and KV head. The scorer reads only cached keys."""

    filters: Float64[Cube, "L H_kv d"]
    layers: tuple[int, ...]
    """Index of the layer of each row of filters."""
    needs: Needs = Needs("all", query_rows=0)
    separable: bool = True
    score: Callable[..., DeviceArray] = filter_score
    layerwise: ClassVar[bool] = True
    provided: ClassVar[Provided] = Provided(no_steps="")

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        return self.step(None, observation)

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Return the projections of all cached keys.

        Implements: PO-Q-FILTERS
        """
        views, first = observation.layers, observation.first
        return stacked(observation, [self.score_layer(layer, view, first) for layer, view in views.items()])

    def score_layer(self, layer: int, view: LayerView, first: int = 0) -> DeviceArray:
        """Return the scores of a layer, (H_kv, n), or of the one KV head with the index `first` among all KV heads.

        Raises:
            SpecError: if the calibration has no filters for this layer, or filters of a different shape.
        """
        filters = self.filters
        if layer not in self.layers:
            raise SpecError("calibration", self.layers, f"has no filters for layer {layer}; run `kvspec calibrate`")
        (heads, _, d), H_kv = view.k.shape, filters.shape[1]
        if heads not in (1, H_kv) or d != filters.shape[2]:
            raise SpecError(
                "calibration", filters.shape,
                f"does not fit keys with shape {tuple(view.k.shape)}; run `kvspec calibrate` with this model",
            )
        at = first % H_kv if heads == 1 else 0
        return self.score(view.k, filters[self.layers.index(layer), at : at + heads])


@named(
    "q-filters", "Godey et al., Q-Filters (arXiv 2503.02812)",
    "tokens whose keys point most in the main direction of the queries, from a calibration file",
    model_constants=frozenset({"served"}),
)
def q_filters(calibration: Calibration, served: Identity) -> Policy:
    """Return Q-Filters: each KV head keeps the B keys with the largest projections on the head's filter.

    The files of the authors store the filters with the opposite sign. QFilterPress in kvpress keeps the keys with the
    smallest projections on these filters. kvspec changes the sign while it reads such a file. The authors' code chooses
    the sign of a direction by the number of positive projections, and the paper by the sum of the projections.

    Raises:
        SpecError: if the calibration is for a different model or RoPE, or has no filters.
    """
    calibration.check(served)
    if calibration.filters is None:
        raise SpecError("calibration", calibration.digest, "has no filters: `kvspec calibrate` writes them")
    scorer = QFilters(calibration.filters, calibration.layers)
    return Policy("q-filters", scorer, even, top_units, SinkAndRecent(0, 0), granularity=Granularity.HEAD)
