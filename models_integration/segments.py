"""A segment: what a model reads between two decisions, and what a policy makes of it."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from models_integration.architecture import Architecture
from models_integration.cache import RetainedCache, storage_bytes
from models_integration.capture import Attended, Recorder
from models_integration.inputs import check_tokens
from models_integration.stopwatch import Stopwatch
from reference.policies import retain
from spec.policy import Observation
from spec.records import CrystalRetention
from spec.retention import Retention

if TYPE_CHECKING:
    from models_integration.methods import Method

__all__ = ["ONE_FORWARD", "OPEN", "Kept", "Segment"]

# Columns after which a segment ends: with its first forward, or when it is told to.
ONE_FORWARD, OPEN = 0, sys.maxsize


@dataclass(frozen=True)
class Kept:
    """What a policy decided about one prompt."""

    retention: Retention
    records: CrystalRetention | None
    over_budget: int


class Segment:
    """One forward with more than one query, or the forwards of one prompt that is read in pieces.

    It watches the model's attention. A segment of one forward, whose scorer asks for no more than the observed layer,
    is decided as soon as that layer has attended, and each layer is compacted as soon as it has: the full cache never
    exists. Every other segment is decided and compacted at its end.

    Args:
        copies: rows of the batch that stand for one prompt: beams, or returned sequences.
        until: columns that the cache has seen when the segment is over.
    """

    def __init__(
        self, method: "Method", architecture: Architecture, cache: RetainedCache, copies: int, until: int,
    ) -> None:
        self.cache, self.copies, self.until = cache, copies, until
        self.recorder = Recorder(method.policy.scorer.needs)
        self.padding: Tensor | None = None
        self.bytes_saved = 0
        self._method, self._architecture = method, architecture
        self._ids: list[Tensor] = []
        self._kept: tuple[Kept, ...] | None = None
        self._compacted: set[int] = set()
        self._streams = until == ONE_FORWARD and self.recorder.needs.layers != "all"
        self._watch: Stopwatch | None = None

    @property
    def layers(self) -> Iterable[int]:
        """The layers to watch."""
        if self._streams or self.recorder.needs.layers == "all":
            return self._architecture.full_layers
        return (self._architecture.observed,) if self.recorder.needs.layers == "observed" else ()

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self._ids[0])

    @property
    def _columns(self) -> int:
        return sum(ids.shape[1] for ids in self._ids)

    def read(self, input_ids: Tensor, padding: Tensor | None) -> None:
        """These tokens (rows, n) come next; `padding` (rows,) columns are left of each row's first token so far."""
        self._ids.append(input_ids)
        self.padding = padding
        self._watch = self._watch or Stopwatch(input_ids.device)

    def wants_lse(self, layer: int) -> bool:
        """Only where the forward's sum is over what a single run would see: one forward, no padding."""
        return self._streams and self.padding is None and self._observes(layer)

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """After a layer has attended."""
        layer = cast(int, module.layer_idx)
        if self._observes(layer):
            self.recorder.record(module, seen)
        if self._streams:
            self._decide()
            self._compact([layer])

    def _observes(self, layer: int) -> bool:
        layers = self.recorder.needs.layers
        return layers == "all" or (layers == "observed" and layer == self._architecture.observed)

    def finish(self) -> tuple[tuple[Kept, ...], dict[str, float]]:
        """The end of the segment: what was kept of each prompt, and the seconds of each stage.

        Raises:
            SpecError: when a row has fewer than two tokens.
        """
        assert self._watch is not None
        check_tokens(self._columns, self.padding)
        kept = self._decide()
        self._compact(layer for layer in self._architecture.full_layers if layer not in self._compacted)
        return kept, self._watch.read()

    def _decide(self) -> tuple[Kept, ...]:
        if self._kept is None:
            self._kept = tuple(self._decided(row) for row in range(0, self.rows, self.copies))
            self.recorder.seen.clear()
        return self._kept

    def _decided(self, row: int) -> Kept:
        assert self._watch is not None
        method, needs = self._method, self.recorder.needs
        padding = 0 if self.padding is None else int(self.padding[row])
        seen = self._columns - padding
        with self._watch.stage("capture"):
            ids = None
            if needs.token_ids:
                ids = torch.cat([part[row] for part in self._ids])[padding:].to("cpu", torch.int64).numpy()
            observation = Observation(seen, 1, ids, self.recorder.views(row, padding))
        with self._watch.stage("decision"):
            retention, records = retain(method.policy, method.budget, observation)
        B = max(method.policy.floor, method.budget.tokens(seen))
        return Kept(retention, records, max(0, len(retention.positions) - B))

    def _compact(self, layers: Iterable[int]) -> None:
        assert self._watch is not None
        assert self._kept is not None
        layers = list(layers)
        tensors = [self.cache.layers[layer] for layer in layers]
        before = storage_bytes(tensors)
        with self._watch.stage("compaction"):
            retentions = [kept.retention for kept in self._kept for _ in range(self.copies)]
            self.cache.compact(retentions, self.padding, layers)
        self.bytes_saved += before - storage_bytes(tensors)
        self._compacted.update(layers)
