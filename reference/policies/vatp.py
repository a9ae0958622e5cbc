"""VATP: attention scores of a host policy multiplied by the L1 norms of the values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.policies.attention import wide
from reference.policies.h2o import HeavyHitters, h2o
from reference.policies.named import named
from reference.policies.protections import protecting
from reference.policies.scorers import LayerScorer, check_weighable, host_rows, host_tables
from spec.arrays import BoolVector, Float64, Int64, IntMatrix, Matrix
from spec.backend import Backend
from spec.errors import SpecError
from spec.policy import (
    NOTHING_PROMISED,
    DeviceArray,
    JoiningScorer,
    LayerwiseScorer,
    Needs,
    Observation,
    Policy,
    Promises,
    RunningScorer,
    Scorer,
    Scores,
    SeparableScorer,
)
from spec.retention import Granularity

__all__ = ["ValueWeighted", "value_norms", "vatp", "with_value_norms"]


def value_norms(v: DeviceArray) -> Float64[Matrix, "H_kv n"]:
    """Return ||v||_1 of each cached token.

    Implements: PO-VATP
    """
    size: Matrix = np.abs(wide(v)).sum(axis=2)
    return size


@dataclass(frozen=True)
class ValueWeighted:
    """Scorer that multiplies the host's scores by the norms of the values. The host's records are unchanged."""

    host: Scorer
    size: Callable[[DeviceArray], Matrix] = value_norms

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, values=True)

    @property
    def separable(self) -> bool:
        """Return True if the host is separable: each score is multiplied by the norm of the same token's value."""
        return isinstance(self.host, SeparableScorer) and self.host.separable

    @property
    def layerwise(self) -> bool:
        return isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        host, sizes = self.read(observation)
        return _weighed(host(observation, protected), sizes)

    def read(self, observation: Observation) -> tuple[Any, Float64[Matrix, "g n"]]:
        """The host, which has read its scores if it has some by layer, and the norms: one transfer for both.

        Raises:
            SpecError: when the values were not captured.
        """
        views = observation.layers.values()
        if any(view.v is None for view in views):
            raise SpecError("v", None, "VATP weighs scores by values")
        sizes = [self.size(view.v) for view in views]
        if not isinstance(self.host, LayerScorer | HeavyHitters):
            return self.host, host_rows(sizes)
        scores, norms = host_tables([self.host.score(view) for view in views], sizes)
        rows = iter(np.split(scores, len(views)))
        return replace(self.host, score=lambda _: next(rows)), norms


def _weighed(scores: Scores, sizes: Float64[Matrix, "g n"]) -> Scores:
    """Implements: PO-VATP

    Source: VATP, Section 3.
    """
    return replace(scores, values=check_weighable(scores).values * sizes)


@dataclass(frozen=True)
class RunningValueWeighted(ValueWeighted):
    """`ValueWeighted` for decoding."""

    host: RunningScorer

    def step(self, records: object, observation: Observation, /) -> Scores:
        host, sizes = self.read(observation)
        return _weighed(host.step(records, observation), sizes)

    def keep(self, records: object, slots: Int64[IntMatrix, "g kept"], /) -> object:
        return self.host.keep(records, slots)

    def join(self, records: Sequence[object], /) -> object:
        assert isinstance(self.host, JoiningScorer)
        return self.host.join(records)


def with_value_norms(host: Policy, N_sink: int = 4) -> Policy:
    """Return the host policy with scores multiplied by value norms. The host must score each KV head separately.

    The first N_sink tokens are always kept: sinks have large attention but small values, so the product is small.

    Raises:
        SpecError: if the host keeps one set for all heads, or if N_sink is negative. The policy raises the error if a
            score is negative.
    """
    if host.granularity is not Granularity.HEAD:
        raise SpecError("host", host.name, "must have a kept set per layer and KV head")
    if N_sink < 0:
        raise SpecError("N_sink", N_sink, "must not be negative")
    old = host.scorer
    scorer = RunningValueWeighted(old) if isinstance(old, RunningScorer) else ValueWeighted(old)
    named = replace(host, name=f"vatp({host.name})", scorer=scorer, promises=NOTHING_PROMISED)
    return protecting(named, range(N_sink))


@named(
    "vatp", "Guo et al., VATP (arXiv 2406.12335)",
    "H2O's sums of attention, times the norm of the values", diverse=False,
)
def vatp(N_sink: int = 4, backend: str | Backend = "numpy") -> Policy:
    """Return VATP over H2O, which decides in every decode step. B is raised to at least twice N_sink.

    The official code has no default for N_sink, and masks tokens instead of evicting them. Its second form, with
    Scissorhands, sums over the last 400 queries and divides by 400 even if there are fewer. The default N_sink = 4 is
    that of StreamingLLM.

    Raises:
        SpecError: if N_sink is negative, or if the backend is unknown.
        BackendUnavailable: as in `h2o`.
    """
    promises = Promises("yes", "yes", "yes", "no", "yes", "yes", "yes")
    return replace(with_value_norms(h2o(backend), N_sink), name="vatp", floor=2 * N_sink, promises=promises)
