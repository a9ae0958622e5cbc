"""A segment: what the model shows of it, what a policy decides about it, and its compaction."""

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
    """Adds up what each stage takes; on CUDA between events of the device's queue, so that nobody waits meanwhile.

    A stage inside another is not part of it.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open = ""
        self.device = torch.device("cpu")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside belongs to this stage."""
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
        """Seconds of each stage so far; waits for the device."""
        for name, outer, first, last in self._events:
            last.synchronize()
            self._add(name, outer, first.elapsed_time(last) / 1e3)
        self._events.clear()
        return {name: seconds for name, seconds in self._seconds.items() if name}


class ObservedSegment:
    """What a model has shown of a prompt, a turn or a step: its tokens, and q, k and v of the layers asked for.

    It watches the model's attention. `decide` shows it to policies, to any number of them.

    Args:
        needs: what is noted.
        cache: what the model reads into.
        rows_per_prompt: rows of the batch that stand for one prompt: beams, or returned sequences.
        lse: whether to note the watched layers' log-sum-exp, where their attention computes it on the way.

    Attributes:
        cache: as given; after `observe`, the full cache.
        logits: of the last column, (rows, 1, vocabulary), after `observe`; else None.
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
        """The layers whose kept sets are decided."""
        self.later = cache.get_seq_length() > 0
        """Whether it goes on from what earlier segments left."""
        self._lse = lse

    def read(self, ids: Tensor, is_token: Tensor, device: torch.device | None = None) -> None:
        """These columns (rows, n) come next, and where a token stands in them.

        Args:
            device: of the forward; default: that of ids.
        """
        self.text.add(ids, is_token)
        self.watch.device = device or ids.device
        if self.later:
            self.recorder.hidden = int((~self.text.is_token).sum(dim=1).max())

    def rehearse(self) -> None:
        """The prompts have been read: where it is needed, the model repeats them."""
        rehearsal = self.recorder.needs.rehearsal
        if rehearsal is not None:
            with self.watch.stage("rehearsal"):
                repeats = rehearse(self.architecture, self.cache, self.text.input_ids, rehearsal, self.watch.device)
                self.recorder.rehearsed(repeats)

    @property
    def columns(self) -> int:
        """Columns read so far."""
        return len(self.text)

    @property
    def prompts(self) -> Sequence[int]:
        """The first row of each prompt."""
        return range(0, len(self.text.is_token), self.rows_per_prompt)

    @property
    def continuation(self) -> Continuation:
        """What the cache goes on from before this segment is decided."""
        return self.cache.continuation

    @property
    def layers(self) -> Sequence[int]:
        """The layers that are watched."""
        return self.architecture.watched(self.recorder.needs)

    def wants_lse(self, layer: int) -> bool:
        """Only where the forward's sum is over what a single run would see: a first prompt, no padding."""
        return self._lse and not self.later and layer in self.layers and self.text.padding is None

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """After a watched layer has attended."""
        self.recorder.record(module, seen)

    def prompt(self, row: int, granularity: Granularity) -> Observation:
        """A first prompt, without its padding."""
        with self.watch.stage("capture"):
            is_token = self.text.is_token[row]
            ids = self.token_ids(row) if self.recorder.needs.token_ids else None
            views, groups = self.recorder.views(row, is_token, is_token), self._groups(granularity)
            first = groups * self.architecture.full_layers.index(self._decided[0])
            return Observation(int(is_token.sum()), groups, ids, views, first=first)

    def stored(self, row: int, granularity: Granularity) -> Observation:
        """A later segment over all that the cache stores by now, where the heads of a layer store as many tokens."""
        with self.watch.stage("capture"):
            return observe_shared(
                self.cache, self.recorder, self.layers, self._groups(granularity), row, self.text.is_token[row]
            )

    def kept_sets(self, row: int, granularity: Granularity) -> tuple[list[IntVector], list[Observation]]:
        """A later segment by kept set: the positions that each stores; one observation of all, or one for each."""
        if self.cache.layers_differ:
            with self.watch.stage("capture"):
                return observe_each_set(self.cache, self.recorder, self.architecture, granularity, row)
        observation = self.stored(row, granularity)
        return [self.cache.stored_positions(row).numpy()] * observation.groups, [observation]

    def sets_of_a_layer(self, granularity: Granularity) -> int:
        """Kept sets of one layer: its KV heads where each has its own, otherwise 1."""
        return self.cache.full_layers[0].heads if granularity is Granularity.HEAD else 1

    def _groups(self, granularity: Granularity) -> int:
        """Kept sets that a policy decides."""
        layers = 1 if granularity is Granularity.MODEL else len(self._decided)
        return layers * self.sets_of_a_layer(granularity)

    def token_ids(self, row: int) -> IntVector:
        """The tokens of one row, without padding."""
        return self.text.token_ids(row)

    def of_layer(self, layer: int) -> "ObservedSegment":
        """The same of one layer alone."""
        one, recorder = copy.copy(self), self.recorder
        one.recorder = replace(recorder, seen={layer: recorder.seen[layer]})
        one._decided = (layer,)
        return one

    def narrowed(self, needs: Needs) -> "ObservedSegment":
        """What would have been noted with these needs.

        Raises:
            SpecError: where less was noted.
        """
        if needs == self.recorder.needs:
            return self
        narrow = copy.copy(self)
        narrow.recorder = self.recorder.narrowed(needs, self.architecture.watched(needs))
        return narrow


