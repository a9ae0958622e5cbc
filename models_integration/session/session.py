"""A policy at work on a model: the context manager that observes, decides, compacts and goes on."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import observing, untraced
from models_integration.attention.handover import check_handover
from models_integration.cache.retained_cache import RetainedCache, check_adoptable
from models_integration.model.architecture import BUSY, Architecture, check_free, describe, unwrapped
from models_integration.session.generate import NO_CALL, Call, call_of
from models_integration.session.inputs import (
    OPEN,
    Arguments,
    DecoderOutput,
    ForwardSpan,
    Stream,
    WholeForwards,
    check_forward,
    check_mode,
    check_rehearsed,
    first_span,
    later_span,
    step_span,
)
from models_integration.session.method import Method
from models_integration.session.segment import ObservedSegment, Segment
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.records import CrystalRetention
from spec.retention import Retention

__all__ = ["Session"]


@dataclass
class _Forward:
    """A forward of the model that is under way."""

    cache: RetainedCache
    watcher: ObservedSegment | Segment | None
    """Who is told what the layers attend with."""
    defaults: Mapping[str, Tensor]
    """Inputs that it needs, where its caller leaves them out."""
    finish: Callable[[], None]
    """What follows once it has come to its end."""
    undo: ExitStack = field(default_factory=ExitStack)


class Session:
    """A method on a model, for the time of a `with` block; afterwards, what it did.

    Every segment that the model reads inside the block, a prompt or a later turn, is observed, decided and compacted;
    decode steps go on from the compacted cache. The attributes are about the last segment, or the last batch of them:
    rows of different lengths are padded on the left of their first prompt, with the 2D mask that says so. A segment is
    one forward of more than one token, unless it is read inside `with run.prompt():` or in generate's own chunks: its
    end is where the policy decides. In a stream, segments end every C tokens, wherever the forwards end. What is read
    inside `with run.reading():` is no segment.

    Raises:
        SpecError: when made for a model that cannot be compacted.
    """

    def __init__(self, method: Method, model: PreTrainedModel) -> None:
        self.backend = method.backend
        """The backend that decides."""
        self.retention: CrystalRetention | Retention | tuple[CrystalRetention | Retention, ...] | None = None
        """What was kept, with all records of a first prompt; of a batch, a tuple with one for each. None before."""
        self.cache: RetainedCache | None = None
        """The compacted cache; it lives on after the block."""
        self.timings: dict[str, float] = {}
        """Seconds of the stages capture, decision and compaction; of the rehearsal, where the policy has one."""
        self.bytes_saved = 0
        """Bytes of keys and values that compaction freed, in all rows."""
        self.over_budget = 0
        """Tokens kept beyond the budget in all prompts, because protection alone exceeds it."""
        self._method = method
        self._model = unwrapped(model)
        self._architecture = describe(model)
        check_mode(self._architecture, {})
        check_handover(self._architecture, method.policy.scorer.needs, method.policy.granularity)
        self._names = tuple(inspect.signature(self._architecture.decoder.forward).parameters)
        self._call = NO_CALL
        self._block = ""
        C, decode = method.continuation.segment_tokens, method.continuation.decode
        self._stream = WholeForwards() if C is None else Stream(C, decode)
        self._forward: _Forward | None = None
        self._segment: Segment | None = None
        self._exit: ExitStack | None = None

    @property
    def kept(self) -> IntVector | None:
        """Kept absolute positions of the last prompt, ascending; None before a prompt.

        Raises:
            SpecError: after a batch.
        """
        if isinstance(self.retention, tuple):
            raise SpecError("kept", f"{len(self.retention)} prompts", "retention has one for each of them")
        retention = self.retention.retention if isinstance(self.retention, CrystalRetention) else self.retention
        return None if retention is None else retention.positions

    def __enter__(self) -> "Session":
        decoder = self._architecture.decoder
        if self._exit is not None:
            raise SpecError("policy", self._method.policy.name, "a session runs once; call the policy again")
        check_free(self._model)
        with ExitStack() as undo:
            BUSY.add(decoder)
            undo.callback(BUSY.discard, decoder)
            undo.callback(decoder.register_forward_pre_hook(untraced(self._before), with_kwargs=True).remove)
            undo.callback(decoder.register_forward_hook(untraced(self._after), always_call=True).remove)
            undo.enter_context(_guarded_generate(self._model, self._generating))
            undo.callback(self._close)
            undo.callback(self._abandon)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        assert self._exit is not None
        self._exit.close()

    def _before(
        self, decoder: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object],
    ) -> tuple[tuple[()], dict[str, object]]:
        # A forward that was interrupted, by Ctrl-C for one, has not passed `_after`.
        self._abandon()
        self._stream.begin()
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        arguments = check_forward(given, getattr(self._architecture.config, "use_cache", True))
        check_mode(self._architecture, arguments)
        cache, ids = arguments.get("past_key_values"), arguments["input_ids"]
        if self._block == "reading()":
            forward = _reading(self._method, self._architecture, cache, arguments)
        elif isinstance(cache, RetainedCache) and self._is_step(cache, ids):
            if self._segment is not None and self._segment.cache is not cache:
                reason = "must be the cache of the stream that is open"
                raise SpecError("past_key_values", type(cache).__name__, reason)
            span = step_span(self._architecture.vocabulary, arguments, cache)
            if self._segment is not None:
                self._finish(self._segment)
            forward = _step(self._method, self._architecture, cache, ids, span)
        else:
            span = self._span(cache, arguments)
            if self._stream.is_too_long(span):
                arguments = self._stream.ahead(decoder, arguments, span.segment_end - span.padded_seen)
                cache = arguments["past_key_values"]
                span = self._span(cache, arguments)
            forward = self._segment_forward(cache, arguments["input_ids"], span)
        self._forward, cache, watcher = forward, forward.cache, forward.watcher
        if watcher is not None or not cache.uniform:
            layers = () if watcher is None else watcher.layers
            forward.undo.enter_context(observing(self._architecture, cache, watcher, layers))
        return (), {**forward.defaults, **arguments, "past_key_values": cache}

    def _is_step(self, cache: RetainedCache, ids: Tensor) -> bool:
        """One query on a filled cache is a decode step, unless it is a piece of a segment."""
        seen = cache.get_seq_length()
        between = self._segment is None and seen + 1 >= self._call.segment_end
        return ids.shape[1] == 1 and seen > 0 and not self._block and self._stream.is_step(between)

    def _span(self, cache: Any, arguments: Arguments) -> ForwardSpan:
        """Where a segment starts or goes on.

        Raises:
            SpecError: for tokens that cannot follow; nothing has changed.
        """
        segment, method = self._segment, self._method
        if segment is not None:
            segment.check_goes_on(cache, arguments["input_ids"])
            later, segment_end, before = segment.observed.later, segment.segment_end, segment.observed.text.is_token
        else:
            seen = cache.get_seq_length() if isinstance(cache, RetainedCache) else 0
            later, before = seen > 0, torch.ones(len(arguments["input_ids"]), 0, dtype=torch.bool, device="cpu")
            segment_end = self._stream.segment_end(seen, OPEN if self._block else self._call.segment_end)
            if later:
                method.continuation.check_turn(method.policy, cache)
            elif cache is not None:
                check_adoptable(cache)
        if not later:
            span = first_span(self._architecture.vocabulary, arguments, before, segment_end)
            check_rehearsed(method.policy.scorer.needs, span)
            self._stream.check_span(span)
            return span
        span = later_span(self._architecture.vocabulary, arguments, cache, segment_end)
        self._stream.check_span(span)
        if span.padded:
            method.continuation.check_padded(method.policy, cache)
        if segment is None:
            method.continuation.flush_pending(cache)
        return span

    def _segment_forward(self, cache: Any, ids: Tensor, span: ForwardSpan) -> _Forward:
        segment = self._segment
        if segment is None:
            rows_per_prompt = 1
            if span.padded_seen == 0:
                config = self._architecture.config
                cache = RetainedCache(config) if cache is None else RetainedCache.adopt(cache, config)
                rows_per_prompt = max(1, len(ids) // self._call.rows)
            segment = Segment(self._method, self._architecture, cache, rows_per_prompt, span.segment_end)
            self._segment = segment
        segment.read(ids, span.is_token)
        return _Forward(segment.cache, segment, span.defaults, partial(self._end_piece, segment))

    def _end_piece(self, segment: Segment) -> None:
        if segment.cache.get_seq_length() >= segment.segment_end:
            self._finish(segment)

    def _finish(self, segment: Segment) -> None:
        self._segment = None
        cache, observed = segment.cache, segment.observed
        goes_on = observed.later or self._stream.endless
        if goes_on and observed.columns == 1 and observed.text.padding is None:
            # One query is a decode step.
            _end_step(self._method, cache, observed.text.input_ids, observed)
            return
        with _unusable_after_failure(cache, "a policy failed on its prompt"):
            decision = segment.finish()
        kept = decision.records or decision.retentions
        self.retention = kept if len(kept) > 1 else kept[0]
        self.cache, self.timings, self.bytes_saved = cache, observed.watch.read(), segment.bytes_saved
        self.over_budget = decision.over_budget

    def _after(
        self, decoder: nn.Module, args: tuple[object, ...], output: DecoderOutput | None,
    ) -> DecoderOutput | None:
        forward = self._forward
        if forward is None or output is None:
            self._abandon()
            return None
        self._forward = None
        forward.undo.close()
        forward.finish()
        return self._stream.joined(output)

    def _abandon(self) -> None:
        """Close a forward that did not come to its end; some layers have its tokens and others do not."""
        forward = self._forward
        if forward is not None:
            self._forward = self._segment = None
            forward.undo.close()
            forward.cache.fail("a forward failed half way")

    def _drop(self, reason: str) -> None:
        """Give up a prompt that did not come to its end."""
        self._abandon()
        if self._segment is not None:
            segment, self._segment = self._segment, None
            segment.cache.fail(reason)

    def _close(self) -> None:
        """The context ends: what a stream has read so far is its last segment, any other is given up."""
        self._abandon()
        if self._stream.endless and self._segment is not None:
            self._finish(self._segment)
        self._drop("its context ended inside a prompt")

    @contextmanager
    def _inside(self, block: str) -> Iterator[None]:
        """A block of forwards that are read in another way than outside it."""
        outside = self._exit is None or self._architecture.decoder not in BUSY
        if self._block or self._call is not NO_CALL or outside:
            raise SpecError(block, "a block", "belongs inside the context, and neither in another nor in generate")
        self._stream.check_block(block)
        self._block = block
        try:
            yield
        except BaseException:
            self._drop("a prompt was left half way")
            raise
        finally:
            self._block = ""
        self._abandon()

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Group the forwards inside the block into one prompt: nothing is evicted until the block ends.

        Raises:
            SpecError: inside another block, in generate or a stream, or outside the context.
        """
        with self._inside("prompt()"):
            yield
        if self._segment is not None:
            self._finish(self._segment)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read tokens behind a prompt and decide nothing: questions, of any number of tokens in any number of forwards.

        Nothing is evicted, a forward of one token is no decode step, and the next turn or step goes on behind what was
        read. Rows may differ in what they have seen; the texts that are read have no padding.

        Raises:
            SpecError: inside another block, in generate or a stream, or outside the context. Its forwards: on a cache
                that has read no prompt, or that the policy cannot go on from.
        """
        with self._inside("reading()"):
            yield

    @contextmanager
    def _generating(self, call: Call) -> Iterator[None]:
        if self._block:
            raise SpecError(self._block, "generate", "reads a prompt of its own: not inside the block")
        self._stream.check_beams(call.beams)
        outer, self._call = self._call, call
        try:
            yield
        finally:
            self._call = outer
            self._abandon()
            if not self._stream.endless:
                self._drop("a prompt was left half way")


@contextmanager
def _unusable_after_failure(cache: RetainedCache, reason: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        cache.fail(reason)
        raise


def _step(
    method: Method, architecture: Architecture, cache: RetainedCache, ids: Tensor, span: ForwardSpan,
) -> _Forward:
    """A forward of one token (rows, 1) that is a decode step."""
    rule, observed = method.continuation, None
    rule.before_step(method.policy, cache)
    if rule.step_needs.layers != "none":
        observed = ObservedSegment(rule.step_needs, architecture, cache)
        observed.read(ids, span.is_token)
    return _Forward(cache, observed, span.defaults, partial(_end_step, method, cache, ids, observed))


def _end_step(method: Method, cache: RetainedCache, ids: Tensor, observed: ObservedSegment | None) -> None:
    with _unusable_after_failure(cache, "a decode step failed"):
        method.continuation.after_step(method.policy, method.budget, cache, ids, observed)


def _reading(method: Method, architecture: Architecture, cache: object, arguments: Arguments) -> _Forward:
    """A forward inside `reading()`."""
    if not isinstance(cache, RetainedCache) or cache.get_seq_length() == 0:
        raise SpecError("past_key_values", "0 tokens", "reading() goes on from a cache that has read a prompt")
    span, rule = later_span(architecture.vocabulary, arguments, cache, OPEN), method.continuation
    if span.padded:
        raise SpecError("attention_mask", "zeros", "padding is not served inside reading()")
    rule.before_reading(method.policy, cache)
    observed = ObservedSegment(rule.step_needs, architecture, cache)
    observed.read(arguments["input_ids"], span.is_token)

    def end() -> None:
        with _unusable_after_failure(cache, "reading() failed"):
            rule.after_reading(method.policy, method.budget, cache, arguments["input_ids"], observed)

    return _Forward(cache, observed, span.defaults, end)


@contextmanager
def _guarded_generate(
    model: PreTrainedModel, during: Callable[[Call], AbstractContextManager[None]],
) -> Iterator[None]:
    """Let generate refuse what is not served before it starts, and report the call's rows, beams and chunk size."""
    generate = getattr(model, "generate", None)
    if generate is None:
        yield
        return
    had = vars(model).get("generate")

    @wraps(generate)
    def guarded(*args: object, **kwargs: object) -> object:
        with during(call_of(model, args, kwargs)):
            return generate(*args, **kwargs)

    vars(model)["generate"] = guarded
    try:
        yield
    finally:
        if had is None:
            del vars(model)["generate"]
        else:
            vars(model)["generate"] = had
