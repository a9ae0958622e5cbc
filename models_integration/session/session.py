"""A policy at work on a model: the context manager, and the plain function for a loop of one's own."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models_integration.attention.capture import observing
from models_integration.cache.retained_cache import RetainedCache, check_adoptable
from models_integration.model.architecture import describe
from models_integration.model.occupancy import BUSY, check_free
from models_integration.session.crystal_decode import Life
from models_integration.session.decode_step import Step
from models_integration.session.generate import Call, guarded_generate
from models_integration.session.inputs import check_forward, check_prompt
from models_integration.session.preconditions import (
    Place,
    check_goes_on,
    check_hidden,
    check_known,
    check_rows,
    check_turn,
)
from models_integration.session.segment import ONE_FORWARD, OPEN, Segment
from models_integration.session.stream import Stream
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.records import CrystalRetention
from spec.retention import Retention

if TYPE_CHECKING:
    from models_integration.policies.methods import Method

__all__ = ["Session"]

Kept: TypeAlias = CrystalRetention | Retention
"""What was kept of one prompt; with all records if the policy is CrystalCache."""


class Session:
    """A method on a model, for the time of a `with` block; afterwards, what it did.

    Every segment that the model reads inside the block, a prompt or a later turn, is observed, decided and compacted;
    decode steps go on from the compacted cache. The attributes are about the last segment, or the last batch of them:
    rows of different lengths are padded on the left of their first prompt, with the 2D mask that says so. A segment is
    one forward of more than one token, unless it is read inside `with run.prompt():` or in generate's own chunks: its
    end is where the policy decides. In a stream, segments end every C tokens, wherever the forwards end.

    Raises:
        SpecError: when made for a model that cannot be compacted.
    """

    def __init__(self, method: "Method", model: PreTrainedModel) -> None:
        self.backend = method.backend
        """The backend that decides."""
        self.retention: Kept | tuple[Kept, ...] | None = None
        """What was kept, with all records of a first prompt; of a batch, a tuple with one for each. None before."""
        self.cache: RetainedCache | None = None
        """The compacted cache; it lives on after the block."""
        self.timings: dict[str, float] = {}
        """Seconds of the stages capture, decision and compaction."""
        self.bytes_saved = 0
        """Bytes of keys and values that compaction freed, in all rows."""
        self.over_budget = 0
        """Tokens kept beyond the budget in all prompts, because protection alone exceeds it."""
        self._method = method
        self._model = model
        self._architecture = describe(model)
        self._names = tuple(inspect.signature(self._architecture.decoder.forward).parameters)
        self._call: Call | None = None
        self._grouping = False
        self._stream = Stream(method.life.parameters.C) if method.life is not None and method.life.stream else None
        self._step: Tensor | None = None
        self._cache: RetainedCache | None = None
        self._segment: Segment | None = None
        self._decider: Step | None = None
        self._undo: ExitStack | None = None
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
            undo.callback(decoder.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            undo.callback(decoder.register_forward_hook(self._after, always_call=True).remove)
            undo.enter_context(guarded_generate(self._model, self._generating))
            undo.callback(self._close, "its context ended inside a prompt")
            undo.callback(self._abandon)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        assert self._exit is not None
        self._exit.close()

    def _before(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    ) -> tuple[tuple[()], dict[str, Any]]:
        # A forward that was interrupted, by Ctrl-C for one, has not passed `_after`.
        self._abandon()
        if self._stream is not None:
            self._stream.begin()
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        check_forward(arguments, getattr(self._architecture.config, "use_cache", True))
        arguments = {name: value for name, value in arguments.items() if value is not None}
        cache, ids = arguments.get("past_key_values"), arguments["input_ids"]
        if isinstance(cache, RetainedCache) and self._is_step(cache, ids):
            self._before_step(cache, ids)
            defaults = cache.step_inputs(1, ids.device)
        else:
            place = self._place(cache, arguments)
            if self._stream is not None and ids.shape[1] > place.until - place.columns:
                arguments = self._stream.ahead(decoder, arguments, place.until - place.columns)
                cache = arguments["past_key_values"]
                place = self._place(cache, arguments)
            cache, defaults = self._read(cache, arguments["input_ids"], place), place.defaults
        watcher, self._cache, self._undo = self._segment or self._decider, cache, ExitStack()
        if watcher is not None:
            self._undo.enter_context(observing(self._architecture, cache, watcher, watcher.layers))
        elif not cache.uniform:
            self._undo.enter_context(observing(self._architecture, cache))
        return (), {**defaults, **arguments, "past_key_values": cache}

    def _is_step(self, cache: RetainedCache, ids: Tensor) -> bool:
        """One query on a filled cache is a decode step, unless it is a piece of a segment."""
        seen, life = cache.get_seq_length(), self._method.life
        if ids.shape[1] != 1 or seen == 0 or self._grouping:
            return False
        if self._stream is not None:
            return life is not None and life.decode and not self._stream.cutting
        if self._segment is not None:
            return False
        return self._call is None or seen + 1 >= self._call.until

    def _before_step(self, cache: RetainedCache, ids: Tensor) -> None:
        check_rows(cache, ids)
        life, segment = self._method.life, self._segment
        if segment is not None:
            if segment.cache is not cache:
                raise SpecError("past_key_values", type(cache).__name__, "must be the cache of the stream that is open")
            self._finish(segment)
        if life is not None and life.decode:
            check_known(cache)
        states = cache.states
        if life is not None and (states.waiting or states.spliced) and states.steps != life.decode:
            _settle(cache, life)
        if self._method.policy.cadence.every is not None:
            self._decider = Step(self._method, self._architecture, cache)
        self._step = ids

    def _place(self, cache: Any, arguments: Mapping[str, Any]) -> Place:
        """Where a segment starts or goes on.

        Raises:
            SpecError: for tokens that cannot follow; nothing has changed.
        """
        segment, ids = self._segment, arguments["input_ids"]
        if segment is not None:
            check_goes_on(segment, cache, ids)
        filled = isinstance(cache, RetainedCache) and cache.get_seq_length() > 0
        if cache is not None and not filled:
            check_adoptable(cache)
        columns: int = cache.get_seq_length() if filled else 0
        later = filled if segment is None else segment.later
        defaults, past = {}, torch.ones(len(ids), 0, dtype=torch.bool)
        if later:
            check_rows(cache, ids)
            if segment is None:
                check_turn(self._method.policy, cache)
            defaults, tokens = cache.step_inputs(ids.shape[1], ids.device), cache.tokens.expand(len(ids))
            if "attention_mask" in {**defaults, **arguments}:
                past = cache.is_token.expand(len(ids), -1)
        else:
            past = past if segment is None else segment.shown
            tokens = past.sum(dim=1)
        until = self._until(columns) if segment is None else segment.until
        mask = arguments.get("attention_mask", defaults.get("attention_mask"))
        shown, positions = check_prompt(
            self._architecture, {**arguments, "attention_mask": mask}, past, tokens, turn=later,
            whole=until == ONE_FORWARD,
        )
        if not bool(shown.all()):
            if self._stream is not None:
                raise SpecError("attention_mask", "zeros", "the rows of a stream start together: no padding")
            if later:
                check_hidden(self._method.policy, cache)
        if segment is None and later and self._method.life is not None:
            _settle(cache, self._method.life)
        if not bool(past.all() and shown.all()):
            defaults["position_ids"] = positions.to(ids.device)
        return Place(columns, until, shown, defaults)

    def _until(self, columns: int) -> int:
        if self._stream is not None:
            return columns + self._stream.C
        return OPEN if self._grouping else ONE_FORWARD if self._call is None else self._call.until

    def _read(self, cache: Any, ids: Tensor, place: Place) -> RetainedCache:
        if self._segment is None:
            config, first = self._architecture.config, place.columns == 0
            if first:
                cache = RetainedCache(config) if cache is None else RetainedCache.adopt(cache, config)
            copies = max(1, len(ids) // self._call.rows) if first and self._call is not None else 1
            self._segment = Segment(self._method, self._architecture, cache, copies, place.until)
        self._segment.read(ids, place.shown)
        if self._segment.later and not bool(place.shown.all()):
            cache.expect(place.shown)
        return self._segment.cache

    def _after(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._undo is None:
            return None
        if output is None:
            self._abandon()
            return None
        self._undo.close()
        step, self._undo, self._step = self._step, None, None
        if step is not None:
            assert self._cache is not None
            self._after_step(self._cache, step)
            self._decider = None
            return None
        segment = self._segment
        if segment is not None and segment.cache.get_seq_length() >= segment.until:
            self._finish(segment)
        return None if self._stream is None else self._stream.joined(output)

    def _after_step(self, cache: RetainedCache, ids: Tensor) -> None:
        """A token has been decoded: it waits until a breath is due, or the policy decides at once."""
        life, decider = self._method.life, self._decider
        try:
            if decider is not None:
                decider.finish()
            elif life is not None:
                cache.states = cache.states.wait(ids.detach().clone(), steps=life.decode)
                if life.due(cache.states):
                    _settle(cache, life)
        except BaseException:
            cache.fail("a decode step failed")
            raise

    def _abandon(self) -> None:
        """Close a forward that did not come to its end; some layers have its tokens and others do not."""
        if self._undo is not None:
            self._undo.close()
            self._undo = self._segment = self._step = self._decider = None
            assert self._cache is not None
            self._cache.fail("a forward failed half way")

    def _close(self, reason: str) -> None:
        """The context ends: what a stream has read so far is its last segment, any other is given up."""
        self._abandon()
        if self._stream is not None and self._segment is not None:
            self._finish(self._segment)
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        """Give up a prompt that did not come to its end."""
        self._abandon()
        if self._segment is not None:
            segment, self._segment = self._segment, None
            segment.cache.fail(reason)

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Group the forwards inside the block into one prompt: nothing is evicted until the block ends.

        Raises:
            SpecError: inside another such block, or outside the context.
        """
        if self._grouping or self._call is not None or self._exit is None or self._architecture.decoder not in BUSY:
            raise SpecError("prompt()", "a block", "belongs inside the context, and neither in another nor in generate")
        if self._stream is not None:
            raise SpecError("prompt()", "a block", "a stream's segments end every C tokens: no block can hold one open")
        self._grouping = True
        try:
            yield
        except BaseException:
            self._drop("a prompt was left half way")
            raise
        finally:
            self._grouping = False
        self._abandon()
        if self._segment is not None:
            self._finish(self._segment)

    @contextmanager
    def _generating(self, call: Call) -> Iterator[None]:
        if self._grouping:
            raise SpecError("prompt()", "generate", "reads a prompt of its own: not inside the block")
        if self._stream is not None and call.beams > 1:
            raise SpecError("num_beams", call.beams, "beams would change places inside a stream's segment")
        outer, self._call = self._call, call
        try:
            yield
        finally:
            self._call = outer
            self._abandon()
            if self._stream is None:
                self._drop("a prompt was left half way")

    def _finish(self, segment: Segment) -> None:
        self._segment = None
        life, cache = self._method.life, segment.cache
        one, every = segment.columns == 1 and bool(segment.shown.all()), self._method.policy.cadence.every
        if one and (segment.later or self._stream is not None) and every is None:
            # One query is a decode step: its token waits.
            if life is not None and not segment.later:
                cache.states = life.empty(segment.rows)
            self._after_step(cache, segment.ids)
            return
        try:
            kept, timings = segment.finish()
        except BaseException:
            cache.fail("a policy failed on its prompt")
            raise
        retentions = tuple(one.retention if one.records is None else one.records for one in kept)
        self.retention = retentions if len(retentions) > 1 else retentions[0]
        self.cache, self.timings, self.bytes_saved = cache, timings, segment.bytes_saved
        self.over_budget = sum(one.over_budget for one in kept)


def _settle(cache: RetainedCache, life: Life) -> None:
    """The states know all that the cache has seen, and the cache stores what they do: a breath may have evicted.

    Raises:
        SpecError: when they cannot; nothing has changed.
    """
    check_known(cache)
    before, after = cache.states, life.settled(cache.states, cache.observed_keys)
    if before.spliced or any(new.live is not old.live for new, old in zip(after.rows, before.rows, strict=True)):
        cache.compact([Retention.shared(state.stored, state.seen) for state in after.rows])
    cache.states = after
