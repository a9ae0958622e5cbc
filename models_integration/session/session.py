"""The class `Session`: context manager that applies a policy to a model."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from warnings import warn
from weakref import finalize

from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import observing
from models_integration.attention.handover import check_attention_uses_cache_tensors
from models_integration.cache.renumbering import RENUMBERED, numbering_of
from models_integration.cache.retained_cache import RetainedCache, failing_whole
from models_integration.model.architecture import decoder_inputs, describe, position_range, unwrapped
from models_integration.model.cache_argument import cache_name, with_one_cache
from models_integration.session.admission import Admitted, Kind, Place, admit, admit_tokens, check_mode, is_text_marker
from models_integration.session.hooks import NO_CALL, Hold, call_under_way, weakly
from models_integration.session.inputs import Arguments, DecoderOutput, ForwardSpan, accepted
from models_integration.session.method import Method
from models_integration.session.rules import check_same_rule, check_table, rebased
from models_integration.session.segment import Forward, Segment, end_step, reading, step
from models_integration.session.stages import describe_stages
from models_integration.session.streams import Stream
from reference.policies.kept import KeptTokens, count_kept
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.html import html_table
from spec.retention import Retention

__all__ = ["Session"]


class Session:
    """Context manager that applies a policy to a model. The attributes of a session describe the last eviction.

    `policy(model)` returns a session:

        with policy(model) as run:
            output = model.generate(**inputs, max_new_tokens=200)
        print(run.bytes_freed)

    The policy evicts tokens at the end of each segment. A segment is a prompt, or a later turn of more than one token.
    A segment can be one forward pass, all forward passes inside `with run.prompt():`, or all chunks that
    `prefill_chunk_size` makes of a prompt. If CrystalCache has `stream=True`, every segment has C tokens. The policy
    does not evict at the end of text that is processed inside `with run.reading():`. If the prompts of a batch have
    different lengths, pad on the left and pass a 2D mask.

    If two threads call generate on the model, the second call waits until the first call has returned. If a thread
    starts generate inside the block, the policy applies until generate returns. Join the thread before you use the
    attributes of the session.

    Attributes:
        backend: name of the backend that computed the last eviction. If there are several, `backend` has names for the
            scores and for the selection. Before a prompt, `backend` is the backend for a prompt of one forward pass.
        seen: number of tokens that the model has processed so far, in prompts and answers. The last generated token is
            not included, because the model has not processed this token.
        stored: number of tokens in the cache now, averaged over layers and heads. Generated tokens are included.
        retentions: positions of the kept tokens after the last segment, one `Retention` for each prompt of the batch.
            `retentions[0].group(i)` returns the i-th set of kept positions. Before a prompt, the tuple is empty.
        kept: positions of the kept tokens of the last prompt. Raises `SpecError` if layers or heads differ.
        cache: compacted cache of the last segment, or the first cache that the session continues, which you can also
            use after the block. Inside the block, before a prompt, `cache` is None. Without a block, `cache` raises
            `SpecError`, because generate would evict nothing.
        timings: seconds for each step of the last eviction: capture, decision, compaction, rehearsal (only KVzip).
        bytes_freed: bytes of keys and values that the session has freed so far.
        sentence_ends: number of tokens of the last segment that end a sentence. None except for CrystalCache.
        kept_tokens: for each prompt of the batch, the numbers of kept tokens beside the budget, and the reason for a
            larger number. `print(run.kept_tokens[0])` prints one line.
        positions: rule of rotary positions: "kept" or "renumbered".
        over_budget: number of kept tokens minus the budget that you gave, at least 0. If layers or heads keep different
            numbers of tokens, the mean of all sets counts, rounded up. In a batch, the prompt with the largest number
            counts.

    Raises:
        SpecError: if kvspec does not support the model.
    """

    def __init__(self, method: Method, model: PreTrainedModel) -> None:
        self.backend = describe_stages(method)
        self.retentions: tuple[Retention, ...] = ()
        self._cache: RetainedCache | None = None
        self.timings: dict[str, float] = {}
        self.bytes_freed = 0
        self.over_budget = 0
        self.sentence_ends: int | None = None
        self._method = method
        self._model = unwrapped(model)
        self._architecture = describe(model)
        check_mode(self._architecture, {}, method.policy.scorer.needs)
        check_attention_uses_cache_tensors(self._architecture, method.policy.scorer.needs, method.policy.granularity)
        check_table(method.policy, self._architecture)
        self._names = tuple(inspect.signature(self._architecture.decoder.forward).parameters)
        self._inputs = decoder_inputs(self._architecture.decoder)
        self._cache_name = cache_name(self._architecture.decoder)
        self._call = NO_CALL
        self._block = ""
        self.positions = method.positions
        renumbers = method.positions == RENUMBERED
        self._numbering = numbering_of(self._model, self._architecture) if renumbers else None
        self._positions = position_range(self._architecture.config)
        """Number of positions of the model. 0 if the number is unknown."""
        self._warned = False
        self._stream = Stream(method.segment_tokens, method.decode)
        self._wrong: Tensor | None = None
        """Tensor on the device: True if an input of a decode step was wrong. Read once per segment to avoid waits."""
        self._forward: Forward | None = None
        self._segment: Segment | None = None
        # Hooks hold no reference, so a session that is never left ends when the caller has no reference to it.
        hooks = (weakly(one) for one in (self._before, self._after, self._close))
        self._hold = Hold(self._model, self._architecture.decoder, *hooks)
        finalize(self, self._hold.abandon).atexit = False

    @property
    def seen(self) -> int:
        """Number of tokens that the model has processed so far, in prompts and answers."""
        return 0 if self._usable_cache is None else self._usable_cache.get_seq_length()

    @property
    def stored(self) -> float:
        """Number of tokens in the cache now, averaged over layers and heads."""
        return self._usable_cache.mean_length if self._usable_cache is not None and self.seen else 0.0

    @property
    def cache(self) -> RetainedCache | None:
        """Compacted cache. Before a prompt, None.

        Raises:
            SpecError: if the block was not entered.
        """
        if not self._hold.begun:
            reason = "needs a block: type `with policy(model) as run:`, and use run.cache inside or after the block"
            raise SpecError("cache", self._method.policy.name, reason)
        return self._cache

    @property
    def _usable_cache(self) -> RetainedCache | None:
        return self._cache if self._cache is not None and self._cache.failure is None else None

    @property
    def kept(self) -> IntVector | None:
        """Absolute positions of the kept tokens of the last prompt, ascending. Before a prompt, None.

        Raises:
            SpecError: if the last prompt was a batch, or if layers or heads keep different tokens.
        """
        if len(self.retentions) > 1:
            reason = "each prompt of a batch has a separate set of kept tokens: type run.retentions[row].kept"
            raise SpecError("kept", f"{len(self.retentions)} prompts", reason)
        return self.retentions[0].kept if self.retentions else None

    @property
    def kept_tokens(self) -> tuple[KeptTokens, ...]:
        """Numbers of kept tokens of each prompt, beside the budget. Before a prompt, the tuple is empty."""
        return tuple(count_kept(self._method.policy, self._method.budget, one) for one in self.retentions)

    def __repr__(self) -> str:
        method, numbers = self._method, f"seen={self.seen}, stored={self.stored:g}, bytes_freed={self.bytes_freed}"
        kept = f"kept='{most}', " if (most := self._most_kept()) else ""
        return f"Session({method.policy.name!r}, budget={method.budget}, {kept}{numbers})"

    def _repr_html_(self) -> str:
        values = {name: getattr(self, name) for name in ("backend", "seen", "stored", "bytes_freed")}
        kept = {"kept": self._most_kept() or "no prompt yet"}
        return html_table(self._method.policy.name, {"budget": self._method.budget} | kept | values)

    def _most_kept(self) -> KeptTokens | None:
        """Return the numbers of the prompt that exceeds the budget most, or None before a prompt."""
        return max(self.kept_tokens, key=lambda row: row.over_budget, default=None)

    def __enter__(self) -> "Session":
        if self._hold.begun:
            reason = "a session can be used once; write `with policy(model)` again"
            raise SpecError("policy", self._method.policy.name, reason)
        self._hold.enter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._hold.leave()
        if error is None:
            self._check_steps()

    def check_blocks(self) -> None:
        """Raise a SpecError if the policy cannot evict after each block of a prompt."""
        self._method.check_blocks()

    def _check_steps(self) -> None:
        """Raise a SpecError if a decode step had an id, a mask or positions that cannot follow."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            if self._cache is not None:
                self._cache.fail("a decode step was wrong")
            reason = f"each id must lie in [0, {self._architecture.vocabulary}), and masks and positions must continue"
            raise SpecError("input_ids", "a decode step", f"{reason} the tokens seen so far")

    def _before(
        self, decoder: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object],
    ) -> tuple[tuple[()], dict[str, object]]:
        self._hold.claim(self._architecture.name)
        # After an interrupted forward pass (for example by Ctrl-C), `_after` was not called.
        self._abandon()
        self._stream.begin()
        given = with_one_cache({**dict(zip(self._names, args, strict=False)), **kwargs})
        self._begin_call(decoder)
        if given.get("past_key_values") is self._call.empty_cache:
            # `generate` takes the cache for later forward passes from the output of the model.
            given.pop("past_key_values", None)
        admitted = admit(self._place, given)
        check_same_rule(self.positions, admitted.cache)
        forward = self._begin(decoder, admitted)
        self._forward, cache, watcher = forward, forward.cache, forward.watcher
        base = cache.renumber(forward.arguments["input_ids"].shape[1], self._positions)
        self._warn_positions(cache.get_seq_length() + forward.arguments["input_ids"].shape[1] - base)
        if watcher is not None or not cache.uniform or cache.numbering is not None:
            layers = () if watcher is None else watcher.layers
            forward.undo.enter_context(observing(self._architecture, cache, watcher, layers))
        others = {name: value for name, value in forward.arguments.items() if name != "past_key_values"}
        if self._architecture.wraps:
            others = {name: value for name, value in others.items() if not is_text_marker(name, value)}
        inputs = {**accepted(forward.defaults, self._inputs), **others, self._cache_name: cache}
        return (), rebased(inputs, base)

    def _warn_positions(self, end: int) -> None:
        """Warn once if the text is longer than the number of positions of the model."""
        if 0 < self._positions < end and not self._warned:
            rule = "cannot" if self._numbering is not None else "does not"
            warn(
                f"the text has {end} tokens, but {self._architecture.name} was trained for {self._positions}"
                f" positions, and eviction {rule} renumber positions: answers can be wrong. Make the policy with"
                " positions='renumbered' and a budget below that number, set RoPE scaling in the config"
                " (`rope_parameters`), use a model with more positions, or begin a new session", stacklevel=2
            )
            self._warned = True

    def _begin_call(self, decoder: nn.Module) -> None:
        """Store the call of generate that contains the forward pass, if any."""
        call = call_under_way(decoder, self._call)
        if call is self._call:
            return
        if call is not NO_CALL and self._block == "prompt()":
            raise SpecError("generate", "in prompt()", "processes a separate prompt: call it outside run.prompt()")
        self._stream.check_beams(call.beams)
        if not self._stream.endless:
            self._drop("a prompt was not finished")
        self._call = call

    @property
    def _place(self) -> Place:
        return Place(self._architecture, self._method, self._stream, self._call, self._block, self._segment)

    def _begin(self, decoder: nn.Module, admitted: Admitted) -> Forward:
        """Begin a forward pass: a decode step, text inside `reading()`, or a segment or a piece of a segment."""
        known = self._method, self._architecture
        if admitted.kind is Kind.READING:
            return reading(*known, admitted.cache, admitted.arguments, admitted.span)
        if admitted.kind is Kind.STEP:
            if (wrong := admitted.wrong) is not None:
                self._wrong = wrong if self._wrong is None else self._wrong | wrong
            if self._segment is not None:
                self._end(self._segment)
            return step(*known, admitted.cache, admitted.arguments, admitted.span)
        self._check_steps()
        span = admitted.span
        if self._stream.is_too_long(span):
            first_piece = span.segment_end - span.padded_seen
            admitted = admit_tokens(self._place, self._stream.ahead(decoder, admitted.arguments, first_piece))
        return self._segment_forward(admitted.cache, admitted.arguments, admitted.span)

    def _segment_forward(self, cache: Any, arguments: Arguments, span: ForwardSpan) -> Forward:
        segment, ids, freed = self._segment, arguments["input_ids"], getattr(cache, "bytes_freed", 0)
        if segment is None:
            rows_per_prompt = 1
            if span.padded_seen == 0:
                cache = RetainedCache(self._architecture.config) if cache is None else cache
                cache.numbering = self._numbering
                rows_per_prompt = max(1, len(ids) // self._call.rows)
            else:
                self._method.flush_pending(cache)
            segment = Segment(self._method, self._architecture, cache, rows_per_prompt, span.segment_end)
            self._segment = segment
        segment.read(span, ids.device)
        return Forward(segment.cache, segment, arguments, span.defaults, partial(self._end_piece, segment), freed)

    def _end_piece(self, segment: Segment) -> None:
        if segment.cache.get_seq_length() >= segment.segment_end:
            self._finish(segment)

    def _finish(self, segment: Segment) -> None:
        self._segment = None
        cache, observed = segment.cache, segment.observed
        goes_on = observed.later or self._stream.endless
        if goes_on and observed.columns == 1 and observed.padding is None:
            # A single query is treated as a decode step.
            end_step(self._method, cache, observed.input_ids, observed)
            self._cache = cache
            return
        with failing_whole(cache, "a policy failed on its prompt"):
            decision = segment.finish()
        self.retentions, self.backend = decision.retentions, describe_stages(self._method, decision.on_device)
        self.sentence_ends = self._method.count_sentence_ends(observed)
        self._cache, self.timings, self.over_budget = cache, observed.watch.read(), decision.over_budget

    def _end(self, segment: Segment) -> None:
        """Finish a segment between two forward passes, and count the freed bytes."""
        before = segment.cache.bytes_freed
        self._finish(segment)
        self.bytes_freed += segment.cache.bytes_freed - before

    def _after(
        self, decoder: nn.Module, args: tuple[object, ...], output: DecoderOutput | None,
    ) -> DecoderOutput | None:
        if not self._hold.is_claimed:
            return None
        forward = self._forward
        if forward is None or output is None:
            self._abandon()
            return None
        self._forward = None
        forward.undo.close()
        forward.cache.note_ids(forward.arguments["input_ids"])
        forward.finish()
        if self._cache is None and self._segment is None:
            self._cache = forward.cache
        self.bytes_freed += forward.cache.bytes_freed - forward.freed_before
        return self._stream.joined(output)

    def _abandon(self) -> None:
        """Close a forward pass that did not finish. The cache is invalid, because only some layers have the tokens."""
        forward = self._forward
        if forward is not None:
            self._forward = self._segment = None
            forward.undo.close()
            forward.cache.fail("a forward pass failed")

    def _drop(self, reason: str) -> None:
        """Discard a segment that did not finish, and mark the cache as invalid."""
        self._abandon()
        if self._segment is not None:
            segment, self._segment = self._segment, None
            segment.cache.fail(reason)

    def _close(self) -> None:
        """End the context: finish the last segment of a stream, or discard an unfinished segment outside a stream."""
        self._abandon()
        if self._stream.endless and self._segment is not None:
            self._end(self._segment)
        self._drop("the `with policy(model)` block ended inside a prompt")

    @contextmanager
    def _inside(self, block: str) -> Iterator[None]:
        """Context manager for the blocks `prompt()` and `reading()`. `block` is the name of the block."""
        inside = self._block or call_under_way(self._architecture.decoder, self._call) is not NO_CALL
        if inside or not self._hold.is_open:
            raise SpecError(block, "a block", "must be inside `with policy(model)`, outside other blocks and generate")
        self._stream.check_block(block)
        self._drop("a prompt was not finished")
        self._block = block
        try:
            yield
        except BaseException:
            self._drop("a prompt was not finished")
            raise
        finally:
            self._block = ""
        self._abandon()

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Context manager for a prompt that takes several forward passes. The policy evicts when the block ends.

        Raises:
            SpecError: if the block is nested in a second block, is inside `generate` or a stream, or is outside
                `with policy(model)`.
        """
        with self._inside("prompt()"):
            yield
        if self._segment is not None:
            self._end(self._segment)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager for text that the model processes without eviction, such as a question after a document.

            with run.reading():
                output = model.generate(context_and_question, past_key_values=run.cache, max_new_tokens=50)

        Every policy supports `reading()`. If a policy evicts during decoding, the policy also evicts while the model
        generates tokens inside the block. Such a policy does not support padding. For other policies, put the padding
        of a batch of questions between the document and the questions.

        Raises:
            SpecError: if the block is nested in a second block, is inside `generate` or a stream, or is outside
                `with policy(model)`. A forward pass inside the block raises `SpecError` if the cache has no prompt, or
                if the policy cannot continue from the cache.
        """
        with self._inside("reading()"):
            yield
