"""Decoding under a policy that decides again in its steps: H2O, TOVA, R-KV and their kind, on a model's own cache."""

from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor, nn

from models_integration.architecture import Architecture
from models_integration.cache import RetainedCache, RetainedLayer
from models_integration.capture import Attended, Recorder
from models_integration.ragged import RaggedLayer, compact
from models_integration.running import Decoding
from models_integration.visibility import EMPTY
from reference.policies import advance
from spec.errors import SpecError
from spec.policy import Observation, Running
from spec.retention import Granularity, Retention

if TYPE_CHECKING:
    from models_integration.methods import Method

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
        decoding, name = cache.decoding, method.policy.name
        if decoding is None or decoding.policy != name:
            raise SpecError("past_key_values", "tokens without records", f"{name} goes on from its own prompt only")
        stored = [len(cache.full_layers[0].head_positions(row, 0)) for row in range(len(decoding.rows))]
        if stored != [running.live.shape[1] for running in decoding.rows]:
            raise SpecError("past_key_values", "tokens without records", f"{name} has not seen the last tokens of it")
        self.layers = architecture.full_layers
        self._method, self._cache, self._decoding = method, cache, decoding
        self._groups = groups_of(method, architecture, cache)
        self._recorders = [Recorder(method.policy.scorer.needs) for _ in decoding.rows]

    def wants_lse(self, layer: int) -> bool:
        """Of no use for one query."""
        return False

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """After a layer has attended."""
        layer = self._cache.layers[cast(int, module.layer_idx)]
        assert isinstance(layer, RetainedLayer)
        for row, recorder in enumerate(self._recorders):
            k, v = _cached(layer, row)
            recorder.record(module, Attended(seen.query[row : row + 1], k, v, None, seen.options))

    def finish(self) -> None:
        """The end of the step: each row decides for itself; then the cache follows."""
        cache, retentions, after, due = self._cache, [], [], []
        seen = cache.full_layers[0].next_positions(1)[:, 0].expand(len(self._recorders)).tolist()
        for recorder, running, tokens in zip(self._recorders, self._decoding.rows, seen, strict=True):
            observation = Observation(tokens, self._groups, None, recorder.views(0))
            retention, now = advance(self._method.policy, self._method.budget, running, observation)
            retentions.append(self._all_live(now, tokens) if retention is None else retention)
            after.append(now)
            due.append(retention is not None)
        if any(due):
            compact(cache, retentions)
        cache.decoding = Decoding(self._decoding.policy, tuple(after))

    def _all_live(self, running: Running, seen: int) -> Retention:
        groups, live = running.live.shape
        return Retention(running.live.ravel(), live * np.arange(groups + 1), seen, self._method.policy.granularity)


def _cached(layer: RetainedLayer, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values (1, H_kv, live, d) of one row."""
    assert layer.keys is not None
    assert layer.values is not None
    if isinstance(layer, RaggedLayer):
        return layer.row_of(row)
    stored = layer.stored_positions()
    shown = (stored[row if len(stored) > 1 else 0] != EMPTY).to(layer.keys.device)
    return layer.keys[row : row + 1, :, shown], layer.values[row : row + 1, :, shown]
