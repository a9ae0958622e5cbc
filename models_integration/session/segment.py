"""Forward passes: segments, after which a policy evicts, decode steps, and text inside `reading()`."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from models_integration.attention.capture import AttentionInputs, Watcher
from models_integration.cache.continuation import Continuation, Decision
from models_integration.cache.retained_cache import RetainedCache, failing_whole
from models_integration.model.architecture import Architecture
from models_integration.session.cascade import Cascade, can_cascade
from models_integration.session.device_choice import DeviceChoices
from models_integration.session.inputs import ONE_FORWARD, Arguments, ForwardSpan, check_tokens
from models_integration.session.method import Method, decide, join_layers
from models_integration.session.observed import ObservedSegment
from reference.policies.layers import is_layerwise, policy_of_layer
from spec.errors import SpecError

__all__ = ["Forward", "Segment", "end_step", "reading", "step"]


class Segment(Watcher):
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
        rows = len(self.observed.is_token)
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

    @property
    def wants_hidden(self) -> bool:
        """True if the policy uses the hidden states that the attention receives."""
        return self.observed.wants_hidden

    def attended(self, module: nn.Module, seen: AttentionInputs) -> None:
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
        check_tokens(self.observed.is_token)
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
        observed = self.observed.select_layer(layer)
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
        self._parts += self._choices.read(self.observed.padding)
        if self._decision is None and self._parts:
            self._decision = join_layers(self._method, self._parts)
        if self._decision is None:
            self._decision = decide(self._method, self.observed)
            self.observed.recorder.seen.clear()
        return self._decision

    def _compact(self, layers: Sequence[int], decision: Decision) -> None:
        with self.observed.watch.stage("compaction"):
            retentions = [one for one in decision.retentions for _ in range(self.observed.rows_per_prompt)]
            self.cache.compact(retentions, decision.padding, layers)
        self._full = [layer for layer in self._full if layer not in layers]


@dataclass
class Forward:
    """Forward pass of the model that has not finished."""

    cache: RetainedCache
    watcher: ObservedSegment | Segment | None
    """Object that receives the attention inputs of the layers. None: no object."""
    arguments: Arguments
    defaults: Mapping[str, Tensor]
    """Inputs that the forward pass needs if the caller leaves them out."""
    finish: Callable[[], None]
    """Function to call after the forward pass."""
    freed_before: int
    """Value of `cache.bytes_freed` before the forward pass, and before pending tokens were processed."""
    undo: ExitStack = field(default_factory=ExitStack)


def step(
    method: Method, architecture: Architecture, cache: RetainedCache, arguments: Arguments, span: ForwardSpan,
) -> Forward:
    """Begin a forward pass of one token (rows, 1) that is a decode step."""
    ids, observed, freed = arguments["input_ids"], None, cache.bytes_freed
    method.before_step(cache)
    if method.step_needs.layers != "none":
        observed = ObservedSegment(method.step_needs, architecture, cache)
        observed.read(ids, span.is_token)
    return Forward(cache, observed, arguments, span.defaults, partial(end_step, method, cache, ids, observed), freed)


def end_step(method: Method, cache: RetainedCache, ids: Tensor, observed: ObservedSegment | None) -> None:
    """Apply the policy after the token of a decode step was appended to the cache."""
    with failing_whole(cache, "a decode step failed"):
        method.after_step(cache, ids, observed)


def reading(
    method: Method, architecture: Architecture, cache: RetainedCache, arguments: Arguments, span: ForwardSpan,
) -> Forward:
    """Begin a forward pass inside `reading()`."""
    freed = cache.bytes_freed
    method.before_reading(cache)
    observed = ObservedSegment(method.step_needs, architecture, cache)
    observed.read(span.ids, span.is_token, arguments["input_ids"].device)
    if span.padded:
        cache.expect(span.is_token)

    def end() -> None:
        with failing_whole(cache, "reading() failed"):
            if span.padded:
                # States of a policy describe rows of equal length. Without a state, the next eviction raises an error.
                cache.continuation = Continuation()
                cache.free_padding()
            method.after_reading(cache, arguments["input_ids"], observed)

    return Forward(cache, observed, arguments, span.defaults, end, freed)
