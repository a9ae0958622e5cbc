"""VATP: a token's score is the token's score in a host policy (such as H2O) times the L1 norm of the token's value."""

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
from spec.composition import Provided, provided_by
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
from spec.validate import check_whole

__all__ = ["ValueWeighted", "value_norms", "vatp", "with_value_norms"]


def value_norms(v: DeviceArray) -> Float64[Matrix, "H_kv n"]:
    """Return the L1 norm ||v||_1 of the value of each cached token.

    Implements: PO-VATP
    """
    size: Matrix = np.abs(wide(v)).sum(axis=2)
    return size


@dataclass(frozen=True)
class ValueWeighted:
    """Scorer that multiplies the host policy's scores by L1 norms of values. The host's records do not change."""

    host: Scorer
    size: Callable[[DeviceArray], Matrix] = value_norms

    @property
    def needs(self) -> Needs:
        return replace(self.host.needs, layers="all", values=True)

    @property
    def provided(self) -> Provided | None:
        return provided_by(self.host)

    @property
    def separable(self) -> bool:
        """Return True if the host policy's scorer is separable. A value norm belongs to one token of one head."""
        return isinstance(self.host, SeparableScorer) and self.host.separable

    @property
    def layerwise(self) -> bool:
        return isinstance(self.host, LayerwiseScorer) and self.host.layerwise

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        host, sizes = self.read(observation)
        return _weighed(host(observation, protected), sizes)

    def read(self, observation: Observation) -> tuple[Any, Float64[Matrix, "g n"]]:
        """Return the host scorer and the norms of the values.

        If the host computes scores by layer, the scores and the norms are copied to the CPU in one transfer.

        Raises:
            SpecError: if the values were not captured.
        """
        views = observation.layers.values()
        if any(view.v is None for view in views):
            raise SpecError("v", None, "is needed, because VATP uses the values")
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
    """Scorer `ValueWeighted` for policies that evict while decoding."""

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
    """Return the host policy with scores multiplied by value norms.

    The host policy must keep a separate set of tokens for each KV head.

    Attention sinks receive large attention but have small values, so the product of attention and value norm is small.
    To keep the attention sinks, the policy never evicts the first N_sink tokens.

    Raises:
        SpecError: if heads of the host policy share one set of kept tokens, or if N_sink is negative. The returned
            policy raises the error if a score is negative.
    """
    if host.granularity is not Granularity.HEAD:
        raise SpecError("host", host.name, "must have a kept set per layer and KV head")
    check_whole("N_sink", N_sink)
    old = host.scorer
    scorer = RunningValueWeighted(old) if isinstance(old, RunningScorer) else ValueWeighted(old)
    named = replace(host, name=f"vatp({host.name})", scorer=scorer, promises=NOTHING_PROMISED)
    return protecting(named, range(N_sink))


@named(
    "vatp", "Guo et al., VATP (arXiv 2406.12335)",
    "tokens with the largest product of H2O score and norm of the value", diverse=False,
)
def vatp(N_sink: int = 4, backend: str | Backend = "numpy") -> Policy:
    """Return VATP with H2O as host. The policy evicts at each decode step, and raises B to at least 2 N_sink.

    The official code has no default for N_sink, and masks tokens instead of evicting them. The default N_sink = 4 is
    the value of StreamingLLM. With Scissorhands as host, the official code sums attention over the last 400 queries.
    The official code divides the sum of attention by 400, even if there are fewer queries.

    Raises:
        SpecError: if N_sink is negative, or if the backend is unknown.
        BackendUnavailable: as in `h2o`.
    """
    promises = Promises("yes", "yes", "yes", "no", "yes", "yes", "yes")
    return replace(with_value_norms(h2o(backend), N_sink), name="vatp", least=2 * N_sink, promises=promises)
