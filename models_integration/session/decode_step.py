"""Decoding under a policy that decides again in its steps: H2O, TOVA, R-KV and their kind, on a model's own cache."""

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from models_integration.attention.capture import Attended, Recorder
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.scorer_records import Decoding
from models_integration.model.architecture import Architecture
from models_integration.session.observations import of_all_sets
from models_integration.session.preconditions import check_records
from reference.policies import advance
from spec.policy import Running
from spec.retention import Granularity, Retention

if TYPE_CHECKING:
    from models_integration.policies.methods import Method

__all__ = ["Step", "groups_of"]


def groups_of(method: "Method", architecture: Architecture, cache: RetainedCache) -> int:
    """Kept sets that the policy decides."""
    if method.policy.granularity is Granularity.MODEL:
        return 1
    heads = cache.full_layers[0].heads if method.policy.granularity is Granularity.HEAD else 1
    return len(architecture.full_layers) * heads


class Step:
    """One forward with one query, seen by a policy that may evict at its end.

    Raises:
        SpecError: for a cache whose last tokens this policy has not seen.
    """

    def __init__(self, method: "Method", architecture: Architecture, cache: RetainedCache) -> None:
        self._decoding = check_records(method.policy, cache)
        self.layers = architecture.full_layers
        self._method, self._architecture, self._cache = method, architecture, cache
        self._recorder = Recorder(method.policy.scorer.needs)

    def wants_lse(self, layer: int) -> bool:
        """Of no use for one query."""
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """After a layer has attended."""
        self._recorder.record(module, seen)

    def finish(self) -> None:
        """The end of the step: each row decides for itself; then the cache follows."""
        cache, retentions, after, due = self._cache, [], [], []
        groups = groups_of(self._method, self._architecture, cache)
        for row, running in enumerate(self._decoding.rows):
            observation = of_all_sets(cache, self._recorder, self._architecture, groups, row)
            retention, now = advance(self._method.policy, self._method.budget, running, observation)
            retentions.append(self._all_live(now, observation.seen) if retention is None else retention)
            after.append(now)
            due.append(retention is not None)
        if any(due):
            cache.compact(retentions)
        cache.decoding = Decoding(self._decoding.policy, tuple(after))

    def _all_live(self, running: Running, seen: int) -> Retention:
        groups, live = running.live.shape
        return Retention(running.live.ravel(), live * np.arange(groups + 1), seen, self._method.policy.granularity)

