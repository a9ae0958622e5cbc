"""VATP: a token counts by its attention times the size of its value, under any method whose scores are attention."""

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
    """||v||_1 of each cached token.

    Implements: PO-VATP
    """
    size: Matrix = np.abs(wide(v)).sum(axis=2)
    return size


@dataclass(frozen=True)
class ValueWeighted:
    """The host's scores times the norms; its records are its own."""

    host: Scorer
    size: Callable[[DeviceArray], Matrix] = value_norms

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, values=True)

    @property
    def separable(self) -> bool:
        """Each token is weighed by its own value alone."""
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
    """The same while tokens are decoded."""

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
    """Any policy whose KV heads have scores of their own, weighed by values; the first N_sink tokens are kept.

    Sinks have large attention and small values, so that the product would lose them.

    Raises:
        SpecError: when the host keeps one set for all heads; for N_sink below 0; while it runs, for scores below 0.
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
    """H2O weighed by values, decided anew in every decode step; B is at least twice the sinks.

    The official code has no default for the sinks, and masks instead of evicting; its other form, Scissorhands, sums
    the last 400 queries and divides by 400 also where there are fewer. StreamingLLM's 4 sinks are chosen here.

    Raises:
        SpecError: for N_sink below 0, or an unknown backend.
        BackendUnavailable: as `h2o`.
    """
    promises = Promises("yes", "yes", "yes", "no", "yes", "yes", "yes")
    return replace(with_value_norms(h2o(backend), N_sink), name="vatp", floor=2 * N_sink, promises=promises)
