"""Segment of a sequence: capture of attention inputs, decision of the policy, and compaction of the cache."""

import copy
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from models_integration.attention.capture import Attended, Recorder
from models_integration.cache.continuation import Continuation, Decision
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.scorer_records import join_layers
from models_integration.model.architecture import Architecture
from models_integration.model.layer_kinds import of_layer
from models_integration.session.cascade import Cascade, can_cascade
from models_integration.session.device_choice import DeviceChoices
from models_integration.session.inputs import ONE_FORWARD, ForwardSpan, check_tokens
from models_integration.session.method import Method
from models_integration.session.rehearsal import rehearse
from models_integration.session.segment_tokens import SegmentTokens
from reference.policies.layers import is_layerwise, policy_of_layer
from reference.policies.retain import tokens_of
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.policy import Needs, Observation
from spec.retention import Granularity

__all__ = ["ObservedSegment", "Segment", "Stopwatch", "decide"]


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
        """Add the time of the `with` block to a stage."""
        outer, self._open = self._open, name
        if self.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(self.device)
            first.record(stream)
            yield
            last.record(stream)
            self._events.append((name, outer, first, last))
        else:
            start = time.perf_counter()
            yield
            self._add(name, outer, time.perf_counter() - start)
        self._open = outer

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


class ObservedSegment:
    """Captured token ids, queries, keys and values of a prompt, a turn or a decode step.

    The model's attention fills an ObservedSegment. Several policies can decide from one ObservedSegment (see `decide`).

    Args:
        needs: tensors to capture.
        cache: cache to which the model appends the tokens.
        rows_per_prompt: number of rows of the batch for each prompt, such as beams or returned sequences.
        lse: if True, also capture the log-sum-exp of layers whose attention computes the log-sum-exp anyway.

    Attributes:
        cache: the given cache. After `observe`, this is the full cache.
        logits: logits (rows, 1, vocabulary) of the last column after `observe`. After `read`, logits of `last` columns.
    """

    def __init__(
        self, needs: Needs, architecture: Architecture, cache: RetainedCache, *, rows_per_prompt: int = 1,
        lse: bool = False,
    ) -> None:
        self.architecture, self.cache, self.rows_per_prompt = architecture, cache, rows_per_prompt
        self.recorder = Recorder(needs, latent=architecture.latent)
        self.text, self.watch = SegmentTokens(), Stopwatch()
        self.logits: Tensor | None = None
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
        self.text.add(ids, is_token)
        self.watch.device = device or ids.device
        if self.later:
            self.recorder.hidden = int((~self.text.is_token).sum(dim=1).max())

    def rehearse(self) -> None:
        """After the prompts, let the model repeat the prompts if the policy needs repetition."""
        rehearsal = self.recorder.needs.rehearsal
        if rehearsal is not None:
            with self.watch.stage("rehearsal"):
                repeats = rehearse(self.architecture, self.cache, self.text.input_ids, rehearsal, self.watch.device)
                self.recorder.rehearsed(repeats)

    @property
    def columns(self) -> int:
        """Number of columns processed so far."""
        return len(self.text)

    @property
    def prompts(self) -> Sequence[int]:
        """First row of each prompt."""
        return range(0, len(self.text.is_token), self.rows_per_prompt)

    @property
    def continuation(self) -> Continuation:
        """State of the policy in the cache, from before the decision about this segment."""
        return self.cache.continuation

    @property
    def layers(self) -> Sequence[int]:
        """Layers whose attention inputs are captured."""
        return self.architecture.watched(self.recorder.needs)

    def wants_lse(self, layer: int) -> bool:
        """Return True if the log-sum-exp of the layer is wanted. Only a first prompt without padding is supported."""
        return self._lse and not self.later and layer in self.layers and self.text.padding is None

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """Record the attention inputs of a layer, after the attention."""
        self.recorder.record(module, seen)

    def prompt(self, row: int, granularity: Granularity) -> Observation:
        """Return the observation of a first prompt, without padding."""
        with self.watch.stage("capture"):
            is_token = self.text.is_token[row]
            ids = self.token_ids(row) if self.recorder.needs.token_ids else None
            views, groups = self.recorder.views(row, is_token, is_token), self._groups(granularity)
            first = groups * self.architecture.full_layers.index(self._decided[0])
            return Observation(int(is_token.sum()), groups, ids, views, first=first)

    def stored(self, row: int, granularity: Granularity) -> Observation:
        """Return the observation of all stored tokens. The heads of a layer must store equally many tokens."""
        with self.watch.stage("capture"):
            return observe_shared(
                self.cache, self.recorder, self.layers, self._groups(granularity), row, self.text.is_token[row]
            )

    def kept_sets(self, row: int, granularity: Granularity) -> tuple[list[IntVector], list[Observation]]:
        """Return the stored positions of each kept set, and one observation of all kept sets or one per kept set."""
        if self.cache.layers_differ:
            with self.watch.stage("capture"):
                return observe_each_set(self.cache, self.recorder, self.architecture, granularity, row)
        observation = self.stored(row, granularity)
        return [self.cache.stored_positions(row).numpy()] * observation.groups, [observation]

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """Return the number of kept sets of one layer: the number of KV heads if heads differ, otherwise 1."""
        return self.cache.full_layers[0].heads if granularity is Granularity.HEAD else 1

    def _groups(self, granularity: Granularity) -> int:
        """Return the number of kept sets that the policy selects."""
        layers = 1 if granularity is Granularity.MODEL else len(self._decided)
        return layers * self.sets_of_a_layer(granularity)

    def token_ids(self, row: int) -> IntVector:
        """Return the token ids of one row, without padding."""
        return self.text.token_ids(row)

    def of_layer(self, layer: int) -> "ObservedSegment":
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


