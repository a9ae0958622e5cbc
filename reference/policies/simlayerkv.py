"""SimLayerKV: a lazy layer, whose last query attends to the first and recent tokens, keeps these tokens only."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reference.policies.attention import observed_attention
from reference.policies.budgets import even
from reference.policies.named import named
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import check_positive
from reference.policies.selectors import top_units
from spec.arrays import BoolVector, Int64, IntVector
from spec.composition import LAYER_SETS, Provided, Required
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Observation, Policy, Scores
from spec.retention import Granularity
from spec.validate import check_whole

__all__ = ["Lazy", "LazyLayers", "lazy_mass", "simlayerkv"]


def lazy_mass(view: LayerView, N_sink: int, N_recent: int) -> float:
    """Return the attention of the last query on the first N_sink and the last N_recent keys, averaged over heads.

    Implements: PO-SIMLAYERKV

    Source: SimLayerKV.
    """
    A = observed_attention(view, 1)[:, 0].mean(axis=0)
    at = np.arange(len(A))
    return float(A[(at < N_sink) | (at >= len(A) - N_recent)].sum())


@dataclass(frozen=True)
class LazyLayers:
    """Scorer in which newer tokens score higher. The preference of a layer is its `lazy_mass`."""

    N_sink: int
    N_recent: int
    needs: Needs = Needs("all", 1)
    separable: ClassVar[bool] = False
    layerwise: ClassVar[bool] = True
    provided: ClassVar[Provided] = Provided(
        sets=LAYER_SETS, preferences=True, preference_constants=frozenset({"N_sink", "N_recent"})
    )

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        n = len(protected)
        rows = np.tile(np.arange(n, dtype=np.float64), (observation.groups, 1))
        masses = [lazy_mass(view, self.N_sink, self.N_recent) for view in observation.layers.values()]
        return Scores(rows, np.arange(n + 1), preferences=np.array(masses))


@dataclass(frozen=True)
class Lazy:
    """Budgets that keep a window of W tokens in each layer whose preference exceeds a threshold."""

    threshold: float
    W: int
    required: ClassVar[Required] = Required(sets=LAYER_SETS, preferences=True, shares="layer", exact=False)

    def __call__(self, total: int, scores: Scores, /) -> Int64[IntVector, " g"]:
        """Return the window for lazy layers, and all tokens for the remaining layers, but at most an even share.

        Implements: PO-SIMLAYERKV
        """
        assert scores.preferences is not None
        n = int(scores.offsets[-1])
        wanted = np.where(scores.preferences > self.threshold, min(self.W, n), n)
        shares: IntVector = np.minimum(even(total, scores), wanted)
        return shares


@named(
    "simlayerkv", "Zhang et al., SimLayerKV (arXiv 2410.13846)",
    "the first and recent tokens in layers whose last query attends mostly to these tokens; all tokens in other layers",
    diverse=False, blocks=False,
)
def simlayerkv(threshold: float = 0.9, N_sink: int = 4, N_recent: int = 1024) -> Policy:
    """Return SimLayerKV: lazy layers keep the first N_sink and the last N_recent tokens, other layers all tokens.

    Use the budget 1.0. With a smaller budget, each layer keeps the first and the newest tokens, up to the budget.
    kvpress recommends the threshold 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral and 0.85 for Qwen. The default
    threshold of kvpress is 1.0, which evicts nothing. SimLayerKVPress in kvpress leaves the last token out of the
    attention, and keeps N_recent - 1 recent tokens.

    Raises:
        SpecError: if the threshold is not a number, if N_sink is negative, or if N_recent is not positive.
    """
    if math.isnan(threshold):
        raise SpecError("threshold", threshold, "must be a number, such as 0.9")
    check_whole("N_sink", N_sink)
    scorer = LazyLayers(N_sink, check_positive("N_recent", N_recent))
    return Policy(
        "simlayerkv", scorer, Lazy(threshold, N_sink + N_recent), top_units, SinkAndRecent(N_sink, N_recent),
        granularity=Granularity.LAYER,
    )
