"""CriticalKV selects half of the tokens by attention, half by attention times the L1 norm of the projected value."""

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
from spec.composition import Provided, Required, provided_by, requires
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


@requires(Required(second="output", device=True))
def two_stages(
    scores: Scores, budgets: IntVector, protected: BoolVector, /, share: Fraction, choose: Choice = best_tokens,
) -> Selection:
    """Select a group's protected tokens, then tokens by first score, then tokens by second score.

    The fraction `share` (rounded down) of the budget that remains after the protected tokens is selected by first
    score.

    Implements: PO-TWO-STAGES

    Source: CriticalKV, Algorithm 1.
    """
    pinned = int(protected.sum())
    first = pinned + (budgets - pinned) * share.numerator // share.denominator
    return staged(scores, first, budgets, protected, choose)


@dataclass(frozen=True)
class TwoScores:
    """Scorer that returns the host policy's scores for the first stage, and second scores for the second stage.

    Budgets are computed from the host policy's scores.

    `W_o` maps the index of a layer to the layer's output projection (H, d, hidden).
    """

    host: Scorer
    W_o: Mapping[int, DeviceArray]
    size: Callable[[DeviceArray, DeviceArray], Matrix] = output_size

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, layers="all", values=True)

    @property
    def provided(self) -> Provided | None:
        host, no_steps = provided_by(self.host), "computes second scores of prompts only: leave the cadence out"
        return None if host is None else replace(host, second="output", no_steps=no_steps)

    @property
    def layerwise(self) -> bool:
        return isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Return the host policy's scores as first scores. A second score is (host score + EPSILON) * ||W_o v||_1.

        Implements: PO-CRITICALKV

        Source: CriticalKV, Algorithm 1.

        Raises:
            SpecError: if a score is negative, or if the values were not captured.
        """
        scores = check_weighable(self.host(observation, protected))
        if any(view.v is None for view in observation.layers.values()):
            raise SpecError("v", None, "is needed, because CriticalKV uses the values")
        size = host_rows([self.size(view.v, self.W_o[layer]) for layer, view in observation.layers.items()])
        return replace(scores, second=(scores.values + EPSILON) * size)


def with_critical_selection(host: Policy, W_o: Mapping[int, DeviceArray], share: Fraction = Fraction(1, 2)) -> Policy:
    """Return the host policy with CriticalKV's two-stage selection.

    The host policy must keep the tokens with the best attention scores in each KV head. The host policy must evict only
    at the end of segments.

    Raises:
        SpecError: if `host` breaks a rule above, or if the share is outside [0, 1]. The returned policy raises
            `SpecError` if a score is negative.
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
    "tokens selected half by SnapKV score, half by the product of SnapKV score and norm of the projected value",
    model_constants=frozenset({"W_o"}), diverse=False,
)
def criticalkv(W_o: Mapping[int, DeviceArray], W: int = 32, kernel: int = 7) -> Policy:
    """Return SnapKV with CriticalKV's two-stage selection.

    The authors' code in kvpress counts the window as part of the first stage. If the window has more tokens than the
    first stage selects, the kvpress code can evict tokens of the window.

    Raises:
        SpecError: if the window is not positive, or if the kernel is even.
    """
    return replace(with_critical_selection(snapkv(W, kernel), W_o), name="criticalkv")


@named(
    "critical-adakv", "Feng et al., CriticalKV (arXiv 2502.03805)",
    "tokens selected by the rule of criticalkv; the heads of a layer share one budget",
    model_constants=frozenset({"W_o"}), diverse=False,
)
def critical_adakv(
    W_o: Mapping[int, DeviceArray], W: int = 32, kernel: int = 7, safeguard: Fraction | int = Fraction(1, 5),
) -> Policy:
    """Return Ada-KV with CriticalKV's two-stage selection in each head.

    Raises:
        SpecError: as in `adakv`.
    """
    return replace(with_critical_selection(adakv(W, kernel, safeguard), W_o), name="critical-adakv")