def observe_shared(
    cache: RetainedCache, recorder: Recorder, layers: Sequence[int], groups: int, row: int, queries: Tensor,
) -> Observation:
    """Return the observation of one row. `queries` is the mask (n,) of the columns with tokens of the row."""
    every = slice(None)
    views = {
        layer: recorder.view(layer, row, every, _layer(cache, layer), every, queries) for layer in layers
    }
    return Observation(_seen(cache, row), groups, None, views)


def observe_each_set(
    cache: RetainedCache, recorder: Recorder, architecture: Architecture, granularity: Granularity, row: int,
) -> tuple[list[IntVector], list[Observation]]:
    """Return the stored positions and the observation of each kept set of a row. A kept set is a layer or a head."""
    live: list[IntVector] = []
    shown = []
    for index in architecture.full_layers:
        layer = _layer(cache, index)
        G = of_layer(architecture.config, "num_attention_heads", index) // layer.heads
        size = 1 if granularity is Granularity.HEAD else layer.heads
        for first in range(0, layer.heads, size):
            queries = slice(first * G, (first + size) * G)
            view = recorder.view(index, row, queries, layer, slice(first, first + size))
            live.append(layer.head_positions(row, first).numpy())
            shown.append(Observation(_seen(cache, row), 1, None, {index: view}))
    return live, shown


def _layer(cache: RetainedCache, index: int) -> RetainedLayer:
    layer = cache.layers[index]
    assert isinstance(layer, RetainedLayer)
    return layer


def _seen(cache: RetainedCache, row: int) -> int:
    return int(cache.tokens[row if len(cache.tokens) > 1 else 0])


def decide(method: Method, observed: ObservedSegment) -> Decision:
    """Select the tokens that a policy keeps of each prompt. Several policies can decide from one `observed`.

        decision = kvspec.decide(policy.on(model), observed)
        decision.retentions[0].group(0)     # kept positions of the first kept set

    Args:
        method: policy prepared for the model, which `policy.on(model)` returns.
        observed: result of `observe`.

    Returns:
        Decision with the sets of kept tokens of each prompt. Pass the decision to `compact`.

    Raises:
        SpecError: if the policy needs a tensor that `observe` did not capture, or if the policy does not support the
            prompt.
    """
    policy, budget, rule = method.policy, method.budget, method.continuation
    shown = observed.narrowed(policy.scorer.needs)
    with shown.watch.stage("decision"):
        decision = (rule.decide_turn if shown.later else rule.decide_prompt)(policy, budget, shown)
    return replace(
        decision, over_budget=_over_budget(method, decision), padding=None if shown.later else shown.text.padding
    )


def _over_budget(method: Method, decision: Decision) -> int:
    over = (
        len(one.positions) - tokens_of(method.policy, method.budget, one.seen) * one.groups
        for one in decision.retentions
    )
    return sum(max(0, tokens) for tokens in over)


