"""CriticalKV: half of the budget by attention, the rest by attention times what a value gives to the output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from reference.policies.adakv import adakv
from reference.policies.defensivekv import output_size
from reference.policies.named import named
from reference.policies.scorers import check_weighable, host_rows
from reference.policies.selectors import Choice, best_tokens, staged, top_tokens, top_units
from reference.policies.snapkv import snapkv
from spec.arrays import BoolVector, IntVector, Matrix
from spec.errors import SpecError
from spec.policy import (
    NOTHING_PROMISED,
    DeviceArray,
    LayerwiseScorer,
    Needs,
    Observation,
    Policy,
    Scorer,
    Scores,
    Selection,
)
from spec.retention import Granularity

__all__ = ["EPSILON", "TwoScores", "critical_adakv", "criticalkv", "two_stages", "with_critical_selection"]

EPSILON = 1e-4


def two_stages(
    scores: Scores, budgets: IntVector, protected: BoolVector, /, share: Fraction, choose: Choice = best_tokens,
) -> Selection:
    """Per group: the protected tokens, `share` of the rest by score, rounded down, then the best by second score.

    Implements: PO-TWO-STAGES

    Source: CriticalKV, Algorithm 1.
    """
    pinned = int(protected.sum())
    first = pinned + (budgets - pinned) * share.numerator // share.denominator
    return staged(scores, first, budgets, protected, choose)


@dataclass(frozen=True)
class TwoScores:
    """The host's scores, which budgets are shared by; beside them those of the second stage.

    Needs each layer's output projection (H, d, hidden), under the layer's index; so it knows all heads of a layer.
    """

    host: Scorer
    W_o: Mapping[int, DeviceArray]
    size: Callable[[DeviceArray, DeviceArray], Matrix] = output_size

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, values=True)

    @property
    def layerwise(self) -> bool:
        return isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """The host's score plus EPSILON, times the output's size.

        Implements: PO-CRITICALKV

        Source: CriticalKV, Algorithm 1.

        Raises:
            SpecError: for scores below 0, or when the values were not captured.
        """
        scores = check_weighable(self.host(observation, protected))
        if any(view.v is None for view in observation.layers.values()):
            raise SpecError("v", None, "CriticalKV weighs keys by their values")
        size = host_rows([self.size(view.v, self.W_o[layer]) for layer, view in observation.layers.items()])
        return replace(scores, second=(scores.values + EPSILON) * size)


def with_critical_selection(host: Policy, W_o: Mapping[int, DeviceArray], share: Fraction = Fraction(1, 2)) -> Policy:
    """Any policy that keeps the best single tokens of each KV head by attention, at the end of segments.

    Raises:
        SpecError: for a host of another kind, or a share outside [0, 1]; while it runs, for scores below 0.
    """
    if getattr(host.selector, "func", host.selector) not in (top_units, top_tokens):
        raise SpecError("host", host.name, "must keep single tokens, by their scores alone")
    if host.granularity is not Granularity.HEAD or host.cadence.every is not None:
        raise SpecError("host", host.name, "must decide at the end of segments, for each layer and KV head")
    if not 0 <= share <= 1:
        raise SpecError("share", share, "must lie in [0, 1]")
    return replace(
        host, name=f"critical({host.name})", scorer=TwoScores(host.scorer, W_o),
        selector=partial(two_stages, share=share), promises=NOTHING_PROMISED,
    )


@named(
    "criticalkv", "Feng et al., CriticalKV (arXiv 2502.03805)",
    "SnapKV's tokens in two stages, the second by projected values", of_model=frozenset({"W_o"}), diverse=False,
)
def criticalkv(W_o: Mapping[int, DeviceArray], W: int = 32, kernel: int = 7) -> Policy:
    """SnapKV's scores and window, in two stages.

    The authors' code is kvpress's: there the window takes its part of the first stage, and where it does not fit it,
    the rest of the window can be evicted.

    Raises:
        SpecError: for a window that is not positive, or an even kernel.
    """
    return replace(with_critical_selection(snapkv(W, kernel), W_o), name="criticalkv")


@named(
    "critical-adakv", "Feng et al., CriticalKV (arXiv 2502.03805)",
    "Ada-KV's budgets; two stages in each head, the second by projected values",
    of_model=frozenset({"W_o"}), diverse=False,
)
def critical_adakv(
    W_o: Mapping[int, DeviceArray], W: int = 32, kernel: int = 7, safeguard: Fraction | int = Fraction(1, 5),
) -> Policy:
    """Ada-KV's budgets, shared by its scores; then two stages in each head.

    Raises:
        SpecError: as `adakv`.
    """
    return replace(with_critical_selection(adakv(W, kernel, safeguard), W_o), name="critical-adakv")
