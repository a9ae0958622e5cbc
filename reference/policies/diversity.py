"""Set-conditioned diversity over any policy that keeps single tokens by their scores; and two rejected rivals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import numpy as np

from reference.diversity import Signature, signatures, toward_mean
from reference.policies.attention import wide
from reference.policies.budgets import largest_remainder
from reference.policies.selectors import top_tokens, top_units
from spec.arrays import BoolVector, Cube, Float64, Int64, IntMatrix, IntVector
from spec.backend import Backend, DiversityStages, resolve
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
    """The host's records, and a signature for each token of each group."""

    host: object
    signatures: Float64[Cube, "g n d"]


@dataclass(frozen=True)
class Signed:
    """The host's scores, with the signatures of the tokens beside them."""

    host: Scorer
    mode: Signature

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, layers="all", values=True)

    @property
    def separable(self) -> bool:
        """A head's own signatures are its own; others are means over heads that have dropped other tokens."""
        return self.mode == "head" and isinstance(self.host, SeparableScorer) and self.host.separable

    @property
    def layerwise(self) -> bool:
        """A flat signature is a mean over layers."""
        return self.mode != "flat" and isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        """Implements: DV-POLICY"""
        scores = self.host(self.shown(observation), protected)
        return replace(scores, signatures=signatures(_values(observation.layers), self.mode))

    def shown(self, observation: Observation) -> Observation:
        """What the host alone would be shown."""
        layers = list(observation.layers.items())
        shown = {"none": [], "observed": layers[self.host.needs.observed :][:1], "all": layers}[self.host.needs.layers]
        return replace(observation, layers=dict(shown))


@dataclass(frozen=True)
class RunningSigned(Signed):
    """The same while tokens are decoded. A signature is made once, when all layers and heads still hold the token."""

    host: RunningScorer

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        scores = super().__call__(observation, protected)
        return replace(scores, carry=SignedRecords(scores.carry, _signatures(scores)))

    def step(self, records: object, observation: Observation, /) -> Scores:
        """The new tokens are the last slots of every layer and head.

        Implements: DV-POLICY
        """
        assert isinstance(records, SignedRecords)
        scores = self.host.step(records.host, self.shown(observation))
        old = records.signatures.shape[1]
        new = signatures([v[:, old:] for v in _values(observation.layers)], self.mode)
        new = np.repeat(new, len(records.signatures) // len(new), axis=0)
        found = np.concatenate([records.signatures, new], axis=1)
        return replace(scores, carry=SignedRecords(scores.carry, found), signatures=found)

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
        raise SpecError("v", None, "signatures are made of values")
    return [wide(view.v) for view in layers.values()]


def _signatures(scores: Scores) -> Float64[Cube, "s n d"]:
    if scores.signatures is None:
        raise SpecError("scores.signatures", None, "tokens are compared by signatures, which `Signed` adds to scores")
    return scores.signatures


@dataclass(frozen=True)
class Diverse:
    """Per group: the protected tokens, then greedily the best by score less redundancy with what is kept."""

    stages: DiversityStages
    lam: float

    def __post_init__(self) -> None:
        check_penalty(self.lam)

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        """At lam = 0 the base policy's own selection.

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
    """Per group: the best tokens by score plus lam times the cosine with the mean signature; no set takes part."""

    lam: float

    def __post_init__(self) -> None:
        check_penalty(self.lam)

    def __call__(self, scores: Scores, budgets: IntVector, protected: BoolVector, /) -> Selection:
        prior = np.stack([toward_mean(V) for V in _signatures(scores)])
        values = scores.values + self.lam * np.repeat(prior, len(scores.values) // len(prior), axis=0)
        return top_units(replace(scores, values=values), budgets, protected)


def diverse(
    host: Policy, lam: float = 0.5, mode: str = "flat", backend: str | Backend = "numpy",
) -> Policy:
    """The host, whose selection of the best tokens is set-conditioned; its scores, budgets and cadence stay.

    The paper's host is TriAttention's global mode with one signature for the whole cache. A signature of a layer needs
    a kept set per layer at least, one of a head a set per head.

    Implements: DV-POLICY

    Raises:
        SpecError: for lam below 0 or not finite, a host that does not keep the best single tokens, or a mode that is
            finer than the host's kept sets.
        BackendUnavailable: when the backend cannot run here, or has no such stage.
    """
    return _signed(host, mode, "diverse", Diverse(resolve(backend).require_diversity(), lam))


def toward_mean_values(host: Policy, lam: float = 0.5, mode: str = "flat") -> Policy:
    """`variant_b`, which the paper rejected: a prior for tokens whose value points where the mean value points.

    Implements: DV-VARIANT-B

    Raises:
        SpecError: as `diverse`.
    """
    return _signed(host, mode, "toward-mean", TowardMean(lam))


def _signed(host: Policy, mode: str, name: str, selector: Selector) -> Policy:
    if getattr(host.selector, "func", host.selector) not in (top_units, top_tokens):
        raise SpecError("host", host.name, "must keep single tokens, by their scores alone")
    if host.granularity not in GRANULARITIES.get(mode, ()):
        raise SpecError("mode", mode, f"no signature for a kept set per {host.granularity.value}")
    old, form = host.scorer, cast(Signature, mode)
    scorer = RunningSigned(old, form) if isinstance(old, RunningScorer) else Signed(old, form)
    named = f"{name}({host.name})"
    return replace(host, name=named, scorer=scorer, selector=selector, promises=NOTHING_PROMISED)


def scheduled(B: int, rounds: int, tilt: int) -> Int64[IntVector, " rounds"]:
    """`schedule`, which the paper rejected: a budget for each round, falling from B + tilt to B - tilt; the mean is B.

    Implements: DV-SCHEDULE

    Args:
        B: the mean.
        rounds: decisions to come.
        tilt: tokens that the first round has above the mean; below 0 the schedule rises.

    Raises:
        SpecError: for less than two rounds, or a tilt that leaves a round without a token.
    """
    if rounds < 2:
        raise SpecError("rounds", rounds, "must be at least 2")
    if not abs(tilt) < B:
        raise SpecError("tilt", tilt, f"must be above {-B} and below {B}")
    return largest_remainder([B + tilt - Fraction(2 * tilt * r, rounds - 1) for r in range(rounds)])