class Segment:
    """Tokens after which a policy evicts: one forward pass with several queries, or several forward passes.

    A prompt of one forward pass is compacted during this forward pass, so the full cache never exists. A layerwise
    policy and CAKE evict the tokens of a layer immediately after the attention of the layer. If the scorer reads only
    the observed layer, the policy decides after the attention of the observed layer. Then each later layer is compacted
    after the attention of this layer. For all other segments, the policy decides and evicts at the end of the segment.

    Args:
        rows_per_prompt: number of rows of the batch for each prompt, such as beams or returned sequences.
        segment_end: number of columns that the cache has seen at the end of the segment.
    """

    def __init__(
        self, method: Method, architecture: Architecture, cache: RetainedCache, rows_per_prompt: int, segment_end: int,
    ) -> None:
        needs = method.policy.scorer.needs
        self.cache, self.segment_end = cache, segment_end
        self._method = method
        at_once = segment_end == ONE_FORWARD and needs.layers != "all"
        self.observed = ObservedSegment(needs, architecture, cache, rows_per_prompt=rows_per_prompt, lse=at_once)
        alone = segment_end == ONE_FORWARD and not self.observed.later
        cascades = alone and can_cascade(method.policy, architecture)
        self._each_alone = cascades or (alone and is_layerwise(method.policy))
        self._layerwise = at_once or self._each_alone
        self._parts: list[Decision] = []
        """Decisions about single layers."""
        self._choices = (Cascade if cascades else DeviceChoices)(method, cache, rows_per_prompt)
        self._decision: Decision | None = None
        self._decided_at = max(self.observed.layers, default=-1)
        self._full = list(architecture.full_layers)
        """Layers that are not compacted yet."""
        self.layers: Sequence[int] = architecture.full_layers if self._layerwise else self.observed.layers
        """Layers whose attention calls `attended`."""

    def check_goes_on(self, cache: object, ids: Tensor) -> None:
        """Check the cache and the number of rows of the next piece of the segment.

        Raises:
            SpecError: if the cache or the number of rows differs from the earlier pieces.
        """
        rows = len(self.observed.text.is_token)
        if cache is not self.cache:
            raise SpecError("past_key_values", type(cache).__name__, "must be the cache of the unfinished prompt")
        if len(ids) != rows:
            raise SpecError("input_ids", tuple(ids.shape), f"must have {rows} rows, like the unfinished prompt")

    def read(self, span: ForwardSpan, device: torch.device) -> None:
        """Append the columns of a forward pass whose tensors are on `device`."""
        self.observed.read(span.ids, span.is_token, device)
        if self.observed.later and span.padded:
            self.cache.expect(span.is_token)

    def wants_lse(self, layer: int) -> bool:
        """Return the result of `ObservedSegment.wants_lse`."""
        return self.observed.wants_lse(layer)

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """Record, decide and compact as far as possible after the attention of a layer."""
        layer = seen.layer
        if self._each_alone and layer not in self._full:
            return
        if layer in self.observed.layers:
            self.observed.attended(module, seen)
        if self._each_alone:
            self._decide_alone(layer)
        elif self._layerwise and layer >= self._decided_at:
            self._compact(self._full[: bisect_right(self._full, layer)], self._decided())

    def finish(self) -> Decision:
        """End the segment: decide, compact the cache, store the state of the policy, and return the decision.

        Raises:
            SpecError: if a row has fewer than two tokens, or ends with padding.
        """
        check_tokens(self.observed.text.is_token)
        self.observed.rehearse()
        decision = self._decided()
        self._compact(self._full, decision)
        self.cache.continuation, copies = decision.continuation, self.observed.rows_per_prompt
        if copies > 1:
            each = torch.arange(len(decision.retentions), device="cpu").repeat_interleave(copies)
            self.cache.continuation = decision.continuation.select(each)
        return decision

    def _decide_alone(self, layer: int) -> None:
        full = self.observed.architecture.full_layers
        policy = policy_of_layer(self._method.policy, full.index(layer), len(full))
        observed = self.observed.of_layer(layer)
        with self.observed.watch.stage("decision"):
            taken = self._choices.take(layer, policy, observed)
        if taken:
            self._full.remove(layer)
        else:
            part = decide(replace(self._method, policy=policy), observed)
            self._parts.append(part)
            self._compact([layer], part)
        del self.observed.recorder.seen[layer]

    def _decided(self) -> Decision:
        self._parts += self._choices.read(self.observed.text.padding)
        if self._decision is None and self._parts:
            joined = join_layers(self._method.policy, self._parts)
            over = _over_budget(self._method, joined)
            self._decision = replace(joined, over_budget=over, padding=self._parts[0].padding)
        if self._decision is None:
            self._decision = decide(self._method, self.observed)
            self.observed.recorder.seen.clear()
        return self._decision

    def _compact(self, layers: Sequence[int], decision: Decision) -> None:
        with self.observed.watch.stage("compaction"):
            retentions = [one for one in decision.retentions for _ in range(self.observed.rows_per_prompt)]
            self.cache.compact(retentions, decision.padding, layers)
        self._full = [layer for layer in self._full if layer not in layers]
