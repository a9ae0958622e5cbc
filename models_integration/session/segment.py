"""A segment: what a model reads between two decisions, and what a policy makes of it."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from models_integration.attention.capture import Attended, Recorder
from models_integration.cache.retained_cache import RetainedCache, storage_bytes
from models_integration.cache.row_states import RowStates
from models_integration.cache.scorer_records import Decoding
from models_integration.model.architecture import Architecture
from models_integration.session.decode_step import groups_of
from models_integration.session.inputs import check_tokens
from models_integration.session.observations import of_all_sets, of_each_set
from models_integration.session.stopwatch import Stopwatch
from reference.policies import advance_turn, retain, retain_turn, start
from reference.policies.retain import tokens_of
from spec.arrays import IntVector
from spec.decode import DecodeState
from spec.errors import SpecError
from spec.policy import Observation, Running
from spec.records import CrystalRetention
from spec.retention import Retention

if TYPE_CHECKING:
    from models_integration.policies.methods import Method

__all__ = ["ONE_FORWARD", "OPEN", "Kept", "Segment"]

# Columns after which a segment ends: with its first forward, or when it is told to.
ONE_FORWARD, OPEN = 0, sys.maxsize


@dataclass(frozen=True)
class Kept:
    """What a policy decided about one row: of a prompt with all records, if the policy is CrystalCache."""

    retention: Retention
    records: CrystalRetention | None
    over_budget: int
    state: DecodeState | None
    running: Running | None = None
    """What a policy that decides in its steps goes on from."""


class Segment:
    """One forward with more than one query, or the forwards of a prompt, a turn or a stream that come in pieces.

    It watches the model's attention. A segment of one forward, whose scorer asks for no more than the observed layer,
    is decided as soon as that layer has attended, and each layer is compacted as soon as it has: the full cache never
    exists. Every other segment is decided and compacted at its end.

    Args:
        copies: rows of the batch that stand for one prompt: beams, or returned sequences.
        until: columns that the cache has seen when the segment is over.

    Raises:
        SpecError: for a later segment under a policy that asks for the ids of all stored tokens, and has no states.
    """

    def __init__(
        self, method: "Method", architecture: Architecture, cache: RetainedCache, copies: int, until: int,
    ) -> None:
        self.cache, self.copies, self.until = cache, copies, until
        self.recorder = Recorder(method.policy.scorer.needs)
        self.bytes_saved = 0
        self.later = cache.get_seq_length() > 0
        """Whether it goes on from what earlier segments left."""
        if self.later and method.life is None and self.recorder.needs.token_ids:
            raise SpecError("policy", method.policy.name, "reads token ids: it serves one segment of a cache")
        self._method, self._architecture = method, architecture
        self._ids: list[Tensor] = []
        self._shown: list[Tensor] = []
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
    def columns(self) -> int:
        """Columns read so far."""
        return sum(ids.shape[1] for ids in self._ids)

    @property
    def shown(self) -> Tensor:
        """Which of these columns hold a token, (rows, columns)."""
        return torch.cat(self._shown, dim=1)

    @property
    def padding(self) -> Tensor | None:
        """Columns without a token, (rows,); None where there are none."""
        shown = self.shown
        return None if bool(shown.all()) else (~shown).sum(dim=1)

    def read(self, input_ids: Tensor, shown: Tensor) -> None:
        """These columns (rows, n) come next; those `shown` hold a token of their row."""
        self._ids.append(input_ids)
        self._shown.append(shown)
        if self.later:
            self.recorder.hidden = int((~self.shown).sum(dim=1).max())
        self._watch = self._watch or Stopwatch(input_ids.device)

    def wants_lse(self, layer: int) -> bool:
        """Only where the forward's sum is over what a single run would see: one forward, no padding."""
        return self._streams and not self.later and self.padding is None and self._observes(layer)

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
            SpecError: when a row has fewer than two tokens, or ends without one.
        """
        assert self._watch is not None
        check_tokens(self.shown)
        kept = self._decide()
        self._compact(layer for layer in self._architecture.full_layers if layer not in self._compacted)
        running = [one.running for one in kept for _ in range(self.copies) if one.running is not None]
        self.cache.decoding = Decoding(self._method.policy.name, tuple(running)) if running else None
        return kept, self._watch.read()

    @property
    def ids(self) -> Tensor:
        """The tokens read so far, (rows, columns)."""
        return torch.cat(self._ids, dim=1)

    def _decide(self) -> tuple[Kept, ...]:
        if self._kept is None:
            decide = self._continued if self.later else self._decided
            self._kept = tuple(decide(row) for row in range(0, self.rows, self.copies))
            self.recorder.seen.clear()
            states = tuple(kept.state for kept in self._kept for _ in range(self.copies) if kept.state is not None)
            self.cache.states = RowStates(states, self.cache.get_seq_length())
        return self._kept

    def _decided(self, row: int) -> Kept:
        assert self._watch is not None
        method, needs = self._method, self.recorder.needs
        shown = self.shown[row]
        seen = int(shown.sum())
        with self._watch.stage("capture"):
            ids = self._row_ids(row) if needs.token_ids else None
            groups = groups_of(method, self._architecture, self.cache)
            observation = Observation(seen, groups, ids, self.recorder.views(row, shown, shown))
        with self._watch.stage("decision"):
            if method.policy.cadence.every is not None:
                retention, running = start(method.policy, method.budget, observation)
                return self._kept_of(retention, None, None, running)
            retention, records = retain(method.policy, method.budget, observation)
            state = None
            if method.life is not None and records is not None and ids is not None:
                (view,) = observation.layers.values()
                state = method.life.started(records, view, ids)
        return self._kept_of(retention, records, state)

    def _continued(self, row: int) -> Kept:
        """A later segment: states or records take it up; other policies decide anew on all that is stored."""
        assert self._watch is not None
        method, watch = self._method, self._watch
        policy, budget = method.policy, method.budget
        what = (self.cache, self.recorder, self._architecture)
        apart = self.cache.layers_differ and policy.cadence.every is None
        with watch.stage("capture"):
            groups = groups_of(method, self._architecture, self.cache)
            if apart:
                live, shown = of_each_set(*what, policy.granularity, row)
            else:
                shown = [of_all_sets(*what, groups, row, self.shown[row])]
                live = [self.cache.stored_positions(row).numpy()] * groups
        with watch.stage("decision"):
            if method.life is not None:
                (view,) = shown[0].layers.values()
                state = method.life.extended(self.cache.states.rows[row], view, self._row_ids(row))
                return self._kept_of(Retention.shared(state.stored, shown[0].seen), None, state)
            if policy.cadence.every is None:
                heads = groups // len(self._architecture.full_layers)
                return self._kept_of(retain_turn(policy, budget, live, shown, max(1, heads)), None, None)
            assert self.cache.decoding is not None
            running = self.cache.decoding.rows[row]
            retention, running = advance_turn(policy, budget, running, shown[0], self.columns)
            return self._kept_of(retention, None, None, running)

    def _row_ids(self, row: int) -> IntVector:
        ids = torch.cat([part[row] for part in self._ids]).to("cpu", torch.int64)
        tokens: IntVector = ids[self.shown[row]].numpy()
        return tokens

    def _kept_of(
        self, retention: Retention, records: CrystalRetention | None, state: DecodeState | None,
        running: Running | None = None,
    ) -> Kept:
        total = tokens_of(self._method.policy, self._method.budget, retention.seen) * retention.groups
        return Kept(retention, records, max(0, len(retention.positions) - total), state, running)

    def _compact(self, layers: Iterable[int]) -> None:
        assert self._watch is not None
        assert self._kept is not None
        layers = list(layers)
        before = storage_bytes(self.cache.layers[layer] for layer in layers)
        with self._watch.stage("compaction"):
            retentions = [kept.retention for kept in self._kept for _ in range(self.copies)]
            self.cache.compact(retentions, None if self.later else self.padding, layers)
        self.bytes_saved += before - storage_bytes(self.cache.layers[layer] for layer in layers)
        self._compacted.update(layers)