def observe_shared(
    cache: RetainedCache, recorder: Recorder, layers: Sequence[int], groups: int, row: int, queries: Tensor,
) -> Observation:
    """One row, where the heads of a layer store as many tokens; `queries` are the columns (n,) that are its tokens'."""
    every = slice(None)
    views = {
        layer: recorder.view(layer, row, every, _layer(cache, layer), every, queries) for layer in layers
    }
    return Observation(_seen(cache, row), groups, None, views)


def observe_each_set(
    cache: RetainedCache, recorder: Recorder, architecture: Architecture, granularity: Granularity, row: int,
) -> tuple[list[IntVector], list[Observation]]:
    """Of each kept set of one row: the positions that it stores, and its layer (and head) alone."""
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
    """One forward with more than one query, or the forwards of a prompt, a turn or a stream that come in pieces.

    It watches the model's attention. A prompt of one forward is compacted while it is read, so that the full cache
    never exists. Under a layerwise policy and under CAKE, tokens are evicted as soon as a layer has attended. If the
    scorer reads the observed layer alone, the prompt is decided when that layer has attended. Each later layer is then
    compacted when it has attended. Every other segment is decided and compacted at its end.

    Args:
        rows_per_prompt: rows of the batch that stand for one prompt: beams, or returned sequences.
        segment_end: columns that the cache has seen when the segment is over.
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
        """What was decided about each layer alone."""
        self._choices = (Cascade if cascades else DeviceChoices)(method, cache, rows_per_prompt)
        self._decision: Decision | None = None
        self._decided_at = max(self.observed.layers, default=-1)
        self._full = list(architecture.full_layers)
        """The layers that are to be compacted."""
        self.layers: Sequence[int] = architecture.full_layers if self._layerwise else self.observed.layers
        """The layers to watch."""

    def check_goes_on(self, cache: object, ids: Tensor) -> None:
        """The next piece of this segment.

        Raises:
            SpecError: for another cache, or another number of rows.
        """
        rows = len(self.observed.text.is_token)
        if cache is not self.cache:
            raise SpecError("past_key_values", type(cache).__name__, "must be the cache of the unfinished prompt")
        if len(ids) != rows:
            raise SpecError("input_ids", tuple(ids.shape), f"must have {rows} rows, like the unfinished prompt")

    def read(self, span: ForwardSpan, device: torch.device) -> None:
        """A forward's columns come next; its tensors are on this device."""
        self.observed.read(span.ids, span.is_token, device)
        if self.observed.later and span.padded:
            self.cache.expect(span.is_token)

    def wants_lse(self, layer: int) -> bool:
        """As what is observed."""
        return self.observed.wants_lse(layer)

    def attended(self, module: nn.Module, seen: Attended) -> None:
        """After a layer has attended."""
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
        """The end of the segment: what was kept of each prompt; the cache goes on from there.

        Raises:
            SpecError: when a row has fewer than two tokens, or ends without one.
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
