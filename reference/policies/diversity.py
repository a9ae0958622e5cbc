"""Set-conditioned diversity for any policy that keeps single tokens by score, and two variants from the paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, cast

import numpy as np

from reference.diversity import Signature, signatures, toward_mean
from reference.policies.attention import wide
from reference.policies.budgets import largest_remainder
from reference.policies.selectors import top_tokens, top_units
from spec.arrays import BoolVector, Cube, Float64, Int64, IntMatrix, IntVector
from spec.backend import Backend, DiversityStages, resolve
from spec.composition import Provided, Required, provided_by
from spec.errors import SpecError
from spec.policy import (
    NOTHING_PROMISED,
    JoiningScorer,
    LayerView,
    LayerwiseScorer,
    Needs,
    Observation,
    Policy,
    RunningScorer,
    Scorer,
    Scores,
    Selection,
    Selector,
    SeparableScorer,
)
from spec.retention import Granularity
from spec.validate import check_penalty

__all__ = ["Diverse", "Signed", "diverse", "scheduled", "toward_mean_values"]

GRANULARITIES: Mapping[str, tuple[Granularity, ...]] = {
    "flat": tuple(Granularity), "layer": (Granularity.LAYER, Granularity.HEAD), "head": (Granularity.HEAD,),
}


@dataclass(frozen=True)
class SignedRecords:
    """Records of the host policy's scorer, and a signature for each token of each group."""

    host: object
    signatures: Float64[Cube, "g n d"]


