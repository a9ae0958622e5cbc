"""Capture of the tokens and attention inputs of a segment, and of KVzip's repetition of a prompt."""

import copy
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import AttentionInputs, Recorder, Repeated, Watcher, observing
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, restored_rotation
from models_integration.model.cache_argument import cache_name
from models_integration.model.layer_kinds import layer_config_value
from reference.policies.kvzip import rehearsal_chunks
from spec.arrays import IntVector
from spec.policy import Needs, Observation, Rehearsal
from spec.retention import Granularity

__all__ = ["ObservedSegment", "Stopwatch"]


class Stopwatch:
    """Measure the seconds of each stage. On CUDA, events on the device measure the stages without a wait.

    The time of an inner stage does not count for the outer stage.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open = ""
        self.device = torch.device("cpu")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a stage, also if the block raises an error."""
        outer, self._open = self._open, name
        start = self._event() if self.device.type == "cuda" else time.perf_counter()
        try:
            yield
        finally:
            self._open = outer
            if isinstance(start, float):
                self._add(name, outer, time.perf_counter() - start)
            else:
                self._events.append((name, outer, start, self._event()))

    def _event(self) -> torch.cuda.Event:
        """Return an event that the device records after all work so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _add(self, name: str, outer: str, seconds: float) -> None:
        self._seconds[name] += seconds
        self._seconds[outer] -= seconds

    def read(self) -> dict[str, float]:
        """Wait for the device, and return the seconds of each stage so far."""
        for name, outer, first, last in self._events:
            last.synchronize()
            self._add(name, outer, first.elapsed_time(last) / 1e3)
        self._events.clear()
        return {name: seconds for name, seconds in self._seconds.items() if name}


class ObservedSegment(Watcher):
    """Captured token ids, queries, keys and values of a prompt, a turn or a decode step.

    The model's attention fills an ObservedSegment. Several policies can decide from one ObservedSegment (see `decide`).

    Args:
        needs: tensors to capture.
        cache: cache to which the model appends the tokens.
        rows_per_prompt: number of rows of the batch for each prompt, such as beams or returned sequences.
        lse: if True, also capture the log-sum-exp of layers whose attention computes the log-sum-exp anyway.

    Attributes:
        cache: the given cache. After `observe`, this is the full cache.
        input_ids: ids of all columns processed so far, (rows, columns).
        is_token: mask (rows, columns): True for a token, False for padding.
        logits: logits (rows, 1, vocabulary) of the last column after `observe`. After `read`, logits of `last` columns.
    """

    def __init__(
        self, needs: Needs, architecture: Architecture, cache: RetainedCache, *, rows_per_prompt: int = 1,
        lse: bool = False,
    ) -> None:
        self.architecture, self.cache, self.rows_per_prompt = architecture, cache, rows_per_prompt
        self.recorder = Recorder(needs, latent=architecture.latent)
        self.input_ids, self.is_token = torch.empty(1, 0, device="cpu"), torch.empty(1, 0, device="cpu")
        self.watch = Stopwatch()
        self.logits: Tensor | None = None
        self.model: PreTrainedModel | None = None
        """Model that `observe` was called with. `decide` prepares policies for this model."""
        self._decided = architecture.full_layers
        """Layers whose kept tokens are selected."""
        self.later = cache.get_seq_length() > 0
        """True if the cache contains earlier segments."""
        self._lse = lse

    def read(self, ids: Tensor, is_token: Tensor, device: torch.device | None = None) -> None:
        """Append columns (rows, n). `is_token` (rows, n) is False for padding.

        Args:
            device: device of the forward pass. Default: the device of `ids`.
        """
        self.watch.device = device or ids.device
        if self.columns:
            ids, is_token = torch.cat([self.input_ids, ids], dim=1), torch.cat([self.is_token, is_token], dim=1)
        self.input_ids, self.is_token = ids, is_token
        if self.later:
            self.recorder.padding = int((~is_token).sum(dim=1).max())

    def rehearse(self) -> None:
        """Let the model repeat the prompts at their end, if the policy needs the repetition."""
        rehearsal = self.recorder.needs.rehearsal
        if rehearsal is not None:
            with self.watch.stage("rehearsal"):
                repeats = rehearse(self.architecture, self.cache, self.input_ids, rehearsal, self.watch.device)
                self.recorder.rehearsed(repeats)

    @property
    def columns(self) -> int:
        """Number of columns processed so far."""
        return self.input_ids.shape[1]

    @property
    def padding(self) -> Tensor | None:
        """Number of padding columns of each row, (rows,). None if no row has padding."""
        return None if bool(self.is_token.all()) else (~self.is_token).sum(dim=1)

    @property
    def prompts(self) -> Sequence[int]:
        """First row of each prompt."""
        return range(0, len(self.is_token), self.rows_per_prompt)

    @property
    def layers(self) -> Sequence[int]:
        """Layers whose attention inputs are captured."""
        return self.architecture.watched(self.recorder.needs)

    def wants_lse(self, layer: int) -> bool:
        """Return True if the log-sum-exp of the layer is wanted. Only a first prompt without padding is supported."""
        return self._lse and not self.later and layer in self.layers and self.padding is None

    def attended(self, module: nn.Module, seen: AttentionInputs) -> None:
        """Record the attention inputs of a layer, after the attention."""
        self.recorder.record(module, seen)

    @property
    def wants_hidden(self) -> bool:
        """True if the scorer uses the hidden states that the attention receives."""
        return self.recorder.needs.hidden

    def prompt(self, row: int, granularity: Granularity) -> Observation:
        """Return the observation of a first prompt, without padding."""
        with self.watch.stage("capture"):
            is_token = self.is_token[row]
            ids = self.token_ids(row) if self.recorder.needs.token_ids else None
            views, groups = self.recorder.views(row, is_token, is_token), self._groups(granularity)
            first = groups * self.architecture.full_layers.index(self._decided[0])
            return Observation(int(is_token.sum()), groups, ids, views, first=first)

    def stored(self, row: int, granularity: Granularity) -> Observation:
        """Return the observation of all stored tokens. The heads of a layer must store equally many tokens."""
        every, queries = slice(None), self.is_token[row]
        with self.watch.stage("capture"):
            views = {
                index: self.recorder.view(index, row, every, layer, every, queries)
                for index, layer in self._retained(self.layers)
            }
            return Observation(self._seen(row), self._groups(granularity), None, views)

    def kept_sets(self, row: int, granularity: Granularity) -> tuple[list[IntVector], list[Observation]]:
        """Return the stored positions of each kept set, and one observation of all kept sets or one per kept set."""
        if not self.cache.layers_differ:
            observation = self.stored(row, granularity)
            return [self.cache.stored_positions(row).numpy()] * observation.groups, [observation]
        live, shown = list[IntVector](), list[Observation]()
        with self.watch.stage("capture"):
            for index, layer in self._retained(self.architecture.full_layers):
                G = layer_config_value(self.architecture.config, "num_attention_heads", index) // layer.heads
                size = 1 if granularity is Granularity.HEAD else layer.heads
                for first in range(0, layer.heads, size):
                    queries, heads = slice(first * G, (first + size) * G), slice(first, first + size)
                    view = self.recorder.view(index, row, queries, layer, heads)
                    live.append(layer.head_positions(row, first).numpy())
                    shown.append(Observation(self._seen(row), 1, None, {index: view}, first=len(shown)))
        return live, shown

    def _retained(self, layers: Sequence[int]) -> Iterator[tuple[int, RetainedLayer]]:
        """Yield the index and the cache layer of each of these full-attention layers."""
        for index in layers:
            layer = self.cache.layers[index]
            assert isinstance(layer, RetainedLayer)
            yield index, layer

    def _seen(self, row: int) -> int:
        return int(self.cache.tokens[row if len(self.cache.tokens) > 1 else 0])

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """Return the number of kept sets of one layer: the number of KV heads if heads differ, otherwise 1."""
        return self.cache.full_layers[0].heads if granularity is Granularity.HEAD else 1

    def _groups(self, granularity: Granularity) -> int:
        """Return the number of kept sets that the policy selects."""
        layers = 1 if granularity is Granularity.MODEL else len(self._decided)
        return layers * self.sets_of_a_layer(granularity)

    def token_ids(self, row: int) -> IntVector:
        """Return the token ids of one row, without padding."""
        ids: IntVector = self.input_ids[row][self.is_token[row]].numpy()
        return ids

    def select_layer(self, layer: int) -> "ObservedSegment":
        """Return an ObservedSegment that has only one layer."""
        one, recorder = copy.copy(self), self.recorder
        one.recorder = replace(recorder, seen={layer: recorder.seen[layer]})
        one._decided = (layer,)
        return one

    def narrowed(self, needs: Needs) -> "ObservedSegment":
        """Return an ObservedSegment that has only the tensors of `needs`.

        Raises:
            SpecError: if a needed tensor was not captured.
        """
        if needs == self.recorder.needs:
            return self
        narrow = copy.copy(self)
        narrow.recorder = self.recorder.narrowed(needs, self.architecture.watched(needs))
        return narrow


class _Watcher(Watcher):
    """Record the queries and keys of each layer, and remove the repeated tokens after the attention of the layer."""

    def __init__(self, cache: RetainedCache) -> None:
        self.cache, self._before = cache.branch(), cache
        self.attention: dict[int, tuple[Tensor, Tensor]] = {}
        self.norms: dict[int, Tensor] = {}

    def attended(self, module: nn.Module, seen: AttentionInputs) -> None:
        """Store the queries and keys of the repeat after the attention of a layer, and restore the layer."""
        index, r = seen.layer, seen.query.shape[2]
        assert seen.hidden is not None
        self.attention[index] = seen.query.detach(), seen.key[:, :, -r:].detach().clone()
        self.norms[index] = seen.hidden.double().norm(dim=-1)
        self.cache.layers[index] = copy.copy(self._before.layers[index])

    @property
    def wants_hidden(self) -> bool:
        """True, because KVzip+ divides by the norms of the hidden states."""
        return True


def rehearse(
    architecture: Architecture, cache: RetainedCache, input_ids: Tensor, rehearsal: Rehearsal, device: torch.device,
) -> dict[int, tuple[Repeated, ...]]:
    """Let the model repeat each chunk after the prompts in a cache. The tensors of the cache are not changed.

    Implements: PO-REHEARSAL

    Args:
        architecture: description of the model.
        cache: cache with all tokens of the prompts.
        input_ids: (rows, n), without padding, on the host.
        rehearsal: settings of the repetition.
        device: device of the model's inputs.

    Returns:
        Queries, keys and norms of each full-attention layer, one entry for each chunk.
    """
    repeats_of_layers: dict[int, list[Repeated]] = {layer: [] for layer in architecture.full_layers}
    rows = [rehearsal_chunks(ids, rehearsal) for ids in input_ids.numpy()]
    for parts in zip(*rows, strict=True):
        (start, stop, _), watcher = parts[0], _Watcher(cache)
        ids = torch.from_numpy(np.stack([one for _, _, one in parts])).to(device, non_blocking=True)
        with (
            torch.no_grad(), restored_rotation(architecture.decoder),
            observing(architecture, watcher.cache, watcher, repeats_of_layers),
        ):
            given = {cache_name(architecture.decoder): watcher.cache}
            architecture.decoder.forward(input_ids=ids, use_cache=True, **given)
        for layer, (q, k) in watcher.attention.items():
            repeats_of_layers[layer].append(Repeated(start, stop, q, k, watcher.norms[layer]))
    return {layer: tuple(repeats) for layer, repeats in repeats_of_layers.items()}