@dataclass(frozen=True)
class Signed:
    """Scorer that adds token signatures to the scores of the host policy."""

    host: Scorer
    mode: Signature

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, layers="all", values=True)

    @property
    def provided(self) -> Provided | None:
        host = provided_by(self.host)
        return None if host is None else replace(host, signatures=True)

    @property
    def separable(self) -> bool:
        """Return True if the host policy is separable and the mode is "head". Other modes average over heads."""
        return self.mode == "head" and isinstance(self.host, SeparableScorer) and self.host.separable

    @property
    def layerwise(self) -> bool:
        """Return True if the host policy is layerwise and the mode is not "flat". "flat" averages over layers."""
        return self.mode != "flat" and isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Implements: DV-POLICY"""
        scores = self.host(self.shown(observation), protected)
        return replace(scores, signatures=signatures(_values(observation.layers), self.mode))

    def shown(self, observation: Observation) -> Observation:
        """Return the observation with only the layers that the host policy needs."""
        layers = list(observation.layers.items())
        shown = {"none": [], "observed": layers[self.host.needs.observed :][:1], "all": layers}[self.host.needs.layers]
        return replace(observation, layers=dict(shown))


@dataclass(frozen=True)
class RunningSigned(Signed):
    """Scorer `Signed` for decoding. A token's signature is computed once, before any layer or head evicts the token."""

    host: RunningScorer

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        scores = super().__call__(observation, protected)
        return replace(scores, carry=SignedRecords(scores.carry, _signatures(scores)))

    def step(self, records: object, observation: Observation, /) -> Scores:
        """Return scores and signatures after a decode step. The new tokens are the last slots of every layer and head.

        Implements: DV-POLICY
        """
        assert isinstance(records, SignedRecords)
        scores = self.host.step(records.host, self.shown(observation))
        old = records.signatures.shape[1]
        new = signatures([v[:, old:] for v in _values(observation.layers)], self.mode)
        new = np.repeat(new, len(records.signatures) // len(new), axis=0)
        all_signatures = np.concatenate([records.signatures, new], axis=1)
        return replace(scores, carry=SignedRecords(scores.carry, all_signatures), signatures=all_signatures)

    def keep(self, records: object, slots: Int64[IntMatrix, "g kept"], /) -> SignedRecords:
        assert isinstance(records, SignedRecords)
        part = len(slots) // len(records.signatures)
        kept = np.stack([records.signatures[g // part][at] for g, at in enumerate(slots)])
        return SignedRecords(self.host.keep(records.host, slots), kept)

    def join(self, records: Sequence[SignedRecords], /) -> SignedRecords:
        assert isinstance(self.host, JoiningScorer)
        host = self.host.join([one.host for one in records])
        return SignedRecords(host, np.concatenate([one.signatures for one in records]))


def _values(layers: Mapping[int, LayerView]) -> list[Cube]:
    if any(view.v is None for view in layers.values()):
        raise SpecError("v", None, "is needed, because signatures are computed from the values")
    return [wide(view.v) for view in layers.values()]


def _signatures(scores: Scores) -> Float64[Cube, "s n d"]:
    if scores.signatures is None:
        raise SpecError(
            "scores.signatures", None, "are needed; use the scorer `Signed`, which adds signatures to scores"
        )
    return scores.signatures


@dataclass(frozen=True)
class Diverse:
    """Selector that keeps protected tokens, then repeatedly adds the token with the largest score - lam * redundancy.

    The redundancy of a token is the largest cosine similarity of its signature to the signature of a kept token.
    """

    stages: DiversityStages
    lam: float
    required: ClassVar[Required] = Required(signatures=True, sequential=True)

    def __post_init__(self) -> None:
        check_penalty(self.lam)

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        """Return the selection. If lam is 0, the host policy without diversity makes the same selection.

        Implements: DV-POLICY
        """
        if self.lam == 0:
            return top_units(scores, budgets, protected)
        V, n = _signatures(scores), len(protected)
        part = len(scores.values) // len(V)
        groups = [
            self.stages.diverse(row, V[g // part], protected, min(int(B), n), self.lam)
            for g, (row, B) in enumerate(zip(scores.values, budgets, strict=True))
        ]
        return Selection(np.concatenate(groups), np.cumsum([0, *map(len, groups)]).astype(np.int64))


@dataclass(frozen=True)
class TowardMean:
    """Selector of the tokens with the largest score + lam * c. A token's c is its signature's cosine with the mean."""

    lam: float
    required: ClassVar[Required] = Required(signatures=True)

    def __post_init__(self) -> None:
        check_penalty(self.lam)

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        prior = np.stack([toward_mean(V) for V in _signatures(scores)])
        values = scores.values + self.lam * np.repeat(prior, len(scores.values) // len(prior), axis=0)
        return top_units(replace(scores, values=values), budgets, protected)


def diverse(
    host: Policy, lam: float = 0.5, mode: str = "flat", backend: str | Backend = "numpy",
) -> Policy:
    """Return the host policy with set-conditioned selection. The scores, budgets and cadence do not change.

    In the paper the host is TriAttention in its global mode, and a token has one signature for the whole cache (mode
    "flat"). Mode "layer" requires a host policy with a separate set of kept tokens for each layer or KV head. Mode
    "head" requires a host policy with a separate set of kept tokens for each KV head.

    Implements: DV-POLICY

    Raises:
        SpecError: if lam is negative or not finite, or if the host policy does not keep the tokens with the best
            scores. Also if the mode requires more sets of kept tokens than the host policy has.
        BackendUnavailable: if the backend cannot run here, or lacks the stage family `diversity`.
    """
    engine = resolve(backend)
    stages = engine.for_decoding().diversity or engine.require_diversity()  # the signatures are on the host
    return _signed(host, mode, "diverse", Diverse(stages, lam))


def toward_mean_values(host: Policy, lam: float = 0.5, mode: str = "flat") -> Policy:
    """Return the host policy with the rule `variant_b`: tokens whose values are near the mean direction are favoured.

    The paper Set-Conditioned Diversity rejects `variant_b`.

    Implements: DV-VARIANT-B

    Raises:
        SpecError: as in `diverse`.
    """
    return _signed(host, mode, "toward-mean", TowardMean(lam))


def _signed(host: Policy, mode: str, name: str, selector: Selector) -> Policy:
    if getattr(host.selector, "func", host.selector) not in (top_units, top_tokens):
        raise SpecError("host", host.name, "must keep single tokens, by their scores alone")
    fits = [name for name, kinds in GRANULARITIES.items() if host.granularity in kinds]
    if mode not in fits:
        raise SpecError(
            "mode", mode,
            f"does not fit the host, which has one kept set for each {host.granularity.value}; use {' or '.join(fits)}",
        )
    old, form = host.scorer, cast(Signature, mode)
    scorer = RunningSigned(old, form) if isinstance(old, RunningScorer) else Signed(old, form)
    named = f"{name}({host.name})"
    return replace(host, name=named, scorer=scorer, selector=selector, promises=NOTHING_PROMISED)


def scheduled(B: int, rounds: int, tilt: int) -> Int64[IntVector, " rounds"]:
    """Return the paper's `schedule`: budgets of successive rounds that fall from B + tilt to B - tilt, with mean B.

    The paper Set-Conditioned Diversity rejects `schedule`.

    Implements: DV-SCHEDULE

    Args:
        B: mean budget, tokens.
        rounds: number of decisions.
        tilt: budget of the first round minus the mean budget, tokens. If tilt is negative, the budgets rise.

    Raises:
        SpecError: if there are fewer than two rounds, or if the budget of a round is not positive.
    """
    if rounds < 2:
        raise SpecError("rounds", rounds, "must be at least 2")
    if not abs(tilt) < B:
        raise SpecError("tilt", tilt, f"must be above {-B} and below {B}")
    return largest_remainder([B + tilt - Fraction(2 * tilt * r, rounds - 1) for r in range(rounds)])
